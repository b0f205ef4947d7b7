"""What to test one's own agents, tools and stores with."""

from greenroom.runtime.testing import (
    ContractBroken,
    FakeClock,
    FakeSandbox,
    FakeSandboxes,
    Fault,
    FaultyStore,
    HistoryError,
    SeededIds,
    check_checkpoint_store,
    check_object_store,
    check_transcript_store,
    strict_history,
)

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
