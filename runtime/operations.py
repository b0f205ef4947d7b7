"""What a sandbox can be asked, as values: they travel to a SandboxActor and are what its lock and journal see."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from greenroom.runtime.calls import ExecResult, JobState
from greenroom.runtime.editing import Edit, Edited


@dataclass(frozen=True, slots=True)
class Execute:
    """Run a shell command; `timeout` in seconds, None or 0 for none; `cwd`: where, None for the workspace."""

    command: str
    timeout: float | None = None
    cwd: str | None = None


@dataclass(frozen=True, slots=True)
class StartJob:
    """Run a shell command; if it has not ended after `yield_after` seconds it goes on as a background job.

    timeout: seconds, for a sandbox without background jobs; cwd: as of Execute.
    """

    command: str
    yield_after: float
    timeout: float | None = None
    cwd: str | None = None


@dataclass(frozen=True, slots=True)
class CheckJob:
    """What is new of a job; it waits up to `wait` seconds for the job's end first."""

    id: str
    wait: float | None = None


@dataclass(frozen=True, slots=True)
class KillJob:
    """End a job and everything it started."""

    id: str


@dataclass(frozen=True, slots=True)
class ReadFile:
    """Bytes of a regular file below the workspace."""

    path: str


@dataclass(frozen=True, slots=True)
class WriteFile:
    """Write a file whole, atomically; folders on the way are made, the mode bits of an older file kept."""

    path: str
    data: bytes


@dataclass(frozen=True, slots=True)
class EditFile:
    """Change a file in place: read, changed and written as one operation, so that nothing comes between."""

    path: str
    edit: Edit


@dataclass(frozen=True, slots=True)
class ListDir:
    """Names in a folder, sorted; folders end with a slash."""

    path: str


Operation: TypeAlias = Execute | StartJob | CheckJob | KillJob | ReadFile | WriteFile | EditFile | ListDir
OperationResult: TypeAlias = ExecResult | JobState | Edited | bytes | tuple[str, ...] | None


def is_read(operation: Operation) -> bool:
    """Whether the operation may run beside other reads."""
    return isinstance(operation, ReadFile | ListDir)


def is_exempt(operation: Operation) -> bool:
    """Whether the operation waits for nothing: a job is looked after also while a command runs."""
    return isinstance(operation, CheckJob | KillJob)
