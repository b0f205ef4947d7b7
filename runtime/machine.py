"""The state machine of a run: `(state, event) -> (state, effects)`, pure.

The whole theory is the table at the end of this file: which event a state takes, and where it may lead. `loop.py`
performs the effects and feeds the next event back; nothing here waits, reads a clock or touches a port. An event
that a state does not take raises IllegalTransition. The diagram in docs/ is generated from the table.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from greenroom.runtime.errors import IllegalTransition
from greenroom.runtime.limits import Limits
from greenroom.runtime.messages import StopKind, Usage
from greenroom.runtime.results import Failure, FailureKind, RunStatus
from greenroom.runtime.state import (
    AgentState,
    Fail,
    Interrupted,
    Ready,
    Reasoning,
    State,
    Success,
    ToolExecuting,
    WaitingForUser,
)

# -- events: what happened ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class UserSaid:
    """A user message was appended; an unresumed interruption is dropped by it."""


@dataclass(frozen=True, slots=True)
class RunStarted:
    """A run takes up what was appended."""


@dataclass(frozen=True, slots=True)
class ModelReplied:
    """A model call ended with a whole message."""

    calls: int
    text: str | None
    stop_kind: StopKind
    usage: Usage = field(default_factory=Usage)


@dataclass(frozen=True, slots=True)
class ModelFailed:
    """`text`: what the try had said; kept as the run's last word when it is the last try, dropped otherwise.

    fallbacks: providers that are left to be tried.
    """

    failure: Failure
    retry_after: float | None = None
    text: str | None = None
    fallbacks: int = 0


@dataclass(frozen=True, slots=True)
class BatchDone:
    """Every call of the batch has its result; `failed` counts the calls that went wrong by themselves."""

    succeeded: int
    failed: int
    last_error: str = ""


@dataclass(frozen=True, slots=True)
class Asked:
    """The call `interrupt_id` asks someone; nothing else of the batch has run."""

    interrupt_id: str


@dataclass(frozen=True, slots=True)
class Answered:
    """The open question has its answer."""


@dataclass(frozen=True, slots=True)
class CancelSeen:
    """A safe point found the run cancelled; `text` is what a cut stream had said, `called` whether one was cut."""

    reason: str
    text: str | None = None
    called: bool = False


@dataclass(frozen=True, slots=True)
class Resumed:
    """Go on: after an interruption, or in place of an owner that died."""


@dataclass(frozen=True, slots=True)
class Broke:
    """Something the run cannot work around: a store, a sandbox that does not open, a hook."""

    failure: Failure


Event: TypeAlias = (
    UserSaid | RunStarted | ModelReplied | ModelFailed | BatchDone | Asked | Answered | CancelSeen | Resumed | Broke
)

# -- effects: what is to be done next ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class BackOff:
    """Wait before the next attempt; `attempt` counts the failures so far from 1."""

    attempt: int
    failure: Failure
    retry_after: float | None = None


@dataclass(frozen=True, slots=True)
class CallModel:
    pass


@dataclass(frozen=True, slots=True)
class RunBatch:
    pass


@dataclass(frozen=True, slots=True)
class Stop:
    """The run is over: save, and answer."""


Effect: TypeAlias = BackOff | CallModel | RunBatch | Stop
Step: TypeAlias = tuple[State, tuple[Effect, ...]]


def step(state: State, event: Event, limits: Limits) -> Step:
    """The next state and what to do in it; raises IllegalTransition."""
    rule = TABLE.get((type(state), type(event)))
    if rule is None:
        raise IllegalTransition(f"{type(state).__name__} does not take {type(event).__name__}")
    return rule.apply(state, event, limits)


def status_of(state: State) -> RunStatus:
    """How the run that ended in this state is reported; raises IllegalTransition for a state that is no stop."""
    match state:
        case Success():
            return RunStatus.completed
        case WaitingForUser():
            return RunStatus.suspended
        case Interrupted():
            return RunStatus.cancelled
        case Fail(failure=failure):
            spent = failure.kind in (FailureKind.max_iter, FailureKind.budget)
            return RunStatus.exhausted if spent else RunStatus.failed
    raise IllegalTransition(f"{type(state).__name__} is no stop")


# -- the rules ---------------------------------------------------------------------------------------------------


def _user_said(state: State, _event: UserSaid, _limits: Limits) -> Step:
    return Ready(agent=state.agent.but(run_step=0, consecutive_failures=0, final_text=None, fallback=0)), ()


def _reason(state: State, _event: object, limits: Limits) -> Step:
    """Calls the model, or stops if this run has used up its steps."""
    if state.agent.run_step >= limits.max_iter:
        return _exhausted(state.agent, limits), (Stop(),)
    return Reasoning(agent=state.agent), (CallModel(),)


def _model_replied(state: State, event: ModelReplied, limits: Limits) -> Step:
    agent = state.agent.but(
        step=state.agent.step + 1,
        run_step=state.agent.run_step + 1,
        call_no=state.agent.call_no + 1,
        final_text=event.text or state.agent.final_text,
        usage=state.agent.usage + event.usage,
    )
    match event.stop_kind:
        case "length" | "context_window":
            return _fail(agent, FailureKind.truncated, f"the reply was cut: {event.stop_kind}"), (Stop(),)
        case "refusal" | "content_filter":
            return _fail(agent, FailureKind.content_filter, f"the model gave no answer: {event.stop_kind}"), (Stop(),)
    if event.stop_kind == "pause" and not event.calls:  # the provider paused a long turn: it goes on from there
        if agent.run_step >= limits.max_iter:
            return _exhausted(agent, limits), (Stop(),)
        return Reasoning(agent=agent), (CallModel(),)
    if event.calls:
        return ToolExecuting.trusted(agent=agent, batch=agent.step), (RunBatch(),)
    return Success(agent=agent.but(consecutive_failures=0, final_text=event.text)), (Stop(),)


def _model_failed(state: State, event: ModelFailed, limits: Limits) -> Step:
    failures = state.agent.consecutive_failures + 1
    agent = state.agent.but(call_no=state.agent.call_no + 1, consecutive_failures=failures)
    if not event.failure.retryable or failures >= limits.max_consecutive_fail:
        if event.fallbacks:
            agent = agent.but(fallback=agent.fallback + 1, consecutive_failures=0)
            return Reasoning(agent=agent), (CallModel(),)
        agent = agent.but(final_text=event.text or agent.final_text)
        return Fail(agent=agent, failure=event.failure), (Stop(),)
    return Reasoning(agent=agent), (BackOff(failures, event.failure, event.retry_after), CallModel())


def _batch_done(state: State, event: BatchDone, limits: Limits) -> Step:
    """A batch without any success counts as one failure; one with a success starts the count again."""
    failures = state.agent.consecutive_failures + 1 if event.failed and not event.succeeded else 0
    agent = state.agent.but(consecutive_failures=failures)
    if failures >= limits.max_consecutive_fail:
        message = f"{failures} steps in a row failed; last: {event.last_error}"
        return _fail(agent, FailureKind.tool, message), (Stop(),)
    if agent.run_step >= limits.max_iter:
        return _exhausted(agent, limits), (Stop(),)
    return Reasoning.trusted(agent=agent), (CallModel(),)


def _asked(state: ToolExecuting, event: Asked, _limits: Limits) -> Step:
    return WaitingForUser(agent=state.agent, batch=state.batch, interrupt_id=event.interrupt_id), (Stop(),)


def _answered(state: WaitingForUser, _event: Answered, _limits: Limits) -> Step:
    return ToolExecuting(agent=state.agent, batch=state.batch), (RunBatch(),)


def _cancel_seen(state: State, event: CancelSeen, _limits: Limits) -> Step:
    agent = state.agent.but(call_no=state.agent.call_no + event.called, final_text=event.text or state.agent.final_text)
    return Interrupted(agent=agent, reason=event.reason), (Stop(),)


def _take_up_batch(state: ToolExecuting, _event: Resumed, _limits: Limits) -> Step:
    return state, (RunBatch(),)


def _broke(state: State, event: Broke, _limits: Limits) -> Step:
    return Fail(agent=state.agent, failure=event.failure), (Stop(),)


def _fail(agent: AgentState, kind: FailureKind, message: str) -> Fail:
    return Fail(agent=agent, failure=Failure(kind=kind, message=message, retryable=kind.retryable))


def _exhausted(agent: AgentState, limits: Limits) -> Fail:
    return _fail(agent, FailureKind.max_iter, f"no answer within {limits.max_iter} steps (max_iter)")


@dataclass(frozen=True, slots=True)
class Rule:
    """Where an event may lead, and the function that decides it."""

    targets: tuple[type[Any], ...]
    apply: Callable[[Any, Any, Limits], Step]


TABLE: dict[tuple[type[Any], type[Any]], Rule] = {
    (Ready, UserSaid): Rule((Ready,), _user_said),
    (Ready, RunStarted): Rule((Reasoning, Fail), _reason),
    (Ready, CancelSeen): Rule((Interrupted,), _cancel_seen),
    (Reasoning, ModelReplied): Rule((ToolExecuting, Reasoning, Success, Fail), _model_replied),
    (Reasoning, ModelFailed): Rule((Reasoning, Fail), _model_failed),
    (Reasoning, Resumed): Rule((Reasoning, Fail), _reason),
    (Reasoning, CancelSeen): Rule((Interrupted,), _cancel_seen),
    (Reasoning, Broke): Rule((Fail,), _broke),
    (ToolExecuting, BatchDone): Rule((Reasoning, Fail), _batch_done),
    (ToolExecuting, Asked): Rule((WaitingForUser,), _asked),
    (ToolExecuting, Resumed): Rule((ToolExecuting,), _take_up_batch),
    (ToolExecuting, CancelSeen): Rule((Interrupted,), _cancel_seen),
    (ToolExecuting, Broke): Rule((Fail,), _broke),
    (WaitingForUser, Answered): Rule((ToolExecuting,), _answered),
    (WaitingForUser, CancelSeen): Rule((Interrupted,), _cancel_seen),
    (WaitingForUser, Broke): Rule((Fail,), _broke),
    (Interrupted, Resumed): Rule((Reasoning, Fail), _reason),
    (Interrupted, UserSaid): Rule((Ready,), _user_said),
    (Success, UserSaid): Rule((Ready,), _user_said),
    (Success, Broke): Rule((Fail,), _broke),
    (Fail, UserSaid): Rule((Ready,), _user_said),
}


def diagram() -> str:
    """The table as a Mermaid state diagram."""
    lines = ["stateDiagram-v2", "    [*] --> Ready"]
    for (source, event), rule in TABLE.items():
        lines += [f"    {source.__name__} --> {target.__name__}: {event.__name__}" for target in rule.targets]
    return "\n".join(lines) + "\n"
