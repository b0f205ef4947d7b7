"""The transition table: what it allows, what it refuses, and that no path through it leaves its bounds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from greenroom import Failure, FailureKind, IllegalTransition, Limits, RunStatus, Usage
from greenroom.runtime import machine
from greenroom.runtime.machine import (
    Answered,
    Asked,
    BackOff,
    BatchDone,
    Broke,
    CallModel,
    CancelSeen,
    ModelFailed,
    ModelReplied,
    Resumed,
    RunBatch,
    RunStarted,
    Stop,
    UserSaid,
)
from greenroom.runtime.state import (
    STATES,
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

PROVIDER = Failure(kind=FailureKind.provider, message="away", retryable=True)
PERMANENT = Failure(kind=FailureKind.provider_permanent, message="no such model", retryable=False)
REPLY = ModelReplied(calls=0, text="hello", stop_kind="end", usage=Usage(input_tokens=3, output_tokens=1))
ASKS = ModelReplied(calls=1, text=None, stop_kind="tool_calls")
GOOD = BatchDone(succeeded=1, failed=0)
BAD = BatchDone(succeeded=0, failed=1, last_error="boom")
EVENTS: list[Any] = [
    UserSaid(),
    RunStarted(),
    REPLY,
    ASKS,
    ModelReplied(calls=1, text="cut", stop_kind="length"),
    ModelReplied(calls=0, text=None, stop_kind="refusal"),
    ModelReplied(calls=0, text="so far", stop_kind="pause"),
    ModelFailed(PROVIDER),
    ModelFailed(PERMANENT),
    GOOD,
    BAD,
    Asked("k"),
    Answered(),
    CancelSeen("stop", "so far", called=True),
    Resumed(),
    Broke(PROVIDER),
]


def ready() -> Ready:
    return Ready(agent=AgentState(session_id="s"))


def drive(*events: Any, limits: Limits | None = None, state: State | None = None) -> tuple[State, tuple[Any, ...]]:
    state = state or ready()
    effects: tuple[Any, ...] = ()
    for event in events:
        state, effects = machine.step(state, event, limits or Limits())
    return state, effects


def test_a_message_is_answered() -> None:
    state, effects = drive(UserSaid(), RunStarted())
    assert isinstance(state, Reasoning)
    assert effects == (CallModel(),)
    state, effects = drive(REPLY, state=state)
    assert isinstance(state, Success)
    assert effects == (Stop(),)
    assert (state.agent.step, state.agent.run_step, state.agent.call_no) == (1, 1, 1)
    assert state.agent.final_text == "hello"
    assert state.agent.usage.input_tokens == 3


def test_calls_are_run_and_fed_back() -> None:
    state, effects = drive(RunStarted(), ASKS)
    assert isinstance(state, ToolExecuting)
    assert state.batch == 1
    assert effects == (RunBatch(),)
    state, effects = drive(GOOD, state=state)
    assert isinstance(state, Reasoning)
    assert effects == (CallModel(),)


def test_the_last_allowed_batch_still_runs_then_the_run_is_exhausted() -> None:
    state, effects = drive(RunStarted(), ASKS, GOOD, ASKS, limits=Limits(max_iter=2))
    assert effects == (RunBatch(),)
    state, effects = drive(GOOD, state=state, limits=Limits(max_iter=2))
    assert isinstance(state, Fail)
    assert machine.status_of(state) is RunStatus.exhausted
    assert effects == (Stop(),)


def test_resuming_does_not_start_the_step_count_again_and_a_new_message_does() -> None:
    limits = Limits(max_iter=1)
    cancelled, _ = drive(RunStarted(), ASKS, CancelSeen("stop"), limits=limits)
    assert isinstance(cancelled, Interrupted)
    state, effects = drive(Resumed(), state=cancelled, limits=limits)
    assert isinstance(state, Fail)
    assert effects == (Stop(),)
    state, effects = drive(UserSaid(), RunStarted(), state=cancelled, limits=limits)
    assert effects == (CallModel(),)


def test_failures_in_a_row_end_the_run_and_a_success_starts_the_count_again() -> None:
    state, effects = drive(RunStarted(), ModelFailed(PROVIDER), ModelFailed(PROVIDER))
    assert effects == (BackOff(2, PROVIDER), CallModel())
    state, effects = drive(ASKS, GOOD, ModelFailed(PROVIDER), ModelFailed(PROVIDER), state=state)
    assert isinstance(state, Reasoning)
    state, effects = drive(ModelFailed(PROVIDER), state=state)
    assert isinstance(state, Fail)
    assert state.failure == PROVIDER


def test_steps_whose_calls_all_fail_count_as_failures_in_a_row() -> None:
    state, _ = drive(RunStarted(), ASKS, BAD, ASKS, BAD)
    assert isinstance(state, Reasoning)
    state, _ = drive(ASKS, BAD, state=state)
    assert isinstance(state, Fail)
    assert state.failure.kind is FailureKind.tool
    assert "boom" in state.failure.message


def test_a_batch_with_one_success_is_no_failure() -> None:
    mixed = BatchDone(succeeded=1, failed=2)
    state, _ = drive(RunStarted(), *([ASKS, mixed] * 5))
    assert state.agent.consecutive_failures == 0


@pytest.mark.parametrize(
    ("kind", "failure"),
    [
        ("length", FailureKind.truncated),
        ("context_window", FailureKind.truncated),
        ("refusal", FailureKind.content_filter),
        ("content_filter", FailureKind.content_filter),
    ],
)
def test_a_cut_or_refused_reply_ends_the_run_and_runs_no_call(kind: Any, failure: FailureKind) -> None:
    state, effects = drive(RunStarted(), ModelReplied(calls=2, text="x", stop_kind=kind))
    assert isinstance(state, Fail)
    assert state.failure.kind is failure
    assert not state.failure.retryable
    assert effects == (Stop(),)


def test_a_paused_turn_goes_on_within_the_bound_of_steps() -> None:
    paused = ModelReplied(calls=0, text="so far", stop_kind="pause")
    state, effects = drive(RunStarted(), paused, limits=Limits(max_iter=2))
    assert (type(state), effects) == (Reasoning, (CallModel(),))
    state, effects = drive(paused, state=state, limits=Limits(max_iter=2))
    assert isinstance(state, Fail)
    assert machine.status_of(state) is RunStatus.exhausted


def test_a_permanent_error_is_not_tried_again() -> None:
    state, effects = drive(RunStarted(), ModelFailed(PERMANENT))
    assert isinstance(state, Fail)
    assert effects == (Stop(),)
    assert state.agent.call_no == 1


def test_a_question_parks_and_its_answer_goes_on() -> None:
    state, effects = drive(RunStarted(), ASKS, Asked("s/1/1/0"))
    assert isinstance(state, WaitingForUser)
    assert state.interrupt_id == "s/1/1/0"
    state, effects = drive(Answered(), state=state)
    assert effects == (RunBatch(),)


def test_a_cut_call_counts_as_made() -> None:
    state, _ = drive(RunStarted(), CancelSeen("stop", "partial", called=True))
    assert state.agent.call_no == 1
    assert state.agent.final_text == "partial"
    state, _ = drive(RunStarted(), ASKS, GOOD, CancelSeen("stop", called=True))
    assert state.agent.call_no == 2
    state, _ = drive(RunStarted(), ASKS, CancelSeen("stop"))
    assert state.agent.call_no == 1


def agent_state(**counts: Any) -> AgentState:
    return AgentState(session_id="s", **counts)


def test_bounds_hold_for_a_session_whose_agent_has_smaller_ones_by_now() -> None:
    limits = Limits(max_iter=3, max_consecutive_fail=2)
    paused = ModelReplied(calls=0, text="so far", stop_kind="pause")
    state, _ = drive(paused, state=Reasoning(agent=agent_state(run_step=5)), limits=limits)
    assert machine.status_of(state) is RunStatus.exhausted
    state, _ = drive(Resumed(), state=Interrupted(agent=agent_state(run_step=5)), limits=limits)
    assert machine.status_of(state) is RunStatus.exhausted
    state, _ = drive(GOOD, state=ToolExecuting(agent=agent_state(run_step=5), batch=5), limits=limits)
    assert machine.status_of(state) is RunStatus.exhausted
    state, _ = drive(BAD, state=ToolExecuting(agent=agent_state(consecutive_failures=4), batch=5), limits=limits)
    assert isinstance(state, Fail)
    assert state.failure.kind is FailureKind.tool
    state, _ = drive(ModelFailed(PROVIDER), state=Reasoning(agent=agent_state(consecutive_failures=4)), limits=limits)
    assert isinstance(state, Fail)
    assert state.failure == PROVIDER


def test_a_success_starts_the_count_of_failures_again() -> None:
    state, _ = drive(RunStarted(), ModelFailed(PROVIDER), REPLY)
    assert state.agent.consecutive_failures == 0
    state, _ = drive(ModelFailed(PERMANENT, fallbacks=1), state=Reasoning(agent=agent_state(consecutive_failures=2)))
    assert (state.agent.consecutive_failures, state.agent.fallback) == (0, 1)
    state, _ = drive(UserSaid(), state=Success(agent=agent_state(run_step=4, consecutive_failures=2, fallback=1)))
    assert state.agent == agent_state()


@pytest.mark.parametrize("kind", ["end", "tool_calls", "other"])
def test_a_reply_without_calls_is_the_answer_whatever_its_stop_says(kind: Any) -> None:
    state, effects = drive(RunStarted(), ModelReplied(calls=0, text="hello", stop_kind=kind))
    assert (type(state), effects) == (Success, (Stop(),))


@pytest.mark.parametrize("kind", ["end", "tool_calls", "pause", "other"])
def test_a_reply_with_calls_runs_them_whatever_its_stop_says(kind: Any) -> None:
    state, effects = drive(RunStarted(), ModelReplied(calls=1, text="", stop_kind=kind))
    assert (type(state), effects) == (ToolExecuting, (RunBatch(),))


@pytest.mark.parametrize("kind", FailureKind)
def test_a_failure_is_reported_as_failed_and_running_out_of_steps_as_exhausted(kind: FailureKind) -> None:
    state = Fail(agent=agent_state(), failure=Failure(kind=kind, message="m", retryable=False))
    spent = kind.value in ("max_iter", "budget")
    assert machine.status_of(state) is (RunStatus.exhausted if spent else RunStatus.failed)


def test_a_state_that_is_no_stop_has_no_status() -> None:
    for state in (ready(), Reasoning(agent=agent_state()), ToolExecuting(agent=agent_state(), batch=1)):
        with pytest.raises(IllegalTransition, match=type(state).__name__):
            machine.status_of(state)


def test_every_pair_outside_the_table_is_refused_and_every_pair_inside_keeps_to_its_targets() -> None:
    agent = AgentState(session_id="s")
    samples: list[Any] = [
        Ready(agent=agent),
        Reasoning(agent=agent),
        ToolExecuting(agent=agent, batch=1),
        WaitingForUser(agent=agent, batch=1, interrupt_id="k"),
        Interrupted(agent=agent),
        Success(agent=agent),
        Fail(agent=agent, failure=PROVIDER),
    ]
    assert {type(sample) for sample in samples} == set(STATES)
    for state in samples:
        for event in EVENTS:
            rule = machine.TABLE.get((type(state), type(event)))
            if rule is None:
                with pytest.raises(IllegalTransition):
                    machine.step(state, event, Limits())
            else:
                assert isinstance(machine.step(state, event, Limits())[0], rule.targets)


@given(st.lists(st.sampled_from(EVENTS), max_size=60), st.integers(1, 4), st.integers(1, 3))
def test_no_sequence_of_events_leaves_the_bounds(events: list[Any], max_iter: int, max_fail: int) -> None:
    limits = Limits(max_iter=max_iter, max_consecutive_fail=max_fail)
    state: State = ready()
    for event in events:
        try:
            state, effects = machine.step(state, event, limits)
        except IllegalTransition:
            continue
        assert state.agent.run_step <= max_iter
        assert state.agent.consecutive_failures <= max_fail
        assert state.agent.call_no >= state.agent.step
        assert (Stop() in effects) == isinstance(state, Success | Fail | WaitingForUser | Interrupted)
        if Stop() in effects:
            machine.status_of(state)


@given(st.sampled_from(EVENTS))
def test_every_state_comes_back_from_its_json(event: Any) -> None:
    for source, kind in machine.TABLE:
        if kind is type(event):
            continue
        assert source in STATES
    state, _ = drive(RunStarted())
    assert type(state).model_validate_json(state.model_dump_json()) == state


def test_the_diagram_in_the_docs_is_the_table() -> None:
    page = Path(__file__).parents[2] / "docs" / "states.md"
    assert machine.diagram() in page.read_text(encoding="utf-8"), "run: python docs/make_states.py"
