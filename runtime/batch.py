"""Runs the open batch of a session: marks before effects, results in call order, the truth after a crash or a cancel.

What may run at all is decided by journal.decide; here it is done. Before a call with an effect begins, the head is
durable with the batch, the call's mark and all earlier outcomes.
"""

from __future__ import annotations

import asyncio

from greenroom.runtime.call_group import CallGroup, Early
from greenroom.runtime.call_sandbox import CallSandbox
from greenroom.runtime.calls import CallRef, Interrupt, ToolContext, ToolOutput
from greenroom.runtime.config import AgentConfig
from greenroom.runtime.errors import (
    ClusterError,
    JobNotFound,
    PreflightError,
    SandboxDied,
    SandboxFenced,
    SandboxUnavailable,
)
from greenroom.runtime.gate import refuse_spawns
from greenroom.runtime.journal import (
    NOT_RUN_SANDBOX_LOST,
    OUTCOME_UNKNOWN,
    RESULT_WITHHELD,
    Batch,
    CallRecord,
    InProcess,
    Mark,
    Outcome,
    Recovery,
    call_key,
    decide,
    segments,
    workspace_restored,
)
from greenroom.runtime.limits import Limits
from greenroom.runtime.machine import Asked, BatchDone, Broke, CancelSeen
from greenroom.runtime.messages import Message, clean
from greenroom.runtime.middleware import HookFailed, RunHooks
from greenroom.runtime.policy import proposed
from greenroom.runtime.ports import Children, Progress, TreeSandbox, TreeSandboxes
from greenroom.runtime.record import Record
from greenroom.runtime.results import Failure, FailureKind, RunStatus
from greenroom.runtime.run_ports import RunPorts
from greenroom.runtime.storage.head import Head, SandboxRef
from greenroom.runtime.tool_tasks import ToolTasks
from greenroom.runtime.toolbox import Toolbox, spawn_output
from greenroom.runtime.tools.registry import Tool, Unheard, is_async

SANDBOX_GRACE = 5.0
"""Seconds a sandbox gets, beyond a call's own limit, to end the command and answer what it had put out."""

MAX_ERROR_TEXT = 2000
"""Characters of an exception that a model gets to see."""

NOTHING_ACKED = -1
CallEnd = Outcome | Interrupt | HookFailed
"""What becomes of a call: the result, a question, or a hook that failed after it."""

BatchEnd = BatchDone | Asked | CancelSeen | Broke


def open_batch(message: Message, record: Record, toolbox: Toolbox, limits: Limits, step: int) -> Batch:
    """The batch of a model's reply: keys are minted here, once."""
    head = record.head
    calls = [
        toolbox.record(block, call_key(head.session_id, head.epoch, step, index))
        for index, block in enumerate(message.tool_calls)
    ]
    return refuse_spawns(Batch.trusted(step=step, calls=tuple(calls)), head, limits)


