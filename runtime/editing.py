"""Editing a file in place: exactly the place that is meant, and not a byte beside it. Pure.

It works on bytes, so nothing of a file is ever decoded and lost: a byte order mark, line ends and other encodings stay
as they are. The text to be found is looked for as if all lines ended in LF; what is put in takes the line ends of the
file. Nothing is guessed: text that is not there, or there more often than said, is refused and the file left alone.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from greenroom.runtime.errors import EditRefused
from greenroom.runtime.messages import clean

BOM = b"\xef\xbb\xbf"
MAX_PLACES = 10_000
"""Places that one edit may change."""

SHOWN_LINES = 10
"""Line numbers of matches that an error names."""


@dataclass(frozen=True, slots=True)
class Edit:
    """What to do with a file.

    replace: `text` in place of `anchor`; insert_after, insert_before: `text` as lines of its own after the line in
    which the anchor ends, or before the one in which it begins; append: at the end, after a line end if there is none.
    count: how often the anchor must be there, None for as often as it is.
    """

    mode: Literal["replace", "insert_after", "insert_before", "append"]
    text: str
    anchor: str = ""
    count: int | None = 1


@dataclass(frozen=True, slots=True)
class Edited:
    """`places`: where it was changed; `note`: what else was done, for whoever reads the result."""

    data: bytes
    places: int
    note: str = ""


def apply_edit(data: bytes, edit: Edit) -> Edited:
    """The file's new bytes; raises EditRefused."""
    end = _line_end(data)
    text = clean(edit.text).replace("\r\n", "\n").encode()
    if not text.isascii() and not _is_utf8(data):
        raise EditRefused("the file is not UTF-8: only plain ASCII text can be put into it")
    if edit.mode == "append":
        return _appended(data, text.replace(b"\n", end), end)
    view = _View(data)
    found = view.find(clean(edit.anchor).replace("\r\n", "\n").encode(), edit.count)
    changed, position = bytearray(), 0
    for start, stop in found:
        if edit.mode == "insert_after":
            start = stop = view.next_line(stop)
        elif edit.mode == "insert_before":
            start = stop = view.line_of(start)
        changed += data[position : view.offset(start)]
        changed += _as_lines(text, view, start, edit.mode).replace(b"\n", end)
        position = view.offset(stop)
    return Edited(bytes(changed + data[position:]), len(found))


class _View:
    """The file as if all its lines ended in LF, and where each place of that lies in the file."""

    def __init__(self, data: bytes) -> None:
        self.bytes = data.replace(b"\r\n", b"\n")
        # Offsets, in the view, of the line ends that are two bytes in the file.
        self._pairs = [match.start() - number for number, match in enumerate(re.finditer(rb"\r\n", data))]
        self._first = len(BOM) if data.startswith(BOM) else 0

    def find(self, anchor: bytes, count: int | None) -> list[tuple[int, int]]:
        """Start and stop of each match; raises EditRefused."""
        if not anchor:
            raise EditRefused("there is nothing to look for: the text to find is empty")
        starts: list[int] = []
        at = self.bytes.find(anchor)
        while at >= 0 and len(starts) <= MAX_PLACES:
            starts.append(at)
            at = self.bytes.find(anchor, at + 1)
        lines = ", ".join(str(self.bytes.count(b"\n", 0, start) + 1) for start in starts[:SHOWN_LINES])
        if not starts:
            raise EditRefused("the text to find is not in the file; it must match exactly, white space included")
        if len(starts) > MAX_PLACES:
            raise EditRefused(f"the text to find is there more than {MAX_PLACES} times: that is no edit for this tool")
        if any(after - before < len(anchor) for before, after in pairwise(starts)):
            raise EditRefused(f"the text to find is there {len(starts)} times, overlapping, in lines {lines}")
        if count is not None and len(starts) != count:
            raise EditRefused(
                f"the text to find is there {_times(len(starts))} (line {lines}), not {_times(count)}: "
                "give more of its surroundings, or say how many there are"
            )
        return [(start, start + len(anchor)) for start in starts]

    def line_of(self, place: int) -> int:
        """Where the line begins that this place is in."""
        return max(self.bytes.rfind(b"\n", 0, place) + 1, self._first)

    def next_line(self, stop: int) -> int:
        """Where the line after the one begins that what stops here is in."""
        end = self.bytes.find(b"\n", max(stop - 1, 0))
        return len(self.bytes) if end < 0 else end + 1

    def offset(self, place: int) -> int:
        """The place in the file."""
        return place + bisect_left(self._pairs, place)


def _as_lines(text: bytes, view: _View, place: int, mode: str) -> bytes:
    """What is inserted stands on lines of its own; a file without a line end at its end goes on without one."""
    if mode == "replace":
        return text
    if mode == "insert_after" and place and view.bytes[place - 1 : place] != b"\n":
        return b"\n" + text.removesuffix(b"\n")
    return text if text.endswith(b"\n") else text + b"\n"


def _appended(data: bytes, text: bytes, end: bytes) -> Edited:
    if data and not data.endswith(b"\n"):
        return Edited(data + end + text, 1, "the last line had no end and was given one first")
    return Edited(data + text, 1)


def _line_end(data: bytes) -> bytes:
    """CRLF where most lines end so."""
    pairs = data.count(b"\r\n")
    return b"\r\n" if pairs and pairs >= data.count(b"\n") - pairs else b"\n"


def _is_utf8(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


def _times(number: int) -> str:
    return {1: "once", 2: "twice"}.get(number, f"{number} times")
