"""What to test one's own agents, tools and stores with."""

from greenroom.runtime.testing import FakeClock, FakeSandbox, FakeSandboxes, HistoryError, SeededIds, strict_history

__all__ = ["FakeClock", "FakeSandbox", "FakeSandboxes", "HistoryError", "SeededIds", "strict_history"]
