"""read_file: whole files byte for byte, and parts of those that are too large for a model."""

from __future__ import annotations

from typing import Any

import pytest
from scenes import call, calls, results, scripted

from greenroom import AgentRuntime
from greenroom.runtime.tools.builtin import MAX_READ
from greenroom.testing import FakeSandboxes


async def read(content: str | bytes, **arguments: Any) -> Any:
    data = content.encode() if isinstance(content, str) else content
    sandboxes = FakeSandboxes()
    opened = sandboxes.open

    async def open(*args: Any, **named: Any) -> Any:
        sandbox = await opened(*args, **named)
        sandbox.files["f"] = data
        return sandbox

    sandboxes.open = open  # type: ignore[method-assign]  # a workspace that holds the file
    async with AgentRuntime("memory:", sandboxes=sandboxes) as runtime:
        session = await runtime.create_session(scripted(calls(call("read_file", path="f", **arguments)), "ok"))
        await session.run("go")
        (block,) = results(await session.transcript())
        return block


@pytest.mark.parametrize("content", ["", "a", "a\n", "a\r\nb", "\ufeffä\u2028b\x85c\n\n", "x" * MAX_READ])
async def test_a_file_that_fits_comes_as_it_is(home: Any, content: str) -> None:
    block = await read(content)
    assert (block.text, block.is_error) == (content, False)


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        ({"offset": 1, "limit": 1}, "a\n[line 1 of 4; go on with offset 2]"),
        ({"offset": 2, "limit": 2}, "b\r\nc\u2028c\n[line 3 of 4; go on with offset 4]"),
        ({"offset": 4}, "d"),
        ({"offset": 3, "limit": 9}, "c\u2028c\nd"),
        ({"offset": 5}, "[the file has 4 lines]"),
    ],
)
async def test_lines_are_counted_from_one_and_end_at_line_feeds(
    home: Any, arguments: dict[str, int], wanted: str
) -> None:
    assert (await read("a\nb\r\nc\u2028c\nd", **arguments)).text == wanted


async def test_a_large_file_comes_in_parts_and_each_says_where_to_go_on(home: Any) -> None:
    lines = [f"{number:6} {'x' * 90}\n" for number in range(1500)]
    seen, offset = "", 1
    for _ in range(10):
        text = (await read("".join(lines), offset=offset)).text
        shown, found, rest = text.rpartition("[line ")
        seen += shown if found else text
        if not found:
            break
        assert len(shown) <= MAX_READ
        offset = int(rest.rpartition("offset ")[2].rstrip("]"))
    assert seen == "".join(lines)


async def test_a_line_that_is_too_long_is_cut_and_said_to_be(home: Any) -> None:
    text = (await read("short\n" + "y" * (MAX_READ + 5) + "\nend\n", offset=2)).text
    assert text.startswith("y" * MAX_READ + "\n[line 2 has ")


async def test_an_empty_file_and_one_that_is_no_text(home: Any) -> None:
    assert (await read("", limit=5)).text == ""
    block = await read(b"\xff\xfe")
    assert block.is_error
    assert "not UTF-8" in block.text


@pytest.mark.parametrize("arguments", [{"offset": 0}, {"limit": 0}, {"offset": "x"}])
async def test_a_part_that_makes_no_sense_is_refused(home: Any, arguments: dict[str, Any]) -> None:
    assert (await read("a", **arguments)).is_error
