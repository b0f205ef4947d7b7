"""What users test with too: fakes of every port, and checks that hold for every implementation."""

from greenroom.runtime.testing.clock import FakeClock, SeededIds
from greenroom.runtime.testing.history import HistoryError, strict_history
from greenroom.runtime.testing.sandbox import FakeSandbox, FakeSandboxes

__all__ = ["FakeClock", "FakeSandbox", "FakeSandboxes", "HistoryError", "SeededIds", "strict_history"]
