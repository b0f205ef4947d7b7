"""What a plan does to a record, in memory; and the sandbox that a session's tree gets."""

from __future__ import annotations

from greenroom.runtime.config import AgentConfig
from greenroom.runtime.journal import Outcome
from greenroom.runtime.limits import Limits
from greenroom.runtime.loop import advance
from greenroom.runtime.machine import Effect, UserSaid
from greenroom.runtime.record import Record
from greenroom.runtime.state import WaitingForUser
from greenroom.runtime.storage.head import Head, SandboxRef
from greenroom.runtime.verbs import Plan
from greenroom.runtime.workspace import resolved_spec


def apply_plan(record: Record, plan: Plan, limits: Limits) -> tuple[Effect, ...]:
    """The plan's change in memory: the answer into the journal, the message into the transcript, the state moved."""
    if plan.answer is not None or plan.approved:
        _consume(record, plan.answer)
    effects: tuple[Effect, ...] = ()
    for event in plan.events:
        effects = advance(record, event, limits)
        if isinstance(event, UserSaid) and plan.message is not None:
            record.append(plan.message)
            record.update(usage_before=record.head.state.agent.usage)
    return effects


def _consume(record: Record, answer: Outcome | None) -> None:
    """The open question has its answer, None: the call may run; that counts as a revision of its own."""
    state, batch = record.head.state, record.head.batch
    assert isinstance(state, WaitingForUser), "only a waiting session is answered"
    assert batch is not None, "a waiting session has an open batch"
    call = batch.call(state.interrupt_id)
    answered = call.but(verdict="allow", question=None) if answer is None else call.but(outcome=answer)
    record.update(batch=batch.put(answered), revision=record.head.revision + 1)


def sandbox_of(head: Head, agent: AgentConfig) -> SandboxRef | None:
    """The tree's sandbox; a root gets it from its agent the first time that agent has one."""
    if head.sandbox is None and head.parent is None and agent.sandbox_spec is not None:
        return SandboxRef(spec=resolved_spec(agent.sandbox_spec, head.root))
    return head.sandbox
