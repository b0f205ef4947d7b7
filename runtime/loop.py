"""The loop: performs what the state machine asks for and feeds back what happened, from a run's start to its stop.

`machine.step` decides, transitions.py moves the record, this file acts. The record is saved before anything that
depends on it happens, and a stop is always saved before it is reported; under durability "effects" other saves overlap
with the next model call.
"""

from __future__ import annotations

import asyncio
import contextlib

from greenroom.runtime.batch import BatchRun, end_batch, end_jobs, open_batch
from greenroom.runtime.calls import ModelRequest
from greenroom.runtime.compaction import checked_summary, safe_cut, shown
from greenroom.runtime.config import AgentConfig
from greenroom.runtime.cutting import cut_off_by
from greenroom.runtime.errors import ClusterError, SandboxError
from greenroom.runtime.gate import pass_gate
from greenroom.runtime.journal import NOT_RUN_REPLY_CUT, placeholder_results
from greenroom.runtime.machine import (
    BackOff,
    Broke,
    CallModel,
    CancelSeen,
    Effect,
    Event,
    ModelFailed,
    ModelReplied,
    RunBatch,
    Stop,
)
from greenroom.runtime.messages import Compaction, Message, Usage, storable
from greenroom.runtime.middleware import HOOK_GRACE, HookFailed, RunHooks
from greenroom.runtime.model_call import Broken, Cut, call_model
from greenroom.runtime.policy import BrokenPolicy
from greenroom.runtime.ports import Clock, Compactor, TreeSandbox
from greenroom.runtime.record import Record
from greenroom.runtime.results import Failure, FailureKind
from greenroom.runtime.retry import backoff
from greenroom.runtime.run_ports import RunPorts
from greenroom.runtime.state import Interrupted, Success, WaitingForUser
from greenroom.runtime.toolbox import Toolbox
from greenroom.runtime.transitions import advance
from greenroom.runtime.view import result_of

RETRY_COMPACTION = 8
"""Messages after a compaction that failed until the next one is tried."""