class BatchRun:
    """One drive through the open batch of `record`."""

    def __init__(self, record: Record, agent: AgentConfig, toolbox: Toolbox, hooks: RunHooks, ports: RunPorts) -> None:
        self._record = record
        self._limits = agent.limits
        self._every_save_waits = agent.durability == "step"
        self._toolbox = toolbox
        self._hooks = hooks
        self._ports = ports
        self.sandbox: TreeSandbox | None = None
        self._opening = asyncio.Lock()
        self._acked_through = NOTHING_ACKED

    async def run(self) -> BatchEnd:
        """Runs what is open until the batch is done, someone is asked, or the run is cancelled."""
        try:
            if any(call.started is not None for call in self._batch.open_calls):
                await self._settle_lost()
            for call in self._batch.open_calls:
                if call.verdict == "ask":
                    return await self._cancelled(None) if self._ports.cancel.cancelled else Asked(call.key)
                if call.may_interrupt:
                    end = await self._run_group((call,))
                    if end is not None:
                        return end
            for group in segments(self._batch.open_calls):
                end = await self._run_group(group)
                if end is not None:
                    return end
        except SandboxUnavailable as error:
            return Broke(Failure(kind=FailureKind.sandbox_open, message=str(error), retryable=False))
        return self._done()

    @property
    def _batch(self) -> Batch:
        batch = self._record.head.batch
        assert batch is not None, "a batch runs only while one is open"
        return batch

    def _put(self, call: CallRecord) -> None:
        self._record.update(batch=self._batch.put(call))

    async def _settle_lost(self) -> None:
        """After a take-over: what may have run and cannot be asked is ended, and gets the honest result."""
        marked = [call for call in self._batch.open_calls if call.started is not None]
        uses_sandbox = any(call.started.place != InProcess for call in marked if call.started is not None)
        incarnation = (await self._open_sandbox()).incarnation if uses_sandbox else None
        for call in marked:
            if decide(call, incarnation) is Recovery.unknown:
                await end_call(call, self._record, self._ports.sandboxes)
                self._put(call.but(outcome=Outcome.error(OUTCOME_UNKNOWN)))

    async def _run_group(self, group: tuple[CallRecord, ...]) -> BatchEnd | None:
        """Runs calls that may run together; None when all have their outcome."""
        cancel, emitter = self._ports.cancel, self._ports.emitter
        if cancel.cancelled:
            return await self._cancelled(None)
        marked = [await self._mark(call) if call.answered is None else call for call in group]
        if self._every_save_waits or any(call.effect != "read_only" for call in group):
            await self._record.save()
            self._acked_through = self._batch.step - 1  # only now are the outcomes before this batch durable
        else:
            self._record.save_soon()  # a second read does no harm
        if cancel.cancelled:
            return await self._cancelled(None)
        running: CallGroup[CallEnd] = CallGroup(self._ports.clock, cancel)
        try:
            for call in marked:
                emitter.emit("tool_started", call_key=call.key, name=call.name)
                tool = self._toolbox.find(call.name)
                running.start(call.key, self._run_call(call, tool, running), self._outer_limit(tool))
            if not await running.join():
                return await self._cancelled(running)
            return self._take_outcomes(running)
        finally:
            await running.stop()  # whatever happened, nothing of the group goes on unseen

    async def _mark(self, call: CallRecord) -> CallRecord:
        """Notes that the call may begin from now on, and where; registers a child before it is created."""
        in_sandbox = call.runs_in == "sandbox" and self._record.head.sandbox is not None and not self._is_task(call)
        place = (await self._open_sandbox()).incarnation if in_sandbox else InProcess
        marked = call.but(started=Mark.trusted(place=place, epoch=self._record.head.epoch))
        self._put(marked)
        if call.spawns:
            self._record.head = self._record.head.with_child(call.key)
        return marked

    def _take_outcomes(self, running: CallGroup[CallEnd]) -> Asked | Broke | None:
        """Records what finished calls gave; a question parks the batch, a hook that failed ends the run."""
        end: Asked | Broke | None = None
        for key, made in running.ended():
            call = self._batch.call(key)
            if isinstance(made, Early):
                made = self._early_outcome(call, made)
            if isinstance(made, Interrupt):
                self._put(call.but(question=made))
                end = end or Asked(key)
            elif isinstance(made, HookFailed):
                end = Broke(made.failure)
                withheld = RESULT_WITHHELD.format(name=made.name)
                self._put(call.but(outcome=Outcome.error(withheld), answered=None))
                self._ports.emitter.emit("tool_finished", call_key=key, is_error=True)
            else:
                self._put(call.but(outcome=made, answered=None))
                self._ports.emitter.emit("tool_finished", call_key=key, is_error=made.is_error)
        return end

    def _early_outcome(self, call: CallRecord, why: Early) -> Outcome:
        if why is Early.by_itself:
            return Outcome.error("The call was cancelled from inside.", counts=True)
        limit = self._limit(self._toolbox.find(call.name)) or 0
        text = f"Timed out after {limit:g} s. The call was stopped; it may have taken partial effect."
        return Outcome.error(text, counts=True)

    async def _cancelled(self, running: CallGroup[CallEnd] | None) -> CancelSeen:
        """Mark first; then end what runs, await the children's acknowledgement, keep what finished in time."""
        reason = self._ports.cancel.reason
        await self._record.mark_cancelled(reason, self._ports.clock.time())
        if running is not None:
            await running.stop()
            self._take_outcomes(running)
        await end_batch(self._record, self._ports.sandboxes, self._ports.children, reason)
        return CancelSeen(reason)

    def _done(self) -> BatchDone:
        outcomes = [call.outcome for call in self._batch.calls if call.outcome is not None]
        failures = [outcome for outcome in outcomes if outcome.counts]
        last = failures[-1].output.text if failures else ""
        return BatchDone(succeeded=len(outcomes) - len(failures), failed=len(failures), last_error=last[:300])

    # -- one call

    def _limit(self, tool: Tool | None) -> float | None:
        """Seconds the tool's own work may take; a sub-agent has limits of its own."""
        if tool is None:
            return None
        return (self._limits.tool_timeout if tool.spec.timeout is None else tool.spec.timeout) or None

    def _outer_limit(self, tool: Tool | None) -> float | None:
        """Seconds until the call is cancelled; a sandbox keeps the limit itself and tells what came out by then."""
        limit = self._limit(tool)
        in_sandbox = tool is not None and tool.spec.runs_in == "sandbox"
        return limit + SANDBOX_GRACE if limit is not None and in_sandbox else limit

    async def _run_call(self, call: CallRecord, tool: Tool | None, running: CallGroup[CallEnd]) -> CallEnd:
        """What became of the call once the hooks after it have seen it; they are no part of its time limit."""
        made = call.answered or await self._made(call, tool)
        if isinstance(made, Interrupt) or not self._hooks.has("after_tool"):
            return made
        running.lift_limit(call.key)
        try:
            seen = await self._hooks.after_tool(proposed(call), made.output)
        except HookFailed as failed:
            failed.executed = call.answered is None
            return failed
        return Outcome.of(seen, counts=made.counts and seen.is_error)

    async def _made(self, call: CallRecord, tool: Tool | None) -> Outcome | Interrupt:
        if tool is None and not call.spawns:
            return Outcome.error(f"The tool {call.name!r} is not there any more. It did not run.")
        try:
            return await (self._run_spawn(call) if tool is None else self._run_tool(tool, call))
        except SandboxFenced:
            raise
        except SandboxDied as error:
            if not error.ran:
                return Outcome.error(NOT_RUN_SANDBOX_LOST, counts=True)
            if call.effect == "effectful":
                return Outcome.error(OUTCOME_UNKNOWN)
            return Outcome.error(f"The sandbox was lost while this call ran: {error}", counts=True)
        except Exception as error:  # a failing tool is data for the model
            text = clean(f"{type(error).__name__}: {error}")
            return Outcome.error(text[:MAX_ERROR_TEXT], counts=True)

    async def _run_tool(self, tool: Tool, call: CallRecord) -> Outcome | Interrupt:
        if self._is_task(call):
            return await self._look_after(tool, call)
        if tool.spec.yield_after is not None and tool.spec.runs_in == "process":
            return await self._run_yielding(tool, call, tool.spec.yield_after)
        limit = self._limit(tool)
        sandbox = self._call_sandbox(tool, call, limit)
        context = ToolContext(
            session_id=self._record.head.session_id,
            call_key=call.key,
            cancel=self._ports.cancel.child(timeout=limit),
            progress=self._progress(call),
            sandbox=sandbox,
        )
        try:
            made = await tool.invoke(self._toolbox.arguments(tool, call), context)
        finally:
            if sandbox is not None:
                head = self._record.head.with_jobs(sandbox.jobs).in_folder(sandbox.cwd)
                saves = self.sandbox is not None and self.sandbox.saves
                self._record.head = head.with_unsaved(sandbox.changed, call.name) if saves and sandbox.changed else head
        return made if isinstance(made, Interrupt) else Outcome.of(made)

    async def _run_yielding(self, tool: Tool, call: CallRecord, window: float) -> Outcome | Interrupt:
        """A tool of this process that goes on as a background job when it takes longer than its window."""
        tasks = self._ports.tasks
        task = tasks.new(self._progress(call))
        context = ToolContext(self._record.head.session_id, call.key, task.cancel, task)
        work = tool.invoke(self._toolbox.arguments(tool, call), context)
        made, job = await tasks.run(
            task, work, context.session_id, call.key, window, blocking=not is_async(tool.function)
        )
        if job is not None:
            self._record.head = self._record.head.with_jobs({job: True})
        return made if isinstance(made, Interrupt) else Outcome.of(made)

    def _is_task(self, call: CallRecord) -> bool:
        """Whether the call looks after a job of this process, not of the sandbox."""
        tool = self._toolbox.find(call.name)
        looks = tool is not None and tool.builtin in ("check", "kill")
        return looks and self._ports.tasks.owns(str(call.arguments.get("id", "")))

    async def _look_after(self, tool: Tool, call: CallRecord) -> Outcome:
        """`check` and `kill` of such a job."""
        tasks, id = self._ports.tasks, str(call.arguments["id"])
        session = self._record.head.session_id
        try:
            if tool.builtin == "kill":
                made, running = await tasks.kill(session, id, call.key)
            else:
                made, running = await tasks.check(session, id, call.key, call.arguments.get("wait_secs"))
        except JobNotFound as error:
            made, running = ToolOutput.of_text(str(error), is_error=True), False
        self._record.head = self._record.head.with_jobs({id: running})
        return Outcome.of(made)

    def _progress(self, call: CallRecord) -> Progress:
        return Unheard() if self._hooks.holds_progress else self._ports.emitter.progress(call.key)

    async def _run_spawn(self, call: CallRecord) -> Outcome:
        """A child's end is a result for its parent, whatever it is."""
        children = self._ports.children
        child = await children.start(call.key, call.name, str(call.arguments["task"]))
        self._ports.emitter.emit("child_started", call_key=call.key, child_id=child)
        result = await children.wait(child)
        text, detail = result.text, None
        if result.failure is not None:
            detail = result.failure.message
        elif result.interrupt is not None:
            detail = f"waits for an answer to {result.interrupt.id}: {result.interrupt.payload}"
        elif result.status is RunStatus.completed and not text:
            detail = f"it ended after {result.steps} steps without a final text"
        good = result.status is RunStatus.completed
        shown = spawn_output(child, str(result.status), text, detail)
        return Outcome.of(ToolOutput.of_text(shown, is_error=not good))

    def _call_sandbox(self, tool: Tool, call: CallRecord, limit: float | None) -> CallSandbox | None:
        head = self._record.head
        if head.sandbox is None:
            return None
        if tool.spec.needs_isolation and self.sandbox is not None and "isolated" not in self.sandbox.guarantees:
            raise PreflightError(f"the sandbox {head.sandbox.spec.kind!r} enforces no isolation")
        step = self._batch.step
        ref = CallRef(head.session_id, head.epoch, call.key, call.digest, step=step, acked_through=self._acked_through)
        return CallSandbox(self._open_sandbox, ref, limit, tool.spec.yield_after, head.sandbox.cwd)

    async def _open_sandbox(self) -> TreeSandbox:
        """The tree's sandbox, fenced for this epoch before its first use."""
        async with self._opening:
            if self.sandbox is None:
                head = self._record.head
                if head.sandbox is None:
                    raise SandboxUnavailable("the session has no sandbox", hint="Give the agent one")
                self.sandbox = await self._ports.sandboxes.get(head.root, head.sandbox.spec)
                await self.sandbox.fence(head.session_id, head.epoch)
                if head.sandbox.incarnation != self.sandbox.incarnation:
                    self._moved(head, head.sandbox, self.sandbox)
                head = self._record.head
                if self.sandbox.saves and head.unsaved:
                    covered = await self.sandbox.covered(head.session_id)
                    self._record.update(unsaved=head.uncovered(covered))
        return self.sandbox

    def _moved(self, head: Head, before: SandboxRef, sandbox: TreeSandbox) -> None:
        """The session is in another incarnation: jobs are gone, and perhaps what its workspace had held."""
        lost: tuple[str, ...] = ()
        if before.incarnation is not None and sandbox.restored is not None:
            lost = head.uncovered(sandbox.restored.get(head.session_id))
        if lost:
            self._ports.emitter.emit("notice", kind="workspace_restored", lost_calls=lost)
        self._record.update(
            sandbox=before.but(incarnation=sandbox.incarnation),
            jobs=(),
            unsaved=head.unsaved if sandbox.restored is None else (),
            notice=workspace_restored(lost) if lost else head.notice,
        )


