"""SharedSandbox: one sandbox as a whole session tree uses it: what the SandboxActor and the embedded edition hold.

It holds what makes the promise of the journal true on the sandbox's side:
- the fence: an owner of a lower epoch is refused, also when it wakes up late;
- the ledger: per call key the running operation or its outcome, until the session says that it is recorded;
- the lock: reads beside reads, everything else alone, held by the operation and never by a tool that waits.
"""

from __future__ import annotations

import asyncio
import dataclasses
import uuid
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from greenroom.runtime.calls import CallRef, ExecResult
from greenroom.runtime.editing import Edit, Edited, apply_edit
from greenroom.runtime.errors import SandboxConflict, SandboxDied, SandboxFenced
from greenroom.runtime.operations import (
    EditFile,
    Execute,
    ListDir,
    Operation,
    OperationResult,
    ReadFile,
    WriteFile,
    is_read,
)
from greenroom.runtime.ports import Sandbox, TreeSandbox

ENDED_CALLS = 4096
"""Ended calls that are remembered, so that an operation of theirs that comes late is refused."""


class FairLock:
    """Many readers or one writer, in order of arrival."""

    def __init__(self) -> None:
        self._queue: deque[tuple[bool, asyncio.Future[None]]] = deque()
        self._readers = 0
        self._writing = False

    @asynccontextmanager
    async def held(self, *, shared: bool) -> AsyncIterator[None]:
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        entry = (shared, turn)
        self._queue.append(entry)
        self._admit()
        try:
            await turn
        except asyncio.CancelledError:
            if entry in self._queue:
                self._queue.remove(entry)
            elif turn.done() and not turn.cancelled():
                self._release(shared=shared)
            self._admit()
            raise
        try:
            yield
        finally:
            self._release(shared=shared)
            self._admit()

    def _admit(self) -> None:
        while self._queue and not self._writing:
            shared, turn = self._queue[0]
            if turn.cancelled():
                self._queue.popleft()
                continue
            if not shared and self._readers:
                return
            self._queue.popleft()
            if shared:
                self._readers += 1
            else:
                self._writing = True
            turn.set_result(None)

    def _release(self, *, shared: bool) -> None:
        if shared:
            self._readers -= 1
        else:
            self._writing = False


@dataclass(slots=True)
class _Entry:
    session_id: str
    step: int
    digest: str
    task: asyncio.Task[OperationResult]
    started: bool = False
    waiters: int = 0


@dataclass(slots=True)
class _Ledger:
    entries: dict[str, _Entry] = field(default_factory=dict)

    def acknowledge(self, session_id: str, through: int) -> None:
        """Drops what the session has recorded: finished calls up to and with step `through`."""
        done = [
            key
            for key, entry in self.entries.items()
            if entry.session_id == session_id and entry.step <= through and entry.task.done()
        ]
        for key in done:
            del self.entries[key]


