"""The whole contract between the runtime and the world: every seam is a Protocol in this file.

Implementations: providers/, storage/, the sandbox and actors packages, and the fakes in testing/. The loop talks to
nothing else.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from greenroom.runtime.calls import (
    CallBounds,
    CallRef,
    ExecResult,
    JobState,
    ModelRequest,
    ProposedCall,
    SandboxSpec,
    ToolOutput,
    Verdict,
)
from greenroom.runtime.cancel import CancelToken
from greenroom.runtime.editing import Edit, Edited
from greenroom.runtime.events import Event
from greenroom.runtime.messages import Delta, Message, Usage
from greenroom.runtime.operations import Operation, OperationResult
from greenroom.runtime.results import RunResult
from greenroom.runtime.state import State

if TYPE_CHECKING:
    from pathlib import Path

    from greenroom.runtime.config import AgentConfig
    from greenroom.runtime.storage.head import Head, Segment, SegmentRef
    from greenroom.runtime.storage.snapshots import Saved, Snapshot, SnapshotStore


@runtime_checkable
class LlmProvider(Protocol):
    """A model. Frozen configuration: the constructor makes no client and does no I/O.

    It may also have `preflight()`, which raises PreflightError when a call cannot work here (a key that is not set,
    say), and an async `close()`, which lets go of the connections that this event loop holds for it.
    """

    def stream(self, request: ModelRequest, cancel: CancelToken) -> AsyncIterator[Delta]:
        """Deltas of one reply, the last a MessageDelta; raises ProviderError. Closing the iterator ends the call."""
        ...


class SharedTurns(Protocol):
    """Turns at an endpoint that several processes call."""

    def place(self, bounds: CallBounds) -> AbstractAsyncContextManager[None]:
        """Held by a call from its start to its end; waits for its turn."""
        ...

    def hold(self, bounds: CallBounds, seconds: float) -> None:
        """The endpoint asks for so much time before the next call."""
        ...


@runtime_checkable
class SharesTurns(Protocol):
    """A provider whose bounds can be kept for several processes at once."""

    def share(self, turns: SharedTurns) -> None: ...


class ObjectStore(Protocol):
    """Keys to bytes with compare-and-swap. Any verb may raise Undecided: it may have happened. See api.md."""

    async def get(self, key: str) -> tuple[bytes, str] | None:
        """Body and etag, or None."""
        ...

    async def put_if_absent(self, key: str, body: bytes) -> str:
        """The new etag; raises AlreadyExists."""
        ...

    async def put_if_match(self, key: str, body: bytes, etag: str) -> str:
        """The new etag; raises PreconditionFailed, or NotFound when there is no object."""
        ...

    async def delete(self, key: str) -> None:
        """A missing key is fine."""
        ...

    async def delete_many(self, keys: Iterable[str]) -> None: ...

    def list(self, prefix: str) -> AsyncIterator[str]:
        """Keys that start with `prefix`, in order."""
        ...

    async def probe(self) -> None:
        """Raises StorageError when the store cannot be used or does not honour its conditions."""
        ...

    async def close(self) -> None: ...


class CheckpointStore(Protocol):
    """One head per session, changed only by compare-and-swap.

    Every write decides itself: it returns, or raises Fenced, Conflict, Deleted or another StorageError.
    """

    async def read(self, sid: str) -> tuple[Head, str] | None: ...

    async def create(self, sid: str, head: Head) -> str:
        """The etag; raises SessionExists."""
        ...

    async def acquire(self, sid: str, owner: str) -> tuple[Head, str]:
        """Makes `owner` the owner at epoch + 1, whoever had it; raises SessionNotFound."""
        ...

    async def save(self, sid: str, head: Head, etag: str) -> str: ...

    async def delete(self, sid: str) -> None: ...


class TranscriptStore(Protocol):
    """Immutable segments of messages."""

    async def append(self, sid: str, segment: Segment) -> SegmentRef:
        """Stores a segment under its name; the same segment again changes nothing."""
        ...

    async def read(self, sid: str, refs: Iterable[SegmentRef]) -> tuple[Message, ...]:
        """The messages of all segments in order; a missing or altered one raises StorageError."""
        ...

    async def remove(self, sid: str) -> None: ...


class Process(Protocol):
    """A command that runs in a sandbox."""

    async def wait(self, timeout: float | None = None) -> bool:
        """Whether its own process has ended within so many seconds; children that it left behind are not waited for."""
        ...

    async def news(self, timeout: float) -> None:
        """Returns when there is something to take, or it has ended, or so many seconds are over."""
        ...

    def take(self) -> tuple[str, int]:
        """What it put out since the last take, within the bounds of its sandbox, and how many bytes are gone."""
        ...

    def end(self) -> ExecResult | None:
        """How it ended, without its output; None while it runs. Raises SandboxDied, or OSError if it never began."""
        ...

    async def kill(self) -> None:
        """Ends it and everything it started; returns when all of it is gone."""
        ...


class Sandbox(Protocol):
    """A workspace and the power to run commands in it: what a backend implements.

    One that is also a StartsProcesses has background jobs; in others every command is waited for. guarantees: what is
    enforced, of {"isolated", "no_network", "memory_bound", "rooted_files"}.
    """

    kind: str
    guarantees: frozenset[str]

    @property
    def alive(self) -> bool:
        """Whether it can still be used; one that is not is closed and opened anew."""
        ...

    async def execute(self, command: str, *, timeout: float | None = None, cwd: str | None = None) -> ExecResult:
        """Ends when the command's process exits; cancelling ends its whole process tree first.

        cwd: where it begins, as an earlier result told; one that never tells is never given one.
        """
        ...

    async def read_file(self, path: str) -> bytes: ...

    async def write_file(self, path: str, data: bytes) -> None: ...

    async def list_dir(self, path: str) -> tuple[str, ...]: ...

    async def close(self) -> None:
        """Ends everything that runs in it; the files stay."""
        ...


@runtime_checkable
class StartsProcesses(Protocol):
    """What a sandbox may have beside its verbs."""

    async def start(self, command: str, *, cwd: str | None = None) -> Process:
        """Starts a command and goes on; nobody but its Process ends it, or the sandbox's own end. cwd: as execute."""
        ...


