"""Server-sent events, framed on bytes: every way in which a body may be cut into chunks."""

from __future__ import annotations

from collections.abc import AsyncIterator
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from greenroom.runtime.providers.sse import ServerEvent, lines, server_events

BOM = b"\xef\xbb\xbf"


async def stream(*chunks: bytes) -> AsyncIterator[bytes]:
    for chunk in chunks:
        yield chunk


async def lines_of(*chunks: bytes) -> list[bytes]:
    return [line async for line in lines(stream(*chunks))]


async def events_of(*chunks: bytes) -> list[ServerEvent]:
    return [event async for event in server_events(stream(*chunks))]


@pytest.mark.parametrize(
    ("chunks", "wanted"),
    [
        ((), []),
        ((b"",), []),
        ((b"a",), [b"a"]),
        ((b"a\n",), [b"a"]),
        ((b"a\nb",), [b"a", b"b"]),
        ((b"a\r\nb\rc\nd",), [b"a", b"b", b"c", b"d"]),
        ((b"\n\n",), [b"", b""]),
        ((b"a\r", b"\nb"), [b"a", b"b"]),
        ((b"a\r", b"b"), [b"a", b"b"]),
        ((b"a\r",), [b"a"]),
        ((b"a\r", b"\r", b"\n"), [b"a", b""]),
        ((b"ab\r", b"\ncd\r", b"\n"), [b"ab", b"cd"]),
        ((b"\r",), [b""]),
        (("a\u2028b\u0085c\n".encode(),), ["a\u2028b\u0085c".encode()]),
    ],
)
async def test_lines_end_at_cr_lf_or_both_and_at_nothing_else(chunks: tuple[bytes, ...], wanted: list[bytes]) -> None:
    assert await lines_of(*chunks) == wanted


@pytest.mark.parametrize("cuts", list(product([0, 1], repeat=4)))
async def test_a_byte_order_mark_is_passed_over_however_it_is_cut(cuts: tuple[int, ...]) -> None:
    body = BOM + b"a\n" + BOM + b"b\n"
    chunks, rest = [], body
    for number, cut in enumerate(cuts):
        if cut:
            chunks.append(rest[: number + 1])
            rest = rest[number + 1 :]
    assert await lines_of(*chunks, rest) == [b"a", BOM + b"b"], "only at the very beginning"


async def test_a_body_of_half_a_mark_is_what_it_is() -> None:
    assert await lines_of(BOM[:2]) == [BOM[:2]]
    assert await lines_of(BOM) == []
    assert await lines_of(BOM, BOM + b"x") == [BOM + b"x"]
    assert await lines_of(b"a", BOM) == [b"a" + BOM]


async def test_only_event_and_data_count() -> None:
    body = b": comment\nevent: x\nid: 7\nretry: 10\ndata: d\neventual: no\ndat: no\n\ndata:e\n\n"
    assert await events_of(body) == [ServerEvent("x", b"d"), ServerEvent("", b"e")]


async def test_data_lines_are_joined_and_one_space_is_no_part_of_them() -> None:
    assert await events_of(b"data: a\ndata:  b\ndata\ndata: c\n\n") == [ServerEvent("", b"a\n b\n\nc")]


async def test_events_without_data_are_none_and_forget_their_name() -> None:
    assert await events_of(b"event: ping\n\ndata:  \n\ndata: \ndata:\n\ndata: a\n\n") == [ServerEvent("", b"a")]


async def test_the_last_event_counts_also_when_it_is_cut_off() -> None:
    assert await events_of(b"event: x\ndata: a") == [ServerEvent("x", b"a")]
    assert await events_of(b"event: x\n") == []


async def test_a_name_that_is_no_text_does_no_harm() -> None:
    assert await events_of(b"event: \xff\ndata: a\n\n") == [ServerEvent("\ufffd", b"a")]


@settings(max_examples=40)
@given(st.lists(st.sampled_from([b"data: a", b"data: b", b"event: x", b""]), max_size=8), st.data())
async def test_how_a_body_is_cut_changes_nothing(parts: list[bytes], data: st.DataObject) -> None:
    end = data.draw(st.sampled_from([b"\n", b"\r", b"\r\n"]))
    body = end.join([*parts, b""])
    cuts = sorted(data.draw(st.lists(st.integers(0, len(body)), max_size=4)))
    chunks = [body[start:stop] for start, stop in zip([0, *cuts], [*cuts, len(body)], strict=True)]
    assert await events_of(*chunks) == await events_of(body)
