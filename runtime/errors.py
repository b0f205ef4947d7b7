"""Every error Greenroom raises, in one tree.

GreenroomError
├── ConfigError (ValueError)           an agent, a setting or an argument that cannot work
│   ├── AgentUnavailable               the stored agent names code that is not here
│   └── PreflightError                 what a run needs is missing (key, sandbox): nothing was started
├── UsageError (RuntimeError)          a verb called where it cannot work (closed runtime, sync verb in a loop)
├── SessionError
│   ├── SessionNotFound (LookupError)
│   ├── SessionExists
│   ├── SessionBusy                    another owner runs it: .owner, .since
│   ├── InterruptPending               it waits for an answer that this verb is not
│   ├── UnknownInterrupt (LookupError) no such open question
│   ├── ClaimHeld                      an accepted answer is still being worked on
│   └── RequestConflict                a request_id used again with other content
├── StorageError (OSError)             .kind io | serde | unavailable | not_found | internal, .key
│   ├── AlreadyExists, PreconditionFailed, NotFound, Undecided      from an ObjectStore
│   └── Fenced, Conflict, Deleted, NewerSchema                      from a CheckpointStore
├── ProviderError                      .kind, .code, .status, .retryable, .retry_after, .emitted
├── SandboxError (RuntimeError)
│   ├── SandboxUnavailable             cannot be opened here
│   ├── SandboxDied                    went away under a running operation
│   ├── SandboxFenced                  an owner of a lower epoch asked
│   ├── SandboxConflict                a call key came back with other content
│   ├── JobNotFound (LookupError)      no such background job in this sandbox
│   ├── PathRefused (PermissionError)  a path that leaves the workspace
│   └── EditRefused (ValueError)       an edit that does not say which place it means
├── ClusterError (RuntimeError)        Ray cannot be reached, started or used
│   └── PoolMismatch                   the namespace already serves another store or version
├── IllegalTransition (RuntimeError)   a broken invariant of the state machine
└── RunFailed                          a run ended in Fail: .result, .failure, .resumable

Each of them pickles with its fields: every constructor can be called with the message alone, and the fields lie in
the instance's dictionary, which is what `pickle` and Ray carry over.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from greenroom.runtime.results import Failure, RunResult


class GreenroomError(Exception):
    """Base of all errors; `.message` says what is wrong and where, `.hint` what to do about it."""

    def __init__(self, message: str = "", *, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message}. {self.hint}" if self.hint else self.message


class ConfigError(GreenroomError, ValueError):
    """An agent, a setting or an argument that cannot work."""


class AgentUnavailable(ConfigError):
    """The stored agent names a module or attribute that this process does not have."""


class PreflightError(ConfigError):
    """Something the run needs is missing; the run was not started."""


class UsageError(GreenroomError, RuntimeError):
    """A verb was called where it cannot work."""


class SessionError(GreenroomError):
    """Base of what a session refuses; `.session_id` names it."""

    def __init__(self, message: str = "", *, session_id: str = "", hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.session_id = session_id


class SessionNotFound(SessionError, LookupError):
    """The store has no session of this id."""

    @classmethod
    def of(cls, session_id: str) -> SessionNotFound:
        return cls(
            f"there is no session {session_id!r} in this store",
            session_id=session_id,
            hint="See `greenroom session list`, and that the store is the right one",
        )


class SessionExists(SessionError):
    """A session of this id is already there."""


class SessionBusy(SessionError):
    """Another owner runs the session: `.owner`, `.since` (Unix seconds)."""

    def __init__(
        self, message: str = "", *, session_id: str = "", owner: str = "", since: float = 0.0, hint: str = ""
    ) -> None:
        super().__init__(message, session_id=session_id, hint=hint)
        self.owner = owner
        self.since = since


class InterruptPending(SessionError):
    """The session waits for an answer; `.interrupt_id` names the open question."""

    def __init__(self, message: str = "", *, session_id: str = "", interrupt_id: str = "", hint: str = "") -> None:
        super().__init__(message, session_id=session_id, hint=hint)
        self.interrupt_id = interrupt_id


class UnknownInterrupt(SessionError, LookupError):
    """No question of this id is open."""


class ClaimHeld(SessionError):
    """The answer was accepted before and its run is not over."""


class RequestConflict(SessionError):
    """A request_id came back with other content than it first had."""


class StorageError(GreenroomError, OSError):
    """A store failed: `.kind` is io, serde, unavailable, not_found or internal; `.key` the object."""

    def __init__(self, message: str = "", *, kind: str = "io", key: str = "", hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.kind = kind
        self.key = key


class AlreadyExists(StorageError):
    """put_if_absent found an object under the key."""


class PreconditionFailed(StorageError):
    """put_if_match found another etag."""


class NotFound(StorageError):
    """put_if_match found no object."""


class Undecided(StorageError):
    """The write may or may not have happened; read before anything else."""


class Fenced(StorageError):
    """A higher epoch owns the session; this owner must stop."""


class Conflict(StorageError):
    """The head was changed by somebody else at the same epoch."""


class Deleted(StorageError):
    """The session was deleted."""


class NewerSchema(StorageError):
    """The object was written by a newer version; it is left untouched."""


class ProviderError(GreenroomError):
    """A model call failed.

    kind: a FailureKind value; code: the provider's own; status: HTTP status or its equivalent (529 for overloaded);
    retry_after: seconds; emitted: whether a delta went out before it broke.
    """

    def __init__(
        self,
        message: str = "",
        *,
        kind: str = "provider",
        code: str | None = None,
        status: int | None = None,
        retryable: bool = False,
        retry_after: float | None = None,
        emitted: bool = False,
        hint: str = "",
    ) -> None:
        super().__init__(message, hint=hint)
        self.kind = kind
        self.code = code
        self.status = status
        self.retryable = retryable
        self.retry_after = retry_after
        self.emitted = emitted


class SandboxError(GreenroomError, RuntimeError):
    """Base of what a sandbox refuses or suffers."""


class SandboxUnavailable(SandboxError):
    """The sandbox cannot be opened on this machine."""


class SandboxDied(SandboxError):
    """The sandbox went away; never shown as a command's output. `ran`: whether the operation may have begun."""

    def __init__(self, message: str = "", *, ran: bool = True, hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.ran = ran


class SandboxFenced(SandboxError):
    """An owner of a lower epoch asked after a newer one had fenced it off."""


class SandboxConflict(SandboxError):
    """A call key came back with another tool or other arguments."""


class PathRefused(SandboxError, PermissionError):
    """The path leaves the workspace, or is not a regular file."""


class JobNotFound(SandboxError, LookupError):
    """The sandbox has no such background job: it never had, or it was another incarnation's."""


class EditRefused(SandboxError, ValueError):
    """The text to find is not in the file, or more often than was said; the file is as it was."""


class ClusterError(GreenroomError, RuntimeError):
    """Ray cannot be reached, started or used."""


class PoolMismatch(ClusterError):
    """The namespace already serves another store, configuration or version."""


class IllegalTransition(GreenroomError, RuntimeError):
    """The state machine was given an event that its state does not take."""


class RunFailed(GreenroomError):
    """A run ended in Fail.

    result: the RunResult with partial text and revision; failure: kind, message, retryable; resumable: whether
    `resume` may go on from the stored state (a failing store, for one).
    """

    result: RunResult
    failure: Failure
    resumable: bool

    def __init__(self, message: str = "", *, hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.resumable = False

    @classmethod
    def of(cls, result: RunResult, failure: Failure, *, resumable: bool = False) -> RunFailed:
        error = cls(f"the run failed ({failure.kind}): {failure.message}")
        error.result, error.failure, error.resumable = result, failure, resumable
        return error
