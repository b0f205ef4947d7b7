"""The buffer of events: what a reader missed, and where a cursor begins."""

from __future__ import annotations

import pytest

from greenroom import (
    Event,
)
from greenroom.runtime.events import EventBuffer


def events(count: int, epoch: int = 1, first: int = 1) -> list[Event]:
    return [Event(f"{epoch}.{number}", "text", "s", 0.0, {"text": "x"}) for number in range(first, first + count)]


@pytest.mark.parametrize(
    ("cursor", "missed", "kept"),
    [("1.10", 0, 0), ("1.9", 0, 1), ("1.6", 0, 4), ("1.5", 1, 4), ("1.1", 5, 4), (None, 6, 4), ("2.1", 0, 0)],
)
def test_a_reader_learns_what_it_missed(cursor: str | None, missed: int, kept: int) -> None:
    buffer = EventBuffer(capacity=4)
    for event in events(10):
        buffer.emit(event)
    found, end = buffer.page(buffer.position_after(cursor))
    gaps = [event.missed for event in found if event.type == "gap"]
    assert (sum(gaps), len(found) - len(gaps), end) == (missed, kept, 10)


def test_a_cursor_of_an_earlier_owner_begins_with_what_is_here() -> None:
    buffer = EventBuffer()
    for event in events(3, epoch=2):
        buffer.emit(event)
    assert [event.id for event in buffer.page(buffer.position_after("1.7"))[0]] == ["2.1", "2.2", "2.3"]
