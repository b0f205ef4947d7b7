"""SharedSandbox: one sandbox as a whole session tree uses it: what the SandboxActor and the embedded edition hold.

It holds what makes the promise of the journal true on the sandbox's side:
- the fence: an owner of a lower epoch is refused, also when it wakes up late;
- the ledger: per call key the running operation or its outcome, until the session says that it is recorded;
- the lock: reads beside reads, everything else alone, held by the operation and never by a tool that waits.

It also has the workspace saved, where there are snapshots: after so many operations that may have changed it, at the
root's stops, and before it is put to sleep because nobody has asked for anything for a while.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import math
import uuid
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from greenroom.runtime.calls import CallRef, ExecResult, JobState
from greenroom.runtime.clock import SystemClock
from greenroom.runtime.editing import apply_edit
from greenroom.runtime.errors import (
    Conflict,
    Deleted,
    Fenced,
    SandboxConflict,
    SandboxDied,
    SandboxError,
    SandboxFenced,
    StorageError,
)
from greenroom.runtime.fair_lock import FairLock
from greenroom.runtime.ids import root_of
from greenroom.runtime.jobs import Jobs
from greenroom.runtime.journal import later_call
from greenroom.runtime.operations import (
    CheckJob,
    EditFile,
    Execute,
    KillJob,
    ListDir,
    Operation,
    OperationResult,
    ReadFile,
    StartJob,
    WriteFile,
    is_exempt,
    is_read,
)
from greenroom.runtime.ports import Clock, Sandbox, SavesWorkspace, StartsProcesses
from greenroom.runtime.tree_snapshots import TreeSnapshots

log = logging.getLogger("greenroom.sandbox")

KEPT_BYTES = 64 * 1024
"""Of a read's outcome that is kept until it is recorded; of a command's, as much as its sandbox keeps of the output."""

ENDED_CALLS = 4096
"""Ended calls that are remembered, so that an operation of theirs that comes late is refused."""


@dataclass(slots=True)
class _Entry:
    session_id: str
    step: int
    digest: str
    task: asyncio.Task[OperationResult]
    started: bool = False
    ending: bool = False
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
    """`sandbox`: the backend, already open; each instance is an incarnation of its own.

    snapshots: where its workspace is saved, None: nowhere; save_every: operations that may change the workspace;
    unsaved: whether its folder may hold what no snapshot does; restored: see TreeSandbox; idle: seconds without a
    request until it is saved and closed, None for never; job_time: seconds that running jobs hold that up; note_sleep:
    is told the ids of jobs that end with that; asleep: those of earlier incarnations.
    """

    def __init__(
        self,
        sandbox: Sandbox,
        *,
        clock: Clock | None = None,
        incarnation: str | None = None,
        snapshots: TreeSnapshots | None = None,
        save_every: int = 10,
        unsaved: bool = False,
        restored: Mapping[str, str] | None = None,
        idle: float | None = None,
        job_time: float = 0.0,
        note_sleep: Callable[[list[str]], Awaitable[None]] | None = None,
        asleep: Iterable[str] = (),
    ) -> None:
        self.incarnation = incarnation or uuid.uuid4().hex
        self.guarantees = sandbox.guarantees
        self.restored = restored
        self._sandbox = sandbox
        self._clock = clock or SystemClock()
        self._snapshots = snapshots
        self._save_every = save_every
        self._unsaved = int(unsaved)  # operations since the last snapshot that may have changed the workspace
        self._used = unsaved  # whether there ever was one: what it left behind may go on changing it
        self._watermark = {} if snapshots is None else dict(snapshots.head.watermark)
        self._saving = asyncio.Lock()
        self._background: set[asyncio.Task[None]] = set()
        self._idle = idle or math.inf
        self._job_time = job_time
        self._asked_at = self._clock.monotonic()
        self._forget_alarm: Callable[[], None] = lambda: None
        if idle is not None:
            self._set_alarm(idle)
        self._lock = FairLock()
        self._ledger = _Ledger()
        self._epochs: dict[str, int] = {}
        self._ended: dict[str, None] = {}
        self._note_sleep = note_sleep
        self._jobs = Jobs(self.incarnation[:8], asleep)
        self._closed = False

    @property
    def alive(self) -> bool:
        return not self._closed and self._sandbox.alive

    @property
    def saves(self) -> bool:
        return self._snapshots is not None

    async def covered(self, session_id: str) -> str | None:
        return None if self._snapshots is None else self._snapshots.head.watermark.get(session_id)

    async def settle(self, session_id: str, through: int) -> None:
        self._asked_at = self._clock.monotonic()
        self._ledger.acknowledge(session_id, through)
        if root_of(session_id) == session_id:
            self._go_on(self.save())

    async def fence(self, session_id: str, epoch: int) -> frozenset[str]:
        self._asked_at = self._clock.monotonic()
        self._check_epoch(session_id, epoch)
        return frozenset(key for key, entry in self._ledger.entries.items() if entry.session_id == session_id)

    async def perform(self, ref: CallRef, operation: Operation) -> OperationResult:
        """See TreeSandbox. Cancelling the last caller that waits for an operation ends the operation."""
        self._asked_at = self._clock.monotonic()
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
                await self._end_entry(ref.call_key, entry)
            raise
        finally:
            entry.waiters -= 1
            if not entry.waiters and is_read(operation) and _is_large(entry.task):
                self._ledger.entries.pop(ref.call_key, None)  # a read can be done again: it need not be kept

    async def end(self, ref: CallRef) -> None:
        """Ends all operations of a call; one that is still on its way here is refused when it arrives."""
        self._check_epoch(ref.session_id, ref.epoch)
        self._note_ended(f"{ref.call_key}#*")
        mine = [(key, entry) for key, entry in self._ledger.entries.items() if key.partition("#")[0] == ref.call_key]
        await asyncio.gather(*(self._end_entry(key, entry) for key, entry in mine))

    async def end_operation(self, ref: CallRef) -> None:
        """Ends this one operation, also before it has arrived; the call may go on with others."""
        self._check_epoch(ref.session_id, ref.epoch)
        self._note_ended(ref.call_key)
        entry = self._ledger.entries.get(ref.call_key)
        if entry is not None:
            await self._end_entry(ref.call_key, entry)

    def _note_ended(self, key: str) -> None:
        self._ended[key] = None
        while len(self._ended) > ENDED_CALLS:
            del self._ended[next(iter(self._ended))]

    async def close(self) -> None:
        """Ends all operations and the sandbox itself; what no snapshot holds yet is saved first, if that works."""
        self._closed = True
        self._forget_alarm()
        await asyncio.gather(*(self._end_entry(key, entry) for key, entry in list(self._ledger.entries.items())))
        if self._sandbox.alive:
            await self.save()
        await self._sandbox.close()
        await asyncio.gather(*(task for task in self._background if task is not asyncio.current_task()))

    async def save(self) -> None:
        """Saves the workspace if it may have changed; what goes wrong is logged and tried again the next time."""
        async with self._saving:
            if self._snapshots is None or not self._used:
                return
            before = self._unsaved
            try:
                await self._save(self._snapshots)
            except (Fenced, Deleted, Conflict):  # another sandbox has the tree, or the tree is gone
                if not self._closed:
                    self._closed = True
                    self._go_on(self._end())
            except (StorageError, SandboxError, OSError) as error:
                self._unsaved += before
                log.warning("the workspace of %s was not saved: %s", self._snapshots.head.root, error)

    async def _save(self, snapshots: TreeSnapshots) -> None:
        assert isinstance(self._sandbox, SavesWorkspace), "only such a one has snapshots"
        async with self._lock.held(shared=True):  # no command runs, but perhaps jobs: these are stopped
            watermark = dict(self._watermark)
            self._unsaved = 0
            packed = await self._sandbox.pack(snapshots.saved, snapshots.new_name())
        if packed is None:
            await snapshots.cover(watermark)
            return
        try:
            await snapshots.put(packed, watermark)
        finally:
            packed.close()

    def _changed(self, session_id: str, key: str) -> None:
        """An operation that may have changed the workspace is over."""
        self._unsaved += 1
        self._used = True
        self._watermark[session_id] = later_call(self._watermark.get(session_id), key)
        if self._snapshots is not None and self._unsaved >= self._save_every and not self._saving.locked():
            self._go_on(self.save())

    def _go_on(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    # -- put to sleep

    def _set_alarm(self, seconds: float) -> None:
        self._forget_alarm = self._clock.call_later(seconds, lambda: self._go_on(self._sleep_if_idle()))

    async def _sleep_if_idle(self) -> None:
        """Nobody asked for anything for a while: if nothing is under way and every outcome is recorded, it sleeps."""
        since = self._clock.monotonic() - self._asked_at
        if self._closed:
            return
        if since < self._idle:
            self._set_alarm(self._idle - since)
            return
        if self._ledger.entries or (self._jobs.running and since < self._job_time):
            self._set_alarm(self._idle)
            return
        self._closed = True
        asleep = await self._jobs.put_to_sleep()
        if self._note_sleep is not None and asleep:
            with contextlib.suppress(StorageError):
                async with self._saving:
                    await self._note_sleep(asleep)
        if self._sandbox.alive:
            await self.save()
        await self._sandbox.close()

    async def _end(self) -> None:
        """It has lost its tree: nothing of it goes on beside whoever has it now."""
        self._forget_alarm()
        await asyncio.gather(*(self._end_entry(key, entry) for key, entry in list(self._ledger.entries.items())))
        await self._sandbox.close()

    @property
    def busy(self) -> bool:
        return self._jobs.running or any(not entry.task.done() for entry in self._ledger.entries.values())

    async def end_jobs(self, session_id: str) -> None:
        """Ends the background jobs of a session."""
        await self._jobs.end_all_of(session_id)

    async def _run(self, key: str, operation: Operation) -> OperationResult:
        entry = self._ledger.entries[key]
        if is_exempt(operation):
            entry.started = True
            return await self._look_after(key, operation)
        async with self._lock.held(shared=is_read(operation)):
            entry.started = True
            try:
                if isinstance(operation, StartJob):
                    return await self._start_job(entry.session_id, key, operation)
                return await perform_on(self._sandbox, operation)
            finally:
                if not is_read(operation):
                    self._changed(entry.session_id, key)

    async def _start_job(self, session_id: str, key: str, operation: StartJob) -> ExecResult | JobState:
        if not isinstance(self._sandbox, StartsProcesses):
            return await self._sandbox.execute(operation.command, timeout=operation.timeout, **_place(operation))
        self._jobs.check_room()
        process = await self._sandbox.start(operation.command, **_place(operation))
        try:
            ended = await process.wait(operation.yield_after)
        except asyncio.CancelledError:
            await process.kill()
            raise
        end = process.end() if ended else None
        if end is None:
            return self._jobs.add(session_id, process, key)
        output, dropped = process.take()
        return end.but(output=output, dropped_bytes=dropped)

    async def _look_after(self, key: str, operation: Operation) -> JobState:
        match operation:
            case CheckJob(id=id, wait=wait):
                return await self._jobs.check(id, key, wait)
            case KillJob(id=id):
                return await self._jobs.kill(id, key)
        raise AssertionError(f"{operation} is no look at a job")

    async def _end_entry(self, key: str, entry: _Entry) -> None:
        if not entry.ending:  # once: a second one would cut the ending itself short
            entry.ending = True
            entry.task.cancel()
        await asyncio.wait([entry.task])
        self._jobs.give_back(key)
        if not entry.task.cancelled():
            entry.task.exception()  # looked at, so that nobody is warned of it: its callers have their own copy
        if not entry.started:
            self._ledger.entries.pop(key, None)  # it had not begun: nothing is to be remembered of it

    def _check_epoch(self, session_id: str, epoch: int) -> None:
        known = self._epochs.get(session_id, 0)
        if epoch < known:
            raise SandboxFenced(f"session {session_id!r} is at epoch {known}, an owner of epoch {epoch} asked")
        self._epochs[session_id] = epoch


def _is_large(task: asyncio.Task[OperationResult]) -> bool:
    if not task.done() or task.cancelled() or task.exception() is not None:
        return False
    result = task.result()
    return isinstance(result, bytes) and len(result) > KEPT_BYTES


async def perform_on(sandbox: Sandbox, operation: Operation) -> OperationResult:
    """The backend's verb for an operation."""
    match operation:
        case Execute(command=command, timeout=timeout):
            return await sandbox.execute(command, timeout=timeout, **_place(operation))
        case ReadFile(path=path):
            return await sandbox.read_file(path)
        case WriteFile(path=path, data=data):
            await sandbox.write_file(path, data)
            return None
        case EditFile(path=path, edit=edit):
            data = await _content(sandbox, path, missing_ok=edit.mode == "append")
            edited = await asyncio.to_thread(apply_edit, data, edit)
            await sandbox.write_file(path, edited.data)
            return dataclasses.replace(edited, data=b"")
        case ListDir(path=path):
            return await sandbox.list_dir(path)
    raise AssertionError(f"{operation} is none of a backend's verbs")


def _place(operation: Execute | StartJob) -> dict[str, str]:
    """Where the command begins, for a backend that has told of such a place: others need not know the parameter."""
    return {} if operation.cwd is None else {"cwd": operation.cwd}


async def _content(sandbox: Sandbox, path: str, *, missing_ok: bool) -> bytes:
    try:
        return await sandbox.read_file(path)
    except FileNotFoundError:
        if missing_ok:
            return b""
        raise