class SharedSandbox:
    """`sandbox`: the backend, already open; each instance is an incarnation of its own."""

    def __init__(self, sandbox: Sandbox) -> None:
        self.incarnation = uuid.uuid4().hex
        self.guarantees = sandbox.guarantees
        self._sandbox = sandbox
        self._lock = FairLock()
        self._ledger = _Ledger()
        self._epochs: dict[str, int] = {}
        self._ended: dict[str, None] = {}
        self._closed = False

    @property
    def alive(self) -> bool:
        return not self._closed and self._sandbox.alive

    async def fence(self, session_id: str, epoch: int) -> frozenset[str]:
        self._check_epoch(session_id, epoch)
        return frozenset(key for key, entry in self._ledger.entries.items() if entry.session_id == session_id)

    async def perform(self, ref: CallRef, operation: Operation) -> OperationResult:
        """See TreeSandbox. Cancelling the last caller that waits for an operation ends the operation."""
        self._check_epoch(ref.session_id, ref.epoch)
        if self._closed or not self._sandbox.alive:
            raise SandboxDied("the sandbox is closed", ran=ref.call_key in self._ledger.entries)
        if ref.call_key in self._ended or f"{ref.call_key.partition('#')[0]}#*" in self._ended:
            raise SandboxDied(f"the call {ref.call_key} was ended")
        self._ledger.acknowledge(ref.session_id, ref.acked_through)
        entry = self._ledger.entries.get(ref.call_key)
        if entry is None:
            task = asyncio.get_running_loop().create_task(self._run(ref.call_key, operation))
            entry = self._ledger.entries[ref.call_key] = _Entry(ref.session_id, ref.step, ref.digest, task)
        elif entry.digest != ref.digest:
            raise SandboxConflict(f"the call {ref.call_key} came back with another tool or other arguments")
        elif entry.task.cancelled():
            raise SandboxDied(f"the operation of {ref.call_key} was ended")
        entry.waiters += 1
        try:
            return await asyncio.shield(entry.task)
        except asyncio.CancelledError:
            if entry.waiters == 1 and not entry.task.done():
                await self._end(ref.call_key, entry)
            raise
        finally:
            entry.waiters -= 1

    async def end(self, ref: CallRef) -> None:
        """Ends all operations of a call; one that is still on its way here is refused when it arrives."""
        self._check_epoch(ref.session_id, ref.epoch)
        self._note_ended(f"{ref.call_key}#*")
        mine = [(key, entry) for key, entry in self._ledger.entries.items() if key.partition("#")[0] == ref.call_key]
        await asyncio.gather(*(self._end(key, entry) for key, entry in mine))

    async def end_operation(self, ref: CallRef) -> None:
        """Ends this one operation, also before it has arrived; the call may go on with others."""
        self._check_epoch(ref.session_id, ref.epoch)
        self._note_ended(ref.call_key)
        entry = self._ledger.entries.get(ref.call_key)
        if entry is not None:
            await self._end(ref.call_key, entry)

    def _note_ended(self, key: str) -> None:
        self._ended[key] = None
        while len(self._ended) > ENDED_CALLS:
            del self._ended[next(iter(self._ended))]

    async def close(self) -> None:
        """Ends all operations and the sandbox itself."""
        self._closed = True
        await asyncio.gather(*(self._end(key, entry) for key, entry in list(self._ledger.entries.items())))
        await self._sandbox.close()

    @property
    def busy(self) -> bool:
        return any(not entry.task.done() for entry in self._ledger.entries.values())

    async def _run(self, key: str, operation: Operation) -> OperationResult:
        async with self._lock.held(shared=is_read(operation)):
            self._ledger.entries[key].started = True
            return await perform_on(self._sandbox, operation)

    async def _end(self, key: str, entry: _Entry) -> None:
        entry.task.cancel()
        await asyncio.wait([entry.task])
        if not entry.task.cancelled():
            entry.task.exception()  # looked at, so that nobody is warned of it: its callers have their own copy
        if not entry.started:
            self._ledger.entries.pop(key, None)  # it had not begun: nothing is to be remembered of it

    def _check_epoch(self, session_id: str, epoch: int) -> None:
        known = self._epochs.get(session_id, 0)
        if epoch < known:
            raise SandboxFenced(f"session {session_id!r} is at epoch {known}, an owner of epoch {epoch} asked")
        self._epochs[session_id] = epoch


async def perform_on(sandbox: Sandbox, operation: Operation) -> OperationResult:
    """The backend's verb for an operation."""
    match operation:
        case Execute(command=command, timeout=timeout):
            return await sandbox.execute(command, timeout=timeout)
        case ReadFile(path=path):
            return await sandbox.read_file(path)
        case WriteFile(path=path, data=data):
            await sandbox.write_file(path, data)
            return None
        case EditFile(path=path, edit=edit):
            edited = apply_edit(await _content(sandbox, path, missing_ok=edit.mode == "append"), edit)
            await sandbox.write_file(path, edited.data)
            return dataclasses.replace(edited, data=b"")
        case ListDir(path=path):
            return await sandbox.list_dir(path)


async def _content(sandbox: Sandbox, path: str, *, missing_ok: bool) -> bytes:
    try:
        return await sandbox.read_file(path)
    except FileNotFoundError:
        if missing_ok:
            return b""
        raise


class CallSandbox:
    """BoundSandbox for one call: the first operation goes under the call's own key, later ones under key#1, key#2, …

    open: answers the tree's sandbox, at the first use; timeout: seconds that a command gets unless the tool says
    otherwise, its partial output is kept.
    """

    def __init__(self, open: Callable[[], Awaitable[TreeSandbox]], ref: CallRef, timeout: float | None) -> None:
        self._open = open
        self._ref = ref
        self._timeout = timeout
        self._count = 0

    async def execute(self, command: str, *, timeout: float | None = None) -> ExecResult:
        result = await self._perform(Execute(command, self._timeout if timeout is None else timeout))
        assert isinstance(result, ExecResult)
        return result

    async def read_file(self, path: str) -> bytes:
        result = await self._perform(ReadFile(path))
        assert isinstance(result, bytes)
        return result

    async def write_file(self, path: str, data: bytes) -> None:
        await self._perform(WriteFile(path, data))

    async def edit_file(self, path: str, edit: Edit) -> Edited:
        result = await self._perform(EditFile(path, edit))
        assert isinstance(result, Edited)
        return result

    async def list_dir(self, path: str) -> tuple[str, ...]:
        result = await self._perform(ListDir(path))
        assert isinstance(result, tuple)
        return result

    async def _perform(self, operation: Operation) -> OperationResult:
        number, self._count = self._count, self._count + 1
        ref = self._ref if number == 0 else self._ref.later(number)
        return await (await self._open()).perform(ref, operation)
