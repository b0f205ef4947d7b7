"""The journal of the open batch: what each call is, whether it may have begun, how it ended. Pure.

The promise (docs: design, "Journal and recovery"): a finished effectful call is never run again; a call that may have
run is never run again unless it is declared read-only or idempotent; the model is told the truth. `decide` below is
that promise as one table; batch.py carries it out.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from enum import Enum
from typing import Any, Literal

from greenroom.runtime.calls import Effect, Interrupt, ToolOutput, compact_json
from greenroom.runtime.messages import ContentBlock, Message, ToolCallBlock, ToolResultBlock, Value

OUTCOME_UNKNOWN = (
    "Outcome unknown: this call was started, then the process running it was lost before the result was recorded. "
    "It may or may not have taken effect. Check before doing it again."
)
CANCELLED_BEFORE_START = "Cancelled: the run was stopped before this call had started. It did not run."
CANCELLED_WHILE_RUNNING = (
    "Cancelled: the run was stopped while this call was running. It may have taken partial effect; its result is lost."
)
NOT_RUN_REPLY_CUT = "Not run: the reply that asked for this call was cut off, so its arguments may be incomplete."
CUT_REPLY_NOTE = (
    "The run was stopped while you were answering, so your last message above is incomplete. It now continues."
)
DENIED_BY_POLICY = "Denied by the policy of this session. It did not run."
DENIED = "Denied: it was not approved. It did not run."
NOT_RUN_SANDBOX_LOST = "The sandbox was lost before this call had started. It did not run."
NOT_RUN_RUN_FAILED = "Not run, or its result is lost: the run ended first. Reason: {reason}"

RESULT_WITHHELD = "This call has run, or may have; its result could not be passed on: middleware {name!r} failed."

WORKSPACE_RESTORED = (
    "The sandbox was lost, and the workspace was put back to its last snapshot. What these calls had changed in it is "
    "undone: {calls}. Look at the files before you go on."
)


def workspace_restored(calls: Iterable[str]) -> str:
    """What a model is told of these calls, each `epoch/step/index tool`."""
    places = (call.split(" ", 1) for call in calls)
    return WORKSPACE_RESTORED.format(calls=", ".join(f"{tool} in step {key.split('/')[1]}" for key, tool in places))


InProcess = "process"
"""`Mark.place` of a call that runs in the owner's own process, which nothing can fence or ask afterwards."""


class Mark(Value):
    """Durable before an effect: the call may have begun, at `place` (a sandbox incarnation, or "process")."""

    place: str
    epoch: int


class Outcome(Value):
    """A call's result. `counts`: a failure of the call itself, which max_consecutive_fail counts.

    blob: in a stored head, where a large content lies instead.
    """

    content: tuple[ContentBlock, ...]
    is_error: bool = False
    counts: bool = False
    blob: str | None = None

    @classmethod
    def of(cls, output: ToolOutput, *, counts: bool = False) -> Outcome:
        return cls.trusted(content=output.content, is_error=output.is_error, counts=counts)

    @property
    def output(self) -> ToolOutput:
        return ToolOutput.trusted(content=self.content, is_error=self.is_error)

    @classmethod
    def error(cls, text: str, *, counts: bool = False) -> Outcome:
        return cls.of(ToolOutput.of_text(text, is_error=True), counts=counts)


class CallRecord(Value):
    """One call of a batch, final: what will run is what stands here, whatever a recovering owner's model says.

    key: minted once, `{sid}/{epoch}/{step}/{index}`; call_id: the provider's own id, for its history alone;
    runs_in: whether a sandbox keeps the outcome by key; verdict: what the policy said, and "allow" once someone has;
    question: what an interrupting call asks, once it has run, or the policy about it; answered: what a hook gives in
    the tool's place, which then does not run;
    size: bytes of the arguments; arguments_blob: in a stored head, where large arguments lie instead.
    """

    key: str
    call_id: str
    name: str
    arguments: dict[str, Any]
    digest: str
    effect: Effect = "effectful"
    runs_in: Literal["sandbox", "process"] = "process"
    may_interrupt: bool = False
    spawns: bool = False
    parallel: bool = False
    size: int = 0
    arguments_blob: str | None = None
    verdict: Literal["allow", "deny", "ask"] = "allow"
    started: Mark | None = None
    outcome: Outcome | None = None
    question: Interrupt | None = None
    answered: Outcome | None = None

    @property
    def open(self) -> bool:
        return self.outcome is None


