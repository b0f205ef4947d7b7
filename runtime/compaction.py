"""Compaction: what a model is shown of a long history. The transcript itself stays whole, in the store and in memory.

A Compaction says that the first messages are shown as one text. It never parts a call from its result, it lies in the
head and so survives a resume, and one that fails leaves everything as it was.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import aclosing
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from greenroom.runtime.calls import ModelRequest
from greenroom.runtime.cancel import CancelToken
from greenroom.runtime.messages import (
    Compaction,
    Message,
    MessageDelta,
    TextBlock,
    ToolResultBlock,
    Usage,
    clean,
)
from greenroom.runtime.ports import LlmProvider

BYTES_PER_TOKEN = 4
"""By which a history's tokens are estimated: no provider is asked."""

MAX_SUMMARY = 6000
"""Bytes of a summary; it rides in every head."""

MAX_SHOWN = 2000
"""Characters of one block that a summary is made of."""

INTRODUCTION = "Earlier messages of this conversation were summarized to save room. The summary:\n\n"
ASK = (
    "Summarize this conversation for an assistant that will go on with it and sees nothing else of it. Keep the task, "
    "what was decided and why, what was done and found (with names, paths and numbers), what is still open. "
    "Answer with the summary alone.\n\n"
)


class CompactionFailed(Exception):
    """No summary was made; the history stays as it was."""


class SummaryCompactor(BaseModel):
    """Has a model summarize the older part of a history once it is long.

    max_tokens: estimated, from which on; keep: messages at the end that stay as they are, more where that would part a
    call from its result; provider: who summarizes, None for the agent's own.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=True)

    max_tokens: int = Field(default=100_000, ge=1)
    keep: int = Field(default=8, ge=0)
    provider: Any = None

    def cut(self, messages: Sequence[Message]) -> int | None:
        """How many messages at the start are to be summarized; None while there is room."""
        if estimate(messages) <= self.max_tokens:
            return None
        return safe_cut(messages, self.keep) or None

    async def summarize(
        self, messages: Sequence[Message], provider: LlmProvider, number: int, session_id: str, cancel: CancelToken
    ) -> tuple[str, Usage]:
        """The summary and what it cost; raises CompactionFailed, ProviderError. `number`: of this session's summaries.

        The history goes as plain text: no provider can find a call without its result in it, or ask for tools.
        """
        request = ModelRequest(
            session_id=session_id,
            call_no=number,
            system=None,
            messages=(Message.user(ASK + as_text(messages)),),
        )
        whole: Message | None = None
        async with aclosing(provider.stream(request, cancel)) as deltas:  # type: ignore[type-var]  # streams are generators
            async for delta in deltas:
                whole = delta.message if isinstance(delta, MessageDelta) else whole
        if whole is None:
            raise CompactionFailed("the model gave no summary")
        return whole.text, whole.usage or Usage()


def checked_summary(text: str) -> str:
    """The summary as it is kept; raises CompactionFailed when it says nothing."""
    text = clean(text).strip()
    if not text:
        raise CompactionFailed("the summary is empty")
    return text.encode()[:MAX_SUMMARY].decode("utf-8", "ignore")


def shown(messages: Sequence[Message], compaction: Compaction | None) -> tuple[Message, ...]:
    """The history as a model sees it."""
    if compaction is None:
        return tuple(messages)
    return (Message.user(INTRODUCTION + compaction.summary), *messages[compaction.upto :])


def safe_cut(messages: Sequence[Message], keep: int) -> int:
    """Where to cut so that at least the last `keep` messages stay and no result stands without its call."""
    at = max(0, len(messages) - keep)
    while at > 0 and ((at < len(messages) and _holds_results(messages[at])) or messages[at - 1].tool_calls):
        at -= 1
    return at


def estimate(messages: Sequence[Message]) -> int:
    """Tokens, roughly."""
    return sum(len(message.encoded) for message in messages) // BYTES_PER_TOKEN


def as_text(messages: Sequence[Message]) -> str:
    """The messages as plain text, long blocks cut."""
    lines = []
    for message in messages:
        for block in message.content:
            if isinstance(block, ToolResultBlock):
                lines.append(f"result: {_clipped(block.text)}")
            elif isinstance(block, TextBlock):
                lines.append(f"{message.role}: {_clipped(block.text)}")
        lines += [f"call: {call.name} {_clipped(call.raw_arguments)}" for call in message.tool_calls]
    return "\n".join(lines)


def _clipped(text: str) -> str:
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]} [... {len(text) - MAX_SHOWN} characters]"


def _holds_results(message: Message) -> bool:
    return any(isinstance(block, ToolResultBlock) for block in message.content)
