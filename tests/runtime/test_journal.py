"""The journal of a batch: what is recorded of a call, and what a recovery makes of it. Pure."""

from __future__ import annotations

import hashlib
from typing import Any

import pytest
from pydantic import ValidationError

from greenroom import ToolCallBlock, ToolOutput
from greenroom.runtime.journal import (
    CANCELLED_BEFORE_START,
    CANCELLED_WHILE_RUNNING,
    NOT_RUN_REPLY_CUT,
    Batch,
    CallRecord,
    Mark,
    Outcome,
    Recovery,
    call_digest,
    call_key,
    close_cancelled,
    close_unrun,
    decide,
    placeholder_results,
    results_message,
    segments,
)
from greenroom.runtime.messages import ToolResultBlock


def record(index: int = 0, **fields: object) -> CallRecord:
    base = CallRecord(key=f"s/1/1/{index}", call_id=f"c{index}", name="t", arguments={}, digest="d")
    return base.model_copy(update=fields)


HERE = Mark(place="inc-1", epoch=1)
PROCESS = Mark(place="process", epoch=1)


@pytest.mark.parametrize(
    ("call", "incarnation", "what"),
    [
        (record(outcome=Outcome.error("x")), None, Recovery.reuse),
        (record(), None, Recovery.run),
        (record(runs_in="sandbox"), "inc-1", Recovery.run),
        (record(effect="read_only"), "inc-1", Recovery.run),
        (record(started=HERE, runs_in="sandbox"), "inc-1", Recovery.ask_place),
        (record(started=HERE, runs_in="sandbox"), "inc-2", Recovery.unknown),
        (record(started=HERE, runs_in="sandbox"), None, Recovery.unknown),
        (record(started=HERE, runs_in="sandbox", effect="idempotent"), "inc-2", Recovery.run),
        (record(started=HERE, runs_in="sandbox", effect="read_only"), "inc-2", Recovery.run),
        (record(started=PROCESS), None, Recovery.unknown),
        (record(started=PROCESS), "process", Recovery.unknown),
        (record(started=HERE), "inc-1", Recovery.unknown),
        (record(started=Mark(place="".join(["inc", "-1"]), epoch=1), runs_in="sandbox"), "inc-1", Recovery.ask_place),
        (record(started=PROCESS, effect="idempotent"), None, Recovery.run),
        (record(started=PROCESS, effect="read_only"), None, Recovery.run),
    ],
)
def test_the_recovery_table(call: CallRecord, incarnation: str | None, what: Recovery) -> None:
    assert decide(call, incarnation) is what


def test_neighbouring_reads_run_together_and_everything_else_alone() -> None:
    read = {"effect": "read_only"}
    batch = [record(0, **read), record(1, **read), record(2), record(3, **read), record(4), record(5)]
    assert [[call.key[-1] for call in group] for group in segments(batch)] == [["0", "1"], ["2"], ["3"], ["4"], ["5"]]
    spawns = [record(i, spawns=True, parallel=True, effect="idempotent") for i in range(3)]
    assert [len(group) for group in segments(spawns)] == [3]


def test_a_cancelled_batch_is_closed_with_the_truth_in_call_order() -> None:
    done = Outcome.error("real")
    batch = Batch(step=1, calls=(record(0, outcome=done), record(1, started=PROCESS), record(2)))
    blocks = results_message(close_cancelled(batch)).content
    assert all(isinstance(block, ToolResultBlock) for block in blocks)
    assert [(block.call_id, block.text) for block in blocks if isinstance(block, ToolResultBlock)] == [
        ("c0", "real"),
        ("c1", CANCELLED_WHILE_RUNNING),
        ("c2", CANCELLED_BEFORE_START),
    ]


def test_a_closed_batch_of_a_failed_run_says_why_its_calls_did_not_end() -> None:
    batch = close_unrun(Batch(step=1, calls=(record(0, outcome=Outcome.error("real")), record(1))), "no store")
    first, second = results_message(batch).content
    assert isinstance(first, ToolResultBlock)
    assert isinstance(second, ToolResultBlock)
    assert first.text == "real"
    assert "no store" in second.text
    assert second.is_error


def test_results_say_which_of_them_are_errors() -> None:
    good = Outcome.of(ToolOutput.of_text("fine"))
    blocks = results_message(
        Batch(step=1, calls=(record(0, outcome=good), record(1, outcome=Outcome.error("x"))))
    ).content
    assert [block.is_error for block in blocks if isinstance(block, ToolResultBlock)] == [False, True]
    with pytest.raises(AssertionError, match="s/1/1/0 has no outcome"):
        results_message(Batch(step=1, calls=(record(0),)))


