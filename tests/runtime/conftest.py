"""Fixtures of the core's tests: nothing here waits for real."""

from __future__ import annotations

import pytest

from greenroom.runtime.storage import deciding


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """An undecided write is tried again at once."""
    monkeypatch.setattr(deciding, "DECIDE_PAUSE", 0.0)
