"""Scenes on a Ray of several nodes, each run in a process of its own: `many_nodes.py SCENE FOLDER` prints JSON.

A node is known by the home folder in its environment.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import psutil
import ray
from ray.cluster_utils import Cluster
from scenes import alive, bash, results, scripted, until

from greenroom import PoolConfig, SandboxSpec, connect
from greenroom.testing import strict_history

PLACES = "greenroom_session"
QUICK_TO_NOTICE = {
    "health_check_initial_delay_ms": 0,
    "health_check_period_ms": 500,
    "health_check_failure_threshold": 3,
}
POOL = PoolConfig(slot_resource=PLACES, min_idle=0)


class Nodes:
    """A head that runs no sessions, and workers."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        head = {"num_cpus": 1, "include_dashboard": False, "object_store_memory": 100 * 2**20}
        self._cluster: Any = Cluster(initialize_head=True, head_node_args=head | {"_system_config": QUICK_TO_NOTICE})
        self._count = 0

    @property
    def address(self) -> str:
        return str(self._cluster.address)

    def add(self, places: int) -> Any:
        self._count += 1
        home = str(self._folder / f"home{self._count}")
        return self._cluster.add_node(
            num_cpus=1,
            resources={PLACES: places},
            object_store_memory=100 * 2**20,
            env_vars={"GREENROOM_HOME": home},
        )

    def kill(self, node: Any) -> None:
        self._cluster.remove_node(node, allow_graceful=False)

    def end(self) -> None:
        ray.shutdown()
        self._cluster.shutdown()


def home_of(pid: int) -> str:
    """Names the node that the process runs on."""
    return Path(psutil.Process(pid).environ()["GREENROOM_HOME"]).name


async def killed_node(folder: Path) -> dict[str, Any]:
    """The only worker is killed in the middle of a command; another one has come meanwhile."""
    nodes = Nodes(folder)
    first = nodes.add(2)
    marker = f"{600 + time.time_ns() % 10**9}"
    agent = scripted(
        bash("echo kept > file"),
        bash("echo too >> file"),
        bash("echo lost >> file"),
        bash(f"echo lost too >> file; sleep 600 # {marker}"),
        bash("cat file; pwd"),
        "done",
        sandbox=SandboxSpec(kind="host", snapshot_every=2),
    )
    async with connect(nodes.address, f"sqlite:///{folder}/g.db", pool=POOL) as runtime:
        session = await runtime.create_session(agent)
        run = asyncio.ensure_future(session.run("go"))
        await until(lambda: alive(f"# {marker}"), "the fourth command runs", 60)
        before = await runtime.supervisor().actor_of(session.id)
        assert before is not None
        was_on = home_of(await before.pid())
        nodes.add(2)
        began = time.monotonic()
        nodes.kill(first)
        shutil.rmtree(Path(os.environ["GREENROOM_HOME"]) / "workspaces" / session.id)  # it was on that machine's disk
        result = await asyncio.wait_for(run, 120)
        took = time.monotonic() - began
        after = await runtime.supervisor().actor_of(session.id)
        assert after is not None
        transcript = await session.transcript()
        strict_history(transcript.messages)
        found = {
            "status": result.status,
            "epoch": (await session.status()).epoch,
            "was_on": was_on,
            "is_on": home_of(await after.pid()),
            "results": [block.text for block in results(transcript)],
            "told": [message.text for message in transcript.messages if "last snapshot" in message.text],
            "seconds": round(took, 1),
            "left": alive(f"# {marker}"),
        }
        await runtime.stop_pool()
    nodes.end()
    return found


async def places(folder: Path) -> dict[str, Any]:
    """Eight sessions on a node with one place and one with two: how many ran at once on each."""
    nodes = Nodes(folder)
    for count in (1, 2):
        nodes.add(count)
    most: Counter[str] = Counter()
    async with connect(nodes.address, f"sqlite:///{folder}/g.db", pool=POOL) as runtime:
        ends: list[Any] = []

        async def run_all() -> None:
            async for end in runtime.map(scripted(bash("sleep 1"), "done"), ["go"] * 8):
                ends.append(end)

        running = asyncio.ensure_future(run_all())
        size = (await runtime.pool_status()).size
        while not running.done():
            now: Counter[str] = Counter()
            for sid in (await runtime.pool_status()).busy:
                actor = await runtime.supervisor().actor_of(sid)
                if actor is not None:
                    now[home_of(await actor.pid())] += 1
            most |= now
            await asyncio.sleep(0.1)
        await running
        await runtime.stop_pool()
    nodes.end()
    return {"size": size, "most": dict(most), "ended": [end.result.status for end in ends]}


if __name__ == "__main__":
    os.environ["GREENROOM_HOME"] = f"{sys.argv[2]}/home"
    scene = {"killed_node": killed_node, "places": places}[sys.argv[1]]
    print(json.dumps(asyncio.run(scene(Path(sys.argv[2])))))
