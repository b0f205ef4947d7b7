"""What users test with too: fakes of every port, and checks that hold for every implementation."""

from greenroom.runtime.history import HistoryError, strict_history
from greenroom.runtime.testing.clock import FakeClock, SeededIds
from greenroom.runtime.testing.contracts import (
    ContractBroken,
    check_checkpoint_store,
    check_object_store,
    check_transcript_store,
)
from greenroom.runtime.testing.crash import CrashFailure, CrashReport, Scenario, crash_everywhere, drive_to_end
from greenroom.runtime.testing.crash_world import CrashWorld
from greenroom.runtime.testing.faulty import Fault, FaultyStore
from greenroom.runtime.testing.provider_contract import check_provider
from greenroom.runtime.testing.sandbox import FakeSandbox, FakeSandboxes
from greenroom.runtime.testing.sandbox_contract import check_sandbox

__all__ = [
    "ContractBroken",
    "CrashFailure",
    "CrashReport",
    "CrashWorld",
    "FakeClock",
    "FakeSandbox",
    "FakeSandboxes",
    "Fault",
    "FaultyStore",
    "HistoryError",
    "Scenario",
    "SeededIds",
    "check_checkpoint_store",
    "check_object_store",
    "check_provider",
    "check_sandbox",
    "check_transcript_store",
    "crash_everywhere",
    "drive_to_end",
    "strict_history",
]
