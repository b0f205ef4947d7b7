"""Fixtures of the whole suite: runtimes in memory, the one Ray cluster of a run, the real model server."""

from __future__ import annotations

import os
import shutil
import tempfile
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import greenroom  # Ray, boto3 and the model's server are loaded by the fixtures that need them: the core needs none
from greenroom import AgentRuntime, Runtime
from greenroom.runtime.ports import ObjectStore
from greenroom.runtime.storage import MemoryObjectStore, SqliteObjectStore
from greenroom.runtime.storage.files import FileObjectStore
from greenroom.runtime.storage.s3 import S3ObjectStore
from greenroom.testing import FakeSandboxes

if TYPE_CHECKING:
    from greenroom.actors.client import RayRuntime


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
        except Exception:  # a port of its own choice was taken meanwhile, say: once more, then it is told
            if attempt:
                raise
    yield
    ray.shutdown()
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def pool_store(ray_cluster: None, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The store of the pool that the tests share: a namespace serves one store."""
    return f"sqlite:///{tmp_path_factory.mktemp('pool')}/greenroom.db"


@pytest.fixture
async def on_ray(pool_store: str, home: Path) -> AsyncIterator[RayRuntime]:
    """A client of the shared pool."""
    pool = greenroom.PoolConfig(session_actors=2)
    async with greenroom.connect(storage=pool_store, namespace="tests", pool=pool) as runtime:
        yield runtime


@pytest.fixture(params=["embedded", pytest.param("ray", marks=pytest.mark.ray)])
async def edition(request: pytest.FixtureRequest, tmp_path: Path, home: Path) -> AsyncIterator[Runtime]:
    """Each edition in turn, over SQLite and host sandboxes."""
    if request.param == "embedded":
        async with AgentRuntime(f"sqlite:///{tmp_path}/greenroom.db") as runtime:
            yield runtime
    else:
        store = request.getfixturevalue("pool_store")
        pool = greenroom.PoolConfig(session_actors=2)
        async with greenroom.connect(storage=store, namespace="tests", pool=pool) as on_ray:
            yield on_ray


@pytest.fixture(scope="session")
def seaweedfs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a real S3 server with an empty bucket."""
    import s3servers

    with s3servers.seaweedfs(tmp_path_factory.mktemp("weed")) as address:
        yield address


@pytest.fixture(scope="session")
def moto_s3() -> Iterator[str]:
    """The address of another S3 server with an empty bucket."""
    import s3servers

    with s3servers.moto() as address:
        yield address


@pytest.fixture(
    params=[
        "memory",
        pytest.param("sqlite", marks=pytest.mark.slow),
        pytest.param("file", marks=pytest.mark.slow),
        pytest.param("seaweedfs", marks=pytest.mark.slow),
        pytest.param("moto", marks=pytest.mark.slow),
    ]
)
def object_store(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[], ObjectStore]:
    """Makes fresh, empty stores of every kind in turn."""
    if request.param in ("seaweedfs", "moto"):
        endpoint = request.getfixturevalue("seaweedfs" if request.param == "seaweedfs" else "moto_s3")
        import s3servers

        for name, value in s3servers.credentials().items():
            monkeypatch.setenv(name, value)
        return lambda: S3ObjectStore(s3servers.BUCKET, f"{uuid.uuid4().hex}/", endpoint=endpoint, region="us-east-1")
    if request.param == "sqlite":
        return lambda: SqliteObjectStore(tmp_path / f"{uuid.uuid4().hex}.db")
    if request.param == "file":
        return lambda: FileObjectStore(tmp_path / uuid.uuid4().hex)
    return MemoryObjectStore


@pytest.fixture(scope="session")
def model_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a real OpenAI-compatible server with a small model on this machine."""
    from realmodel import server

    with server.model_server(tmp_path_factory.mktemp("model")) as address:
        yield address