class Loop:
    """One run of an acquired session; `record` is its working memory."""

    def __init__(self, record: Record, agent: AgentConfig, ports: RunPorts) -> None:
        self._record = record
        self._agent = agent
        self._ports = ports
        self._toolbox = Toolbox(agent)
        self._hooks = RunHooks(agent.chain, record.head.session_id, lambda: record.head.state)
        self._fallback = 0  # the provider that was last called
        self._compact_from = 0  # messages from which on a compaction is tried
        self._sandbox: TreeSandbox | None = None  # the one that the last batch used

    async def run(self, effects: tuple[Effect, ...]) -> None:
        """From these effects to the stop; the stop is durable when it returns. Raises StorageError."""
        if self._record.head.jobs:
            self._record.head = self._record.head.with_jobs(self._ports.tasks.lost(self._record.head.jobs))
        if self._agent.middleware:
            effects = await self._enter(effects)
        while not isinstance(effects[0], Stop):
            effects = await self._step(effects)
        if self._agent.middleware:
            await self._leave()
        await self._end_jobs()
        await save_stop(self._record, self._ports.clock)
        await self._settle_sandbox()

    async def _enter(self, effects: tuple[Effect, ...]) -> tuple[Effect, ...]:
        """The hooks before a run; something else is to be done first when one failed or the run was cancelled."""
        if isinstance(effects[0], Stop):
            return effects
        event: Event | None = None
        async with cut_off_by(self._ports.cancel) as cut:
            try:
                await self._hooks.before_run()
            except HookFailed as failed:
                event = Broke(failed.failure)
        if cut.happened:
            event = await self._cancel_seen()
        if event is None:
            return effects
        ports = self._ports  # a run that was taken over may have calls, and children, under way
        await end_batch(self._record, ports.sandboxes, ports.children, ports.cancel.reason or "the run failed")
        return advance(self._record, event, self._agent.limits)

    async def _leave(self) -> None:
        """The hooks after a run. One that fails makes the run a failed one, unless it was cancelled or had failed."""
        cancel = self._ports.cancel
        try:
            if cancel.cancelled:
                async with asyncio.timeout(HOOK_GRACE):
                    await self._hooks.after_run(result_of(self._record.head))
            else:
                async with cut_off_by(cancel):
                    await self._hooks.after_run(result_of(self._record.head))
        except (HookFailed, TimeoutError) as error:
            failed = error if isinstance(error, HookFailed) else HookFailed("", "after_run", f"over {HOOK_GRACE:g} s")
            self._ports.emitter.emit("notice", kind="middleware_failed", error=str(failed))
            if isinstance(self._record.head.state, Success | WaitingForUser):
                advance(self._record, Broke(failed.failure), self._agent.limits)

    async def _settle_sandbox(self) -> None:
        """Tells the sandbox that its outcomes are recorded; it has the workspace saved when the root stops."""
        if self._sandbox is not None:
            agent = self._record.head.state.agent
            with contextlib.suppress(SandboxError, ClusterError):  # the run is over and durable all the same
                await self._sandbox.settle(agent.session_id, agent.step)

    async def _step(self, effects: tuple[Effect, ...]) -> tuple[Effect, ...]:
        """Does what was asked for, moves the record by what came of it, and answers what is to be done next."""
        try:
            event = await self._perform(effects)
        except HookFailed as failed:
            event = Broke(failed.failure)
        effects = advance(self._record, event, self._agent.limits)
        if self._record.head.budget is not None:
            await self._tell_usage()
        if isinstance(effects[0], RunBatch | Stop):
            return effects  # a batch saves itself with its first marks, a stop with its result
        if self._agent.durability == "step":
            await self._record.save()
        else:
            self._record.save_soon()  # overlaps with the next model call
        return effects

    async def _end_jobs(self) -> None:
        """Of a run that was ended the hard way, and of a sub-agent at its end: nobody else could look after them."""
        head, tasks = self._record.head, self._ports.tasks
        over = head.parent is not None and not isinstance(head.state, WaitingForUser | Interrupted)
        if over or self._ports.cancel.hard:
            await end_jobs(head, self._ports.sandboxes, tasks)
            self._record.update(jobs=())
        elif not tasks.outlive_runs and any(map(tasks.owns, head.jobs)):
            await tasks.end_all_of(head.session_id)
            self._record.update(jobs=tuple(id for id in head.jobs if not tasks.owns(id)))

    async def _perform(self, effects: tuple[Effect, ...]) -> Event:
        """What the effects, one after the other, bring about first."""
        for effect in effects:
            match effect:
                case BackOff():
                    event = await self._back_off(effect)
                    if event is not None:
                        return event
                case CallModel():
                    return await self._call_model()
                case RunBatch():
                    return await self._run_batch()
        raise AssertionError("every effect but a wait that ran out brings an event")

    async def _call_model(self) -> Event:
        ports = self._ports
        spent = await self._spent()
        if spent is not None:
            return Broke(Failure(kind=FailureKind.budget, message=spent, retryable=False))
        if self._agent.compactor is not None:
            await self._compact(self._agent.compactor)
        if ports.cancel.cancelled:
            return await self._cancel_seen()
        agent = self._record.head.state.agent
        request = ModelRequest(
            session_id=agent.session_id,
            call_no=agent.call_no,
            system=self._agent.instructions,
            messages=shown(self._record.messages, self._record.head.compaction),
            tools=self._toolbox.schemas,
            temperature=self._agent.temperature,
            max_tokens=self._agent.max_tokens,
        )
        providers, chosen = self._agent.providers, self._chosen
        if chosen and chosen != self._fallback:
            ports.emitter.emit("notice", kind="fallback", provider=chosen)
        self._fallback = chosen
        try:
            reply = await call_model(self._hooks.around(providers[chosen]), request, ports.cancel, ports.emitter)
        except HookFailed as failed:
            if failed.point == "before_model":
                raise
            return ModelFailed(failed.failure)
        match reply:
            case Cut(text=text):
                return await self._cancel_seen(text, called=True)
            case Broken(error=error, text=text):
                if error.emitted:
                    ports.emitter.emit("reset", durable_write_no=self._record.durable_write_no)
                failure = Failure(kind=FailureKind(error.kind), message=str(error), retryable=error.retryable)
                left = len(providers) - 1 - chosen
                return ModelFailed(failure, error.retry_after, text or None, left)
            case message:
                return self._model_replied(message)

    async def _spent(self) -> str | None:
        """Why no model may be called any more; None while there are tokens left, or no budget."""
        head, own = self._record.head, self._agent.limits.max_tokens_total
        used = head.state.agent.usage.total
        if head.parent is not None and own is not None and used >= own:
            return f"this session has used {used} tokens of {own} (max_tokens_total)"
        if head.budget is None:
            return None
        left = True
        async with cut_off_by(self._ports.cancel):
            left = await self._ports.budgets.left(head.session_id, used, head.budget)
        return None if left else f"the tree's {head.budget} tokens are used up (max_tokens_total of its root)"

    async def _tell_usage(self) -> None:
        agent = self._record.head.state.agent
        with contextlib.suppress(ClusterError):  # it is told again before the next call
            await self._ports.budgets.tell(agent.session_id, agent.usage.total)

    @property
    def _chosen(self) -> int:
        """Which of the providers answers; another agent with fewer of them may have come since."""
        return min(self._record.head.state.agent.fallback, len(self._agent.providers) - 1)

    async def _compact(self, compactor: Compactor) -> None:
        """Has the older history summarized if it is long; whatever goes wrong, it stays as it is."""
        record, before, ports = self._record, self._record.head.compaction, self._ports
        if len(record.messages) < self._compact_from:
            return
        history = shown(record.messages, before)
        first = 0 if before is None else before.upto - 1  # the summary of before is the first message that is shown
        try:
            wanted = compactor.cut(history)
            cut = None if wanted is None else safe_cut(history, max(0, len(history) - wanted))
            if cut is None or first + cut <= (before.upto if before is not None else 0):
                return
            agent, number = record.head.state.agent, 1 if before is None else before.number + 1
            provider = getattr(compactor, "provider", None) or self._agent.providers[self._chosen]
            async with cut_off_by(ports.cancel):
                text, usage = await compactor.summarize(
                    history[:cut], self._hooks.around(provider), number - 1, agent.session_id, ports.cancel
                )
                made = Compaction(upto=first + cut, summary=checked_summary(text), number=number)
                state = record.head.state.but(agent=agent.but(usage=agent.usage + usage))
                record.update(state=state, compaction=made)
                ports.emitter.emit("notice", kind="compaction", upto=made.upto)
        except HookFailed:
            raise
        except Exception as error:  # a summary is no reason to end a run
            ports.emitter.emit("notice", kind="compaction_failed", error=f"{type(error).__name__}: {error}"[:300])
            self._compact_from = len(record.messages) + RETRY_COMPACTION

    def _model_replied(self, message: Message) -> Event:
        message = storable(message)
        kind, calls = message.stop_kind or "end", message.tool_calls
        if message.content:
            self._record.append(message)
            self._ports.emitter.emit("message", message=message)
        if calls and kind in ("length", "context_window", "refusal", "content_filter"):
            self._record.append(placeholder_results(calls, NOT_RUN_REPLY_CUT))
        elif calls:
            step = self._record.head.state.agent.step + 1
            batch = open_batch(message, self._record, self._toolbox, self._agent.limits, step)
            self._record.update(batch=batch)
        return ModelReplied(len(calls), message.text or None, kind, message.usage or Usage())

    async def _back_off(self, effect: BackOff) -> Event | None:
        """Waits, unless the run is cancelled meanwhile."""
        ports = self._ports
        delay = backoff(self._agent.limits.retry_backoff, effect.attempt, ports.ids.random(), effect.retry_after)
        ports.emitter.emit("retry", delay=delay, failure=effect.failure)
        if delay > 0:
            async with cut_off_by(ports.cancel):
                await ports.clock.sleep(delay)
        return await self._cancel_seen() if ports.cancel.cancelled else None

    async def _run_batch(self) -> Event:
        ports = self._ports
        refused = await self._judge()
        if refused is not None:
            return refused
        batch = BatchRun(self._record, self._agent, self._toolbox, self._hooks, ports)
        try:
            return await batch.run()
        finally:
            self._sandbox = batch.sandbox or self._sandbox

    async def _judge(self) -> Event | None:
        """Has hooks and policy make the open batch final, unless it is; an event when it is not to run."""
        ports = self._ports
        try:
            async with cut_off_by(ports.cancel) as cut:
                await pass_gate(self._record, self._agent, self._toolbox, self._hooks, ports.emitter)
        except BrokenPolicy as error:
            return Broke(Failure(kind=FailureKind.middleware, message=str(error), retryable=False))
        return await self._cancel_seen() if cut.happened else None

    async def _cancel_seen(self, text: str | None = None, *, called: bool = False) -> CancelSeen:
        reason = self._ports.cancel.reason
        await self._record.mark_cancelled(reason, self._ports.clock.time())
        return CancelSeen(reason, text or None, called)


async def save_stop(record: Record, clock: Clock) -> None:
    """Makes a stop durable: nobody owns the session any more, and the run counts."""
    stop = {"owner": None, "since": clock.time(), "revision": record.head.revision + 1, "cancel": None}
    receipts = await record.receipts_with(result_of(record.head.but(**stop)))
    record.update(**stop, receipts=receipts)  # in one step: a write under way takes all of it or nothing
    await record.save()
