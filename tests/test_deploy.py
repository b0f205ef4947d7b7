"""The files for clusters: each is one that its reader takes, and what they call is there."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import ray
import yaml
from kuberay import SCHEMAS
from typer.main import get_command

from greenroom.cli import app

ROOT = Path(__file__).parents[1]
DEPLOY = ROOT / "deploy"


def kuberay_file(name: str) -> dict[str, Any]:
    document: dict[str, Any] = yaml.safe_load((DEPLOY / name).read_text())
    return document


def groups(document: dict[str, Any]) -> list[dict[str, Any]]:
    spec = document["spec"].get("rayClusterSpec", document["spec"])
    return [spec["headGroupSpec"], *spec["workerGroupSpecs"]]


def check_batch_command(words: list[str]) -> None:
    """Reads the command as the command line would, and runs nothing."""
    assert words[:3] == ["greenroom", "batch", "run"]
    group: Any = get_command(app)
    command = group.commands["batch"].commands["run"]
    command.make_context("run", words[3:])


def test_the_cluster_file_is_one_that_ray_takes() -> None:
    schema = json.loads((Path(ray.__file__).parent / "autoscaler" / "ray-schema.json").read_text())
    cluster = yaml.safe_load((ROOT / "cluster.yaml").read_text())
    jsonschema.validate(cluster, schema)
    for here in cluster["file_mounts"].values():
        assert (ROOT / here).is_file()
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({**cluster, "idle_timeout": 10}, schema)


@pytest.mark.parametrize("name", ["kuberay-cluster.yaml", "kuberay-job.yaml"])
def test_the_kubernetes_files_have_known_fields_and_valid_pods(name: str) -> None:
    document = kuberay_file(name)
    jsonschema.validate(document, SCHEMAS[document["kind"]])
    for group in groups(document):
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "one"}, **group["template"]}
        kubernetes_validate.validate(pod, kubernetes_validate.latest_version(), strict=True)
        for container in group["template"]["spec"]["containers"]:
            assert container["resources"]["requests"] == container["resources"]["limits"], "Ray counts on its limits"
    for workers in groups(document)[1:]:
        assert json.loads(json.loads(workers["rayStartParams"]["resources"]))["greenroom_session"] > 0
        assert workers["template"]["spec"]["automountServiceAccountToken"] is False


def test_a_misspelt_field_is_found() -> None:
    document = kuberay_file("kuberay-cluster.yaml")
    document["spec"]["workerGroupSpecs"][0]["maxReplica"] = 3
    with pytest.raises(jsonschema.ValidationError, match="maxReplica"):
        jsonschema.validate(document, SCHEMAS["RayCluster"])


def test_every_version_of_ray_is_the_one_that_is_pinned() -> None:
    pinned = re.search(r"^ray==(.*)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert pinned is not None
    assert kuberay_file("kuberay-cluster.yaml")["spec"]["rayVersion"] == pinned[1]
    assert kuberay_file("kuberay-job.yaml")["spec"]["rayClusterSpec"]["rayVersion"] == pinned[1]


def test_the_batches_that_files_and_pages_start_are_commands_that_exist() -> None:
    check_batch_command(shlex.split(kuberay_file("kuberay-job.yaml")["spec"]["entrypoint"]))
    page = (ROOT / "docs" / "cluster.md").read_text()
    shown = re.search(r"greenroom batch run .*?(?=')", page, re.DOTALL)
    assert shown is not None
    check_batch_command(shlex.split(shown[0].replace("\\\n", " ")))


def test_the_drain_script_is_one_that_bash_takes_and_says_what_ray_understands() -> None:
    script = DEPLOY / "drain-on-notice.sh"
    subprocess.run(["bash", "-n", script], check=True)
    ray_command = Path(sys.executable).with_name("ray")
    told = re.findall(r"--[a-z-]+", script.read_text().replace("\\\n", " ").split("ray drain-node")[1])
    usage = subprocess.run([ray_command, "drain-node", "--help"], capture_output=True, text=True, check=True).stdout
    assert told
    assert all(option in usage for option in told)


def test_the_image_takes_what_the_build_needs_and_nothing_else() -> None:
    wanted = [line[1:] for line in (DEPLOY / "Dockerfile.dockerignore").read_text().splitlines() if line[0] == "!"]
    for pattern in wanted:
        assert list(ROOT.glob(pattern)), f"{pattern} is not there"
    instructions = re.findall(r"^([A-Z]+) ", (DEPLOY / "Dockerfile").read_text(), re.MULTILINE)
    assert instructions[0] == "FROM"
    assert set(instructions) <= {"FROM", "RUN", "COPY", "USER", "WORKDIR", "ENV"}