class PackedWorkspace(Protocol):
    """What a snapshot is to hold, read already: the workspace may change while it is stored."""

    async def put(self, store: SnapshotStore) -> Snapshot:
        """Stores it and answers its manifest; the same one again changes nothing."""
        ...

    def close(self) -> None: ...


@runtime_checkable
class SavesWorkspace(Protocol):
    """What a sandbox may have beside its verbs: one without has no snapshots and cannot be forked."""

    async def pack(self, base: Saved | None, name: str) -> PackedWorkspace | None:
        """The workspace as a snapshot of this name, without what `base` holds already; None: it is still as in `base`.

        What runs meanwhile is stopped as long as it is read. Raises SandboxError when it cannot be saved.
        """
        ...

    async def fork(self, folder: Path) -> None:
        """Copies the workspace into a new folder of this machine, which must not exist."""
        ...


class SandboxFactory(Protocol):
    """Opens sandboxes of the kinds it knows."""

    async def open(self, spec: SandboxSpec, root: str, snapshot: Saved | None = None) -> Sandbox:
        """The workspace as it is, or as `snapshot` holds it. Raises SandboxUnavailable with what to do about it."""
        ...


class TreeSandbox(Protocol):
    """A sandbox as one session tree shares it: locked by operation, fenced by epoch, outcomes kept by call key."""

    incarnation: str
    guarantees: frozenset[str]

    @property
    def saves(self) -> bool:
        """Whether its workspace is saved as snapshots."""
        ...

    @property
    def restored(self) -> Mapping[str, str] | None:
        """What the snapshot covers that this incarnation began from: session id to call key; None: nothing was lost."""
        ...

    async def covered(self, session_id: str) -> str | None:
        """The last call of the session that a snapshot covers."""
        ...

    async def settle(self, session_id: str, through: int) -> None:
        """The session stops, its outcomes recorded up to and with this step; a root's stop has the workspace saved."""
        ...

    async def fence(self, session_id: str, epoch: int) -> frozenset[str]:
        """Refuses older epochs of the session from now on; answers the call keys whose outcome or run it holds."""
        ...

    async def perform(self, ref: CallRef, operation: Operation) -> OperationResult:
        """Runs the operation once for its call key: asked again, it answers the kept outcome or joins the run.

        Cancelling the caller ends the operation and everything it started before the cancellation goes on.
        """
        ...

    async def end(self, ref: CallRef) -> None:
        """Ends all operations of a call, also ones that are still on their way here; returns when they are gone."""
        ...

    async def end_jobs(self, session_id: str) -> None:
        """Ends the background jobs that a session started; returns when they are gone."""
        ...


class BoundSandbox(Protocol):
    """The sandbox as a tool sees it (ctx.sandbox): every operation carries the call it belongs to."""

    async def execute(self, command: str, *, timeout: float | None = None) -> ExecResult: ...

    async def start(self, command: str) -> ExecResult | JobState:
        """As execute; past the tool's `yield_after` the command goes on as a background job."""
        ...

    async def check_job(self, id: str, wait: float | None = None) -> JobState:
        """What is new of a background job; `wait`: seconds to wait for its end first. Raises JobNotFound."""
        ...

    async def kill_job(self, id: str) -> JobState:
        """Ends a background job and everything it started; raises JobNotFound."""
        ...

    async def read_file(self, path: str) -> bytes: ...

    async def write_file(self, path: str, data: bytes) -> None: ...

    async def edit_file(self, path: str, edit: Edit) -> Edited:
        """Changes a file in place; the answer is without its bytes. Raises EditRefused."""
        ...

    async def list_dir(self, path: str) -> tuple[str, ...]: ...


class TreeSandboxes(Protocol):
    """Where a session finds the sandbox of its tree."""

    async def get(self, root: str, spec: SandboxSpec) -> TreeSandbox:
        """Opens it at its first use; raises SandboxUnavailable."""
        ...

    async def find(self, root: str) -> TreeSandbox | None:
        """The tree's sandbox if it is open."""
        ...


