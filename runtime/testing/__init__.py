"""What users test with too: fakes of every port, and checks that hold for every implementation."""

from greenroom.runtime.testing.clock import FakeClock, SeededIds
from greenroom.runtime.testing.contracts import (
    ContractBroken,
    check_checkpoint_store,
    check_object_store,
    check_transcript_store,
)
from greenroom.runtime.testing.faulty import Fault, FaultyStore
from greenroom.runtime.testing.history import HistoryError, strict_history
from greenroom.runtime.testing.sandbox import FakeSandbox, FakeSandboxes

__all__ = [
    "ContractBroken",
    "FakeClock",
    "FakeSandbox",
    "FakeSandboxes",
    "Fault",
    "FaultyStore",
    "HistoryError",
    "SeededIds",
    "check_checkpoint_store",
    "check_object_store",
    "check_transcript_store",
    "strict_history",
]
