"""The seven states of a session, each a plain value that can be stored.

All carry the same small AgentState. The open batch lies in the head's journal: ToolExecuting and WaitingForUser name
it and copy nothing of it.
"""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

from pydantic import Field

from greenroom.runtime.messages import ShortText, Usage, Value
from greenroom.runtime.results import Failure


class AgentState(Value):
    """Counters of a session.

    step: model replies over its whole life; run_step: replies in this run (what max_iter bounds; a new message resets
    it, resume and answer keep it); call_no: model calls made, failed ones included; consecutive_failures: steps in a
    row without any success; final_text: the last text the assistant said in this run; fallback: which of the agent's
    providers answers, 0 the first: a new message begins with that one again.
    """

    session_id: str
    step: int = 0
    run_step: int = 0
    call_no: int = 0
    consecutive_failures: int = 0
    final_text: str | None = None
    fallback: int = 0
    usage: Usage = Usage()


class Ready(Value):
    """About to reason: idle, or holding messages that no run has taken up."""

    name: Literal["Ready"] = "Ready"
    agent: AgentState


class Reasoning(Value):
    """A model call is due or running."""

    name: Literal["Reasoning"] = "Reasoning"
    agent: AgentState


class ToolExecuting(Value):
    """The batch of step `batch` is open in the head's journal."""

    name: Literal["ToolExecuting"] = "ToolExecuting"
    agent: AgentState
    batch: int


class WaitingForUser(Value):
    """Parked: the call `interrupt_id` of the open batch waits for an answer."""

    name: Literal["WaitingForUser"] = "WaitingForUser"
    agent: AgentState
    batch: int
    interrupt_id: str


class Interrupted(Value):
    """A run was cancelled and parked; `resume` goes on, a new message drops it."""

    name: Literal["Interrupted"] = "Interrupted"
    agent: AgentState
    reason: ShortText = ""


class Success(Value):
    name: Literal["Success"] = "Success"
    agent: AgentState


class Fail(Value):
    name: Literal["Fail"] = "Fail"
    agent: AgentState
    failure: Failure


State: TypeAlias = Annotated[
    Ready | Reasoning | ToolExecuting | WaitingForUser | Interrupted | Success | Fail, Field(discriminator="name")
]
STATES: tuple[type[Value], ...] = (Ready, Reasoning, ToolExecuting, WaitingForUser, Interrupted, Success, Fail)


def in_flight(state: State) -> bool:
    """Whether a run is between its start and its stop."""
    return isinstance(state, Reasoning | ToolExecuting)
