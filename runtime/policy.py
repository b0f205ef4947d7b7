"""Judging a batch: once, whole, before any of its calls runs. The verdicts are stored with the calls.

The policy sees the final calls and cannot be gone around: a call runs only with the verdict "allow". "deny" is an error
result; "ask" parks the run until someone decides.
"""

from __future__ import annotations

import json
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from greenroom.runtime.calls import Interrupt, ProposedCall, Verdict
from greenroom.runtime.errors import ConfigError
from greenroom.runtime.journal import DENIED, DENIED_BY_POLICY, Batch, CallRecord, Outcome
from greenroom.runtime.messages import clean
from greenroom.runtime.ports import ToolPolicy

APPROVAL = "approval"
"""The kind of the question that a verdict "ask" puts."""


class BrokenPolicy(Exception):
    """A policy raised, or did not give one verdict per call: nothing of the batch may run."""


async def judged(batch: Batch, policy: ToolPolicy | None, session_id: str) -> Batch:
    """The batch with a verdict on every call that could run; raises BrokenPolicy."""
    if batch.judged:
        return batch
    calls = [call for call in batch.calls if call.open]
    if policy is not None and calls:
        for call, verdict in zip(calls, await _verdicts(policy, session_id, calls), strict=True):
            batch = batch.put(_with_verdict(call, verdict))
    return batch.but(judged=True)


def proposed(call: CallRecord) -> ProposedCall:
    """The call as others are shown it; what they do with it changes nothing."""
    return ProposedCall(call.key, call.name, deepcopy(call.arguments), call.effect)


async def _verdicts(policy: ToolPolicy, session_id: str, calls: list[CallRecord]) -> list[Verdict]:
    try:
        verdicts = list(await policy.judge(session_id, tuple(map(proposed, calls))))
    except Exception as error:
        raise BrokenPolicy(f"{type(policy).__name__} raised {type(error).__name__}: {error}") from error
    if len(verdicts) != len(calls) or not all(isinstance(verdict, Verdict) for verdict in verdicts):
        raise BrokenPolicy(f"{type(policy).__name__} did not give one Verdict for each of {len(calls)} calls")
    return verdicts


def _with_verdict(call: CallRecord, verdict: Verdict) -> CallRecord:
    match verdict.decision:
        case "deny":
            text = " ".join(part for part in (DENIED_BY_POLICY, verdict.reason) if part)
            return call.but(verdict="deny", outcome=Outcome.error(text, counts=True))
        case "ask":
            payload = {"tool": call.name, "arguments": call.arguments, "reason": verdict.reason}
            return call.but(verdict="ask", question=Interrupt(kind=APPROVAL, payload=payload))
    return call


class _Ruling(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    decision: str
    message: str = ""


@dataclass(frozen=True, slots=True)
class Ruling:
    """Someone's decision on a call: it may run, or has this outcome."""

    outcome: Outcome | None


def ruling_of(response: Any) -> Ruling:
    """`{"decision": "allow" | "deny", "message": text}` as an object or its JSON; raises ConfigError for all else."""
    try:
        ruling = _Ruling.model_validate(json.loads(response) if isinstance(response, str) else response)
    except (ValidationError, ValueError):
        ruling = _Ruling(decision="")
    if ruling.decision not in ("allow", "deny"):
        raise ConfigError(
            f"{str(response)[:80]!r} does not answer the question whether a call may run",
            hint='Answer {"decision": "allow"} or {"decision": "deny", "message": "why"}',
        )
    if ruling.decision == "allow":
        return Ruling(None)
    return Ruling(Outcome.error(" ".join(part for part in (DENIED, clean(ruling.message)) if part)))
