"""Small pure parts: back-off, ids, the strict history, events."""

from __future__ import annotations

import pickle
from email.utils import parsedate_to_datetime

import pytest
from scenes import CASES

import greenroom
from greenroom import ConfigError, GreenroomError, Interrupt, Message, RunFailed, ToolCallBlock
from greenroom.runtime import errors
from greenroom.runtime.events import Event, EventBuffer
from greenroom.runtime.ids import check_root_id, child_id, root_of
from greenroom.runtime.messages import ToolResultBlock
from greenroom.runtime.results import Failure, FailureKind, RunResult, RunStatus
from greenroom.runtime.retry import MAX_BACKOFF, backoff, parse_retry_after
from greenroom.testing import HistoryError, strict_history


def test_back_off_doubles_within_its_jitter_and_is_capped() -> None:
    assert [backoff(0.2, attempt, 0.0) for attempt in (1, 2, 3)] == [0.2, 0.4, 0.8]
    assert backoff(0.2, 3, 0.999) >= 0.4
    assert backoff(20, 3, 0.0) == MAX_BACKOFF
    assert backoff(0.2, 10**6, 0.0) == MAX_BACKOFF
    assert backoff(0, 5, 0.5) == 0.0
    assert backoff(0.2, 1, 0.0, retry_after=7) == 7
    assert backoff(0.2, 1, 0.0, retry_after=float("inf")) == MAX_BACKOFF


@pytest.mark.parametrize("line", (CASES / "C40_retry_after.tsv").read_text().splitlines()[1:])
def test_retry_after_is_read_in_both_forms_and_never_believed_blindly(line: str) -> None:
    _, value, now, want = line.split("\t")
    moment = parsedate_to_datetime(now.replace(".200", "")).timestamp() + 0.2 if now != "-" else 0.0
    delay = parse_retry_after("" if value == "(empty)" else value, moment)
    if want.startswith("own"):
        assert delay is None
    elif want.startswith(">="):
        assert delay is not None
        assert 29.8 <= delay <= 31
    else:
        assert delay is not None
        assert backoff(0.2, 1, 0.0, retry_after=delay) == min(MAX_BACKOFF, float(value))


def test_a_child_is_named_by_its_call_and_names_its_root() -> None:
    child = child_id("root", "root/1/2/0")
    assert child == child_id("root", "root/1/2/0") != child_id("root", "root/1/2/1")
    assert root_of(child) == root_of(root_of(child)) == "root"
    for bad in ("", "a~b", "x" * 300, "a\nb"):
        with pytest.raises(ConfigError):
            check_root_id(bad)
    assert check_root_id("../häuser/1") == "../häuser/1"


# -- histories


def assistant(*ids: str) -> Message:
    return Message(role="assistant", content=tuple(ToolCallBlock(id=id, name="t", arguments={}) for id in ids))


def tool(*ids: str) -> Message:
    return Message(role="tool", content=tuple(ToolResultBlock(call_id=id, content=()) for id in ids))


USER = Message.user("hi")


def test_a_paired_history_is_taken() -> None:
    strict_history([USER, assistant("a", "b"), tool("a", "b"), USER])
    strict_history([USER, assistant("a")], open_calls=["a"])


@pytest.mark.parametrize(
    "messages",
    [
        [assistant("a"), tool("a")],
        [USER, assistant("a"), USER],
        [USER, assistant("a", "b"), tool("b", "a")],
        [USER, assistant("a", "b"), tool("a")],
        [USER, assistant("a"), tool("a"), tool("a")],
        [USER, assistant("a", "a"), tool("a", "a")],
        [USER, assistant("a")],
        [USER, Message(role="assistant", content=())],
        [Message.user(" ")],
    ],
)
def test_a_history_that_a_provider_would_refuse_is_refused(messages: list[Message]) -> None:
    with pytest.raises(HistoryError):
        strict_history(messages)


# -- events


async def test_a_slow_reader_is_told_what_it_missed_and_holds_nobody_up() -> None:
    buffer = EventBuffer(capacity=10)
    for number in range(25):
        buffer.emit(Event(f"1.{number}", "text", "s", 0.0, {"text": str(number)}))
    reader = buffer.follow()
    first = await anext(reader)
    assert (first.type, first.missed) == ("gap", 15)
    assert (await anext(reader)).text == "15"
    assert buffer.read(buffer.position_after("1.22"))[0][0].id == "1.23"
    await reader.aclose()  # type: ignore[attr-defined]  # an async generator


def test_an_events_fields_are_attributes_and_its_json_is_flat() -> None:
    result = RunResult(session_id="s", status=RunStatus.completed)
    event = Event("1.1", "run_finished", "s", 2.0, {"result": result})
    assert event.result is result
    assert event.to_json()["result"]["status"] == "completed"
    with pytest.raises(AttributeError, match="no 'text'"):
        _ = event.text
    assert pickle.loads(pickle.dumps(event)) == event


# -- errors


def every_error() -> list[type[GreenroomError]]:
    found = [e for e in vars(errors).values() if isinstance(e, type) and issubclass(e, GreenroomError)]
    assert len(found) > 30
    return found


@pytest.mark.parametrize("kind", every_error())
def test_every_error_pickles_with_its_fields_and_is_public(kind: type[GreenroomError]) -> None:
    error = kind("what happened", hint="do this")
    error.session_id = "s-1"  # type: ignore[attr-defined]  # fields lie in the instance's dictionary
    back = pickle.loads(pickle.dumps(error))
    assert type(back) is kind
    assert vars(back) == vars(error)
    assert str(back) == "what happened. do this"
    assert kind.__name__ in greenroom.__all__
    assert kind.__name__ in (errors.__doc__ or "")


def test_a_failed_run_arrives_with_its_result() -> None:
    failure = Failure(kind=FailureKind.tool, message="boom", retryable=True)
    result = RunResult(session_id="s", status=RunStatus.failed, text="so far", failure=failure)
    back = pickle.loads(pickle.dumps(RunFailed.of(result, failure, resumable=True)))
    assert back.result == result
    assert (back.failure, back.resumable) == (failure, True)
    assert "tool" in str(back)
    assert "boom" in str(back)


def test_an_interrupt_needs_only_a_kind() -> None:
    assert Interrupt(kind="approval").payload == {}


def test_a_copy_of_a_message_has_nothing_of_what_was_computed_of_the_first() -> None:
    first = Message.user("first")
    assert (first.encoded, first.text) == (first.encoded, "first")
    content = Message.user("second").content
    for copy in (first.but(content=content), first.model_copy(update={"content": content})):
        assert copy.text == "second"
        assert b"second" in copy.encoded
    assert "encoded" not in vars(pickle.loads(pickle.dumps(first)))
    assert pickle.loads(pickle.dumps(first)) == first
