"""Fixtures of the core's tests: nothing here waits for real."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from greenroom import AgentRuntime
from greenroom.runtime.storage import MemoryObjectStore, deciding
from greenroom.testing import FakeClock, FakeSandboxes, SeededIds


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """An undecided write is tried again at once."""
    monkeypatch.setattr(deciding, "DECIDE_PAUSE", 0.0)


@pytest.fixture
async def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
async def timed(sandboxes: FakeSandboxes, home: Path, clock: FakeClock) -> AsyncIterator[AgentRuntime]:
    """The embedded edition on a clock that the test moves."""
    async with AgentRuntime("memory:", sandboxes=sandboxes, clock=clock, ids=SeededIds(7)) as runtime:
        yield runtime


@pytest.fixture
def shared() -> MemoryObjectStore:
    return MemoryObjectStore()


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """A module that is slow as a whole is not even imported for the core part."""
    if config.getoption("markexpr") != "not slow" or collection_path.suffix != ".py":
        return None
    return True if "\npytestmark = pytest.mark.slow\n" in collection_path.read_text() else None
