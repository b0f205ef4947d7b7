"""What a sandbox can be asked, as values: they travel to a SandboxActor and are what its lock and journal see."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from greenroom.runtime.calls import ExecResult
from greenroom.runtime.editing import Edit, Edited


@dataclass(frozen=True, slots=True)
class Execute:
    """Run a shell command; `timeout` in seconds, None or 0 for none."""

    command: str
    timeout: float | None = None


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


Operation: TypeAlias = Execute | ReadFile | WriteFile | EditFile | ListDir
OperationResult: TypeAlias = ExecResult | Edited | bytes | tuple[str, ...] | None


def is_read(operation: Operation) -> bool:
    """Whether the operation may run beside other reads."""
    return isinstance(operation, ReadFile | ListDir)
