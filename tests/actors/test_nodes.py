"""A Ray of several nodes: one that is killed, and how many sessions each takes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from greenroom.actors.supervisor import default_size
from greenroom.runtime.journal import OUTCOME_UNKNOWN

pytestmark = pytest.mark.ray

SCENES = Path(__file__).parents[1] / "many_nodes.py"


def played(scene: str, folder: Path) -> dict[str, Any]:
    """What many_nodes.py says of the scene; a Ray of its own in a process of its own."""
    done = subprocess.run(
        [sys.executable, str(SCENES), scene, str(folder)],
        env=os.environ | {"RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0", "RAY_USAGE_STATS_ENABLED": "0"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return dict(json.loads(done.stdout.splitlines()[-1]))


def test_the_sessions_of_a_killed_node_go_on_elsewhere_with_the_last_snapshot(tmp_path: Path) -> None:
    seen = played("killed_node", tmp_path)
    print(f"\n{json.dumps({'failure': 'worker node', 'finished_ms': seen['seconds'] * 1000})}")
    assert (seen["status"], seen["epoch"], seen["was_on"], seen["is_on"]) == ("completed", 2, "home1", "home2")
    assert seen["results"][3] == OUTCOME_UNKNOWN
    output = json.loads(seen["results"][4])["output"]
    assert output.startswith("kept\ntoo\n")
    assert "lost" not in output
    (told,) = seen["told"]
    assert "bash in step 3." in told
    assert seen["left"] == []


def test_a_node_runs_no_more_sessions_than_it_has_places_for(tmp_path: Path) -> None:
    seen = played("places", tmp_path)
    assert seen["size"] == 3
    assert seen["most"] == {"home1": 1, "home2": 2}
    assert seen["ended"] == ["completed"] * 8


@pytest.mark.parametrize(
    ("resources", "slots", "size"),
    [
        ({"CPU": 4.0, "memory": 64e9}, None, 16),
        ({"CPU": 64.0, "memory": 3e9}, None, 10),
        ({"CPU": 0.0}, None, 2),
        ({"CPU": 64.0, "memory": 1e12}, None, 64),
        ({"CPU": 4.0, "memory": 64e9, "place": 7.0}, "place", 7),
        ({"CPU": 4.0, "memory": 64e9}, "place", 16),  # its nodes are yet to come
    ],
)
def test_the_size_that_a_pool_chooses(resources: dict[str, float], slots: str | None, size: int) -> None:
    assert default_size(resources, slots) == size