async def end_batch(record: Record, sandboxes: TreeSandboxes, children: Children, reason: str) -> None:
    """Ends whatever the open calls of a batch left running: operations in the sandbox, children below them."""
    head, batch = record.head, record.head.batch
    if batch is None:
        return
    await asyncio.gather(*(end_call(call, record, sandboxes) for call in batch.open_calls if call.started is not None))
    children_of = head.children
    live = [children_of[call.key] for call in batch.open_calls if call.key in children_of]
    await asyncio.gather(*(children.cancel(child, reason) for child in live))


async def end_call(call: CallRecord, record: Record, sandboxes: TreeSandboxes) -> None:
    """Ends whatever the call still does in the tree's sandbox; a sandbox that is gone has ended it already."""
    head = record.head
    try:
        sandbox = await sandboxes.find(head.root)
        if sandbox is not None:
            await sandbox.end(CallRef(head.session_id, head.epoch, call.key, call.digest))
    except SandboxDied:
        pass


async def end_jobs(head: Head, sandboxes: TreeSandboxes, tasks: ToolTasks) -> None:
    """Ends the session's background jobs; a sandbox that is gone, or does not answer any more, has none."""
    await tasks.end_all_of(head.session_id)
    if head.sandbox is None or head.sandbox.incarnation is None:
        return  # it has never used one
    try:
        sandbox = await sandboxes.find(head.root)
        if sandbox is not None:
            await sandbox.end_jobs(head.session_id)
    except (SandboxDied, ClusterError):
        pass
