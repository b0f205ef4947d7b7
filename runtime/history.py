"""strict_history: whether a history is one that the strictest provider takes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from greenroom.runtime.messages import Message, TextBlock, ToolResultBlock


class HistoryError(ValueError):
    """A provider would refuse the history; the text says where and why."""


def strict_history(messages: Sequence[Message], open_calls: Iterable[str] = ()) -> None:
    """Raises HistoryError unless every call has exactly one result, in call order, right after it was asked for.

    open_calls: ids of calls that wait for an answer; they may only be the last batch, and then all of it is open.
    Besides: it begins with a user message, no message is empty, tool messages hold results alone, two assistant
    messages never follow one another unless the first was paused by its provider, and call ids of a message are
    distinct.
    """
    open_ids = set(open_calls)
    expected: list[str] = []
    previous, paused = "", False
    for number, message in enumerate(messages):
        where = f"message {number} ({message.role})"
        if number == 0 and message.role != "user":
            raise HistoryError(f"{where}: a history begins with a user message")
        if not message.content:
            raise HistoryError(f"{where} is empty")
        if expected and message.role != "tool":
            raise HistoryError(f"{where}: the calls {expected} have no results")
        match message.role:
            case "tool":
                _check_results(message, expected, where)
                expected = []
            case "assistant":
                if previous == "assistant" and not paused:
                    raise HistoryError(f"{where} follows another assistant message")
                expected = [call.id for call in message.tool_calls]
                if len(set(expected)) != len(expected) or not all(expected):
                    raise HistoryError(f"{where}: call ids are not distinct: {expected}")
            case "user" if not any(not isinstance(block, TextBlock) or block.text.strip() for block in message.content):
                raise HistoryError(f"{where} says nothing")
            case "system":
                raise HistoryError(f"{where}: the system prompt is no part of a history")
        previous, paused = message.role, message.stop_kind == "pause"
    if expected and set(expected) != open_ids:
        raise HistoryError(f"the last calls {expected} have no results; open are {sorted(open_ids)}")
    if open_ids and not expected:
        raise HistoryError(f"the calls {sorted(open_ids)} are said to be open, but nothing is")


def _check_results(message: Message, expected: list[str], where: str) -> None:
    found = [block.call_id for block in message.content if isinstance(block, ToolResultBlock)]
    if len(found) != len(message.content):
        raise HistoryError(f"{where} holds something else than results")
    if found != expected:
        raise HistoryError(f"{where}: results of {found}, calls were {expected}")
