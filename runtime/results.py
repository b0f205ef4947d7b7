"""What a caller gets back: how a run ended, what a session is, what was said.

Values only; the mapping from a state to a status is `status_of` in machine.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from pydantic import Field

from greenroom.runtime.calls import Interrupt
from greenroom.runtime.errors import GreenroomError
from greenroom.runtime.messages import Message, ShortText, Usage, Value


class RunStatus(StrEnum):
    completed = "completed"
    suspended = "suspended"
    exhausted = "exhausted"
    cancelled = "cancelled"
    failed = "failed"


class FailureKind(StrEnum):
    """Why a run, a model call or a tool failed."""

    max_iter = "max_iter"
    provider = "provider"
    provider_permanent = "provider_permanent"
    provider_rate_limited = "provider_rate_limited"
    provider_stream = "provider_stream"
    truncated = "truncated"
    content_filter = "content_filter"
    middleware = "middleware"
    tool = "tool"
    sandbox_open = "sandbox_open"
    sandbox_save = "sandbox_save"
    storage = "storage"
    budget = "budget"

    @property
    def retryable(self) -> bool:
        """Whether the same attempt may go better the next time."""
        return self in _RETRYABLE


_RETRYABLE = frozenset(
    {
        FailureKind.provider,
        FailureKind.provider_rate_limited,
        FailureKind.provider_stream,
        FailureKind.tool,
        FailureKind.sandbox_open,
        FailureKind.sandbox_save,
    }
)


class Failure(Value):
    """`message` is for people and logs; it names no secret.

    tool_executed: of a hook that failed beside a tool, whether that tool had run, or may have; None elsewhere.
    """

    kind: FailureKind
    message: ShortText
    retryable: bool
    tool_executed: bool | None = None


class PendingCall(Value):
    """A tool call without a result; `started`: whether it may have begun."""

    key: str
    name: str
    started: bool


class RunResult(Value):
    """How a run ended.

    text: the last text the assistant said in the run, also a partial one; usage, steps: of this run (kept over resume
    and answer); interrupt: what a suspended run waits for; background_tasks: ids of jobs that go on; pending_calls:
    calls without a result, of a run that waits or was broken off by a store.
    """

    session_id: str
    status: RunStatus
    text: str | None = None
    usage: Usage = Usage()
    steps: int = 0
    revision: int = 0
    interrupt: Interrupt | None = None
    failure: Failure | None = None
    background_tasks: tuple[str, ...] = ()
    pending_calls: tuple[PendingCall, ...] = ()


class SessionInfo(Value):
    """A session as its head tells it; `since` in Unix seconds; children: call key to session id."""

    session_id: str
    state: str
    waiting_for: Interrupt | None = None
    since: float = 0.0
    revision: int = 0
    epoch: int = 0
    owner: str | None = None
    parent: str | None = None
    children: dict[str, str] = Field(default_factory=dict)
    usage: Usage = Usage()
    background_tasks: tuple[str, ...] = ()


class Transcript(Value):
    """Everything that was said in a session; `parent` None at the top; `children`: ids in order of creation."""

    session_id: str
    messages: tuple[Message, ...]
    parent: str | None = None
    children: tuple[str, ...] = ()


class SessionTree(Value):
    """A session and everything below it, in order of creation."""

    info: SessionInfo
    children: tuple[SessionTree, ...] = ()

    def sessions(self) -> Iterator[SessionInfo]:
        """Every session of the tree, parents first."""
        yield self.info
        for child in self.children:
            yield from child.sessions()


class Turn(Value):
    session_id: str
    result: RunResult


@dataclass(frozen=True, slots=True)
class MapResult:
    """One item of `map`: exactly one of result and error is set."""

    index: int
    session_id: str
    result: RunResult | None = None
    error: GreenroomError | None = None