class Batch(Value):
    """The calls of step `step`, in the order the model asked for them; `judged`: the policy has seen them."""

    step: int
    judged: bool = False
    calls: tuple[CallRecord, ...]

    def call(self, key: str) -> CallRecord:
        return next(record for record in self.calls if record.key == key)

    def put(self, record: CallRecord) -> Batch:
        return self.but(calls=tuple(record if old.key == record.key else old for old in self.calls))

    @property
    def open_calls(self) -> tuple[CallRecord, ...]:
        return tuple(record for record in self.calls if record.open)


def call_key(session_id: str, epoch: int, step: int, index: int) -> str:
    return f"{session_id}/{epoch}/{step}/{index}"


def later_call(one: str | None, other: str) -> str:
    """The later of two operations of one session, by their keys."""
    return other if one is None or _place_of(other) > _place_of(one) else one


def _place_of(key: str) -> tuple[int, ...]:
    """Epoch, step and index of a call, and which of its operations it is."""
    call, _, number = key.partition("#")
    return (*(int(part) for part in call.rsplit("/", 3)[1:]), int(number or 0))


def call_digest(tool: str, arguments: dict[str, Any]) -> tuple[str, int]:
    """Digest of (tool, final arguments), and their bytes; a sandbox refuses a call key that returns with another."""
    canonical = compact_json([tool, arguments]).encode("utf-8", "surrogatepass")
    return hashlib.sha256(canonical).hexdigest()[:32], len(canonical)


class Recovery(Enum):
    """What is to be done with a call of a batch that is taken up (again)."""

    reuse = "its outcome is recorded"
    run = "it certainly did not run, or may run again"
    ask_place = "the sandbox it was started in still stands: it answers the outcome, or runs it once"
    unknown = "it may have run and must not run again"


def decide(record: CallRecord, incarnation: str | None) -> Recovery:
    """What to do with a call, given the incarnation of the sandbox as it stands now (None: there is none)."""
    if record.outcome is not None:
        return Recovery.reuse
    if record.started is None:
        return Recovery.run
    if record.runs_in == "sandbox" and record.started.place == incarnation:
        return Recovery.ask_place
    return Recovery.unknown if record.effect == "effectful" else Recovery.run


def segments(records: Iterable[CallRecord]) -> list[tuple[CallRecord, ...]]:
    """What may run together, in order: neighbouring read-only calls, neighbouring parallel spawns, others alone."""
    groups: list[list[CallRecord]] = []
    previous: object = None
    for record in records:
        kind: object = "read" if record.effect == "read_only" else "spawn" if record.parallel else record.key
        if groups and kind == previous:
            groups[-1].append(record)
        else:
            groups.append([record])
        previous = kind
    return [tuple(group) for group in groups]


def results_message(batch: Batch) -> Message:
    """The one tool message of a closed batch: a result per call, in call order."""
    blocks = []
    for record in batch.calls:
        assert record.outcome is not None, f"call {record.key} has no outcome"
        outcome = record.outcome
        block = ToolResultBlock.trusted(call_id=record.call_id, content=outcome.content, is_error=outcome.is_error)
        blocks.append(block)
    return Message.trusted(role="tool", content=tuple(blocks))


def placeholder_results(calls: Iterable[ToolCallBlock], text: str) -> Message:
    """Error results for calls that were never recorded in a batch."""
    content = ToolOutput.of_text(text).content
    blocks = tuple(ToolResultBlock(call_id=call.id, content=content, is_error=True) for call in calls)
    return Message(role="tool", content=blocks)


def close_cancelled(batch: Batch) -> Batch:
    """The batch with a placeholder for every unanswered call, saying whether it had started."""
    for record in batch.open_calls:
        text = CANCELLED_BEFORE_START if record.started is None else CANCELLED_WHILE_RUNNING
        batch = batch.put(record.but(outcome=Outcome.error(text)))
    return batch


def close_unrun(batch: Batch, reason: str) -> Batch:
    """The batch with a placeholder for every unanswered call of a run that failed."""
    for record in batch.open_calls:
        outcome = Outcome.error(NOT_RUN_RUN_FAILED.format(reason=reason))
        batch = batch.put(record.but(outcome=outcome))
    return batch