class Children(Protocol):
    """The sub-agents of one session."""

    async def start(self, call_key: str, tool: str, task: str) -> str:
        """Starts the child of this call, or finds it; answers its session id."""
        ...

    async def wait(self, child_id: str) -> RunResult:
        """How the child's run ended, also failed, waiting or cancelled; no exception for these."""
        ...

    async def cancel(self, child_id: str, reason: str) -> None:
        """Returns once the child and everything below it is parked."""
        ...

    def abandon(self) -> None:
        """The parent has lost its session: what this process drives of its children ends as if the process had.

        They are not parked: whoever goes on with the parent goes on with them.
        """
        ...


class ChildHost(Protocol):
    """Gives a session its Children."""

    def children_of(self, parent: Head, agent: AgentConfig | None, token: CancelToken | None = None) -> Children:
        """`agent`: whose sub-agents may be started; without one, children can be waited for and cancelled.

        token: of the parent's run, whose deadline bounds its children.
        """
        ...


class Budgets(Protocol):
    """Token budgets of whole session trees."""

    async def left(self, session_id: str, used: int, limit: int) -> bool:
        """Whether its tree has used less than `limit` tokens; `used`: those of the session itself so far."""
        ...

    async def tell(self, session_id: str, used: int) -> None:
        """The session has used so many tokens now."""
        ...


class ToolPolicy(Protocol):
    """Decides which calls may run."""

    async def judge(self, session_id: str, calls: tuple[ProposedCall, ...]) -> Sequence[Verdict]:
        """One verdict per call, in order. Asked once for a whole batch, before any of it runs.

        What it raises ends the run as Fail(middleware): nothing of the batch runs.
        """
        ...


@dataclass(frozen=True, slots=True)
class HookContext:
    """What a hook may know of its session: a snapshot, of which nothing leads back into the runtime."""

    session_id: str
    state: State


class Middleware:
    """Hooks around runs, model calls and tool calls: derive from it, or give any object some of these async methods.

    Those before are called in the order of the agent's list, those after in reverse. A hook that raises ends the run
    as Fail(middleware), and is not tried again; after a crash, what had not been recorded yet is hooked once more.
    name: in failures and notices, the class's name if empty. live: what models and tools put out may be watched before
    the hooks after them have seen it; otherwise it is held back until then, since one of them may take a secret out.
    """

    name: str = ""
    live: bool = False

    async def before_run(self, ctx: HookContext) -> None:
        """A run begins, or goes on after an answer, an interruption or a crash."""

    async def after_run(self, ctx: HookContext, result: RunResult) -> None:
        """A run has come to a stop, which is not durable yet; called if this middleware's before_run had ended."""

    async def before_model(self, ctx: HookContext, request: ModelRequest) -> ModelRequest | None:
        """The request as it is to be sent, this one time; None leaves it as it is."""

    async def after_model(self, ctx: HookContext, message: Message) -> Message | None:
        """The reply as it is to be stored, shown and acted on; None leaves it as it is."""

    async def before_tool(self, ctx: HookContext, call: ProposedCall) -> ProposedCall | ToolOutput | str | None:
        """The call as it is to be judged and run, or a result in its place; None leaves it as it is.

        Asked for every call of a batch that could run, before the policy judges and before any of them runs.
        """

    async def after_tool(self, ctx: HookContext, call: ProposedCall, output: ToolOutput) -> ToolOutput | str | None:
        """The result as it is to be stored and shown, also of a call that a hook answered; None leaves it as it is."""

    async def close(self) -> None:
        """Whoever holds the agent is done: called once, the last middleware first."""


@runtime_checkable
class Compactor(Protocol):
    """Makes the older part of a long history short; it may have a `provider` to be asked instead of the agent's."""

    def cut(self, messages: Sequence[Message]) -> int | None:
        """How many messages at the start are to be summarized, fewer where that would part a call from its result.

        None while there is room.
        """
        ...

    async def summarize(
        self, messages: Sequence[Message], provider: LlmProvider, number: int, session_id: str, cancel: CancelToken
    ) -> tuple[str, Usage]:
        """A summary, which is kept up to MAX_SUMMARY bytes, and what it cost; `number`: of this session's summaries.

        Whatever it raises leaves the history as it was.
        """
        ...


class EventSink(Protocol):
    """Takes events; never blocks, never raises."""

    def emit(self, event: Event) -> None: ...


class Progress(Protocol):
    """A tool's live output (ctx.progress)."""

    def emit_text(self, text: str) -> None: ...


class Clock(Protocol):
    """Time, so that tests need none."""

    def time(self) -> float:
        """Unix seconds."""
        ...

    def monotonic(self) -> float: ...

    async def sleep(self, seconds: float) -> None: ...

    def call_later(self, seconds: float, callback: Callable[[], None]) -> Callable[[], None]:
        """Calls back on the event loop after so many seconds; answers what takes that back."""
        ...


class IdSource(Protocol):
    """Randomness, so that tests can choose it."""

    def new_id(self) -> str:
        """An id nobody else makes."""
        ...

    def random(self) -> float:
        """In [0, 1)."""
        ...