def test_calls_of_a_cut_reply_get_error_results_in_order() -> None:
    calls = [ToolCallBlock(id=id, name="t", arguments=None, raw_arguments="{") for id in ("a", "b")]
    message = placeholder_results(calls, NOT_RUN_REPLY_CUT)
    assert message.role == "tool"
    blocks = [block for block in message.content if isinstance(block, ToolResultBlock)]
    assert [(block.call_id, block.text, block.is_error) for block in blocks] == [
        ("a", NOT_RUN_REPLY_CUT, True),
        ("b", NOT_RUN_REPLY_CUT, True),
    ]


def test_only_a_failure_of_the_call_itself_counts() -> None:
    assert Outcome(content=()) == Outcome(content=(), is_error=False, counts=False, blob=None)
    assert not Outcome.of(ToolOutput.of_text("x")).counts
    assert Outcome.of(ToolOutput.of_text("x"), counts=True).counts
    assert not Outcome.error("x").counts
    assert Outcome.error("x", counts=True).counts
    assert Outcome.error("x").is_error
    assert not Outcome.of(ToolOutput.of_text("x")).is_error
    anything: Any = Outcome
    with pytest.raises(TypeError):
        anything.error("x", True)
    with pytest.raises(TypeError):
        anything.of(ToolOutput.of_text("x"), True)


def test_a_fresh_record_has_not_begun_may_run_and_is_open() -> None:
    fresh = record()
    assert (fresh.effect, fresh.runs_in, fresh.verdict, fresh.size) == ("effectful", "process", "allow", 0)
    assert (fresh.may_interrupt, fresh.spawns, fresh.parallel) == (False, False, False)
    assert (fresh.started, fresh.outcome, fresh.question, fresh.arguments_blob) == (None, None, None, None)
    assert fresh.open
    assert not record(outcome=Outcome.error("x")).open
    with pytest.raises(ValidationError):
        CallRecord.model_validate({**fresh.model_dump(), "surprise": 1})


def test_a_batch_finds_and_replaces_a_call_by_its_key_and_keeps_the_order() -> None:
    batch = Batch(step=4, calls=(record(0), record(1), record(2)))
    assert not batch.judged
    key = "/".join(["s", "1", "1", "1"])  # a key that is equal and another object: it came from a store
    changed = batch.put(record(1).but(key=key, outcome=Outcome.error("done")))
    assert [call.key for call in changed.calls] == ["s/1/1/0", "s/1/1/1", "s/1/1/2"]
    assert [call.key for call in changed.open_calls] == ["s/1/1/0", "s/1/1/2"]
    assert changed.call(key).outcome == Outcome.error("done")
    assert len(batch.open_calls) == 3, "the batch before is as it was"
    with pytest.raises(StopIteration):
        batch.call("s/1/1/9")


def test_a_key_says_whose_call_it_is_and_when_it_was_minted() -> None:
    assert call_key("s", 2, 7, 1) == "s/2/7/1"


def test_a_digest_is_of_tool_and_arguments_whatever_their_order() -> None:
    digest, size = call_digest("t", {"b": 1, "a": "ä"})
    canonical = '["t",{"a":"ä","b":1}]'.encode()
    assert (digest, size) == (hashlib.sha256(canonical).hexdigest()[:32], len(canonical))
    assert call_digest("t", {"a": "ä", "b": 1}) == (digest, size)
    assert call_digest("u", {"a": "ä", "b": 1})[0] != digest
    assert call_digest("t", {"a": "\ud800"})[1] > 0, "a half character has a digest too"


def test_what_may_run_together_is_told_by_effect_and_by_leave_alone() -> None:
    def grouped(*calls: CallRecord) -> list[int]:
        return [len(group) for group in segments(calls)]

    kinds: list[dict[str, Any]] = [{"effect": "read_only"}, {"effect": "idempotent"}, {"effect": "effectful"}]
    assert [grouped(record(0, **kind), record(1, **kind)) for kind in kinds] == [[2], [1, 1], [1, 1]]
    spawn = {"spawns": True, "effect": "idempotent"}
    assert grouped(record(0, **spawn), record(1, **spawn)) == [1, 1]
    assert grouped(record(0, parallel=True, **spawn), record(1, parallel=True, **spawn)) == [2]
    assert grouped(record(0, effect="read_only"), record(1, parallel=True, **spawn)) == [1, 1]
    assert grouped() == []
