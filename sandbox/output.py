"""OutputBuffer: what a command has put out, within a bound: its head, its tail, and how much lay between. Pure."""

from __future__ import annotations


class OutputBuffer:
    """Keeps at most `head` + `tail` bytes, whatever comes in; the cost of a byte does not grow with their number."""

    def __init__(self, head: int, tail: int) -> None:
        self._head_size = head
        self._tail_size = tail
        self._head = bytearray()
        self._tail = bytearray()
        self.total = 0
        self.whole = ""
        """Where all of it can be found, in words; it stands beside what was dropped."""

    def add(self, data: bytes) -> None:
        self.total += len(data)
        room = self._head_size - len(self._head)
        if room > 0:
            self._head += data[:room]
            data = data[room:]
        if data:
            self._tail += data
            if len(self._tail) > 2 * self._tail_size + 65536:  # cut seldom, so that many small pieces stay cheap
                del self._tail[: len(self._tail) - self._tail_size]

    @property
    def dropped(self) -> int:
        """Bytes between head and tail that are gone."""
        return self.total - len(self._head) - min(len(self._tail), self._tail_size)

    def take(self, *, final: bool) -> tuple[str, int]:
        """What came since the last take, and how many bytes of that are gone.

        An unfinished character at the end waits for its rest, unless nothing more comes (final).
        """
        last = self._tail or self._head
        rest = b"" if final else bytes(last[len(_without_cut_end(bytes(last))) :])
        if rest:
            del last[-len(rest) :]
            self.total -= len(rest)
        taken = self.text(), self.dropped
        self._head, self._tail, self.total = bytearray(), bytearray(), 0
        self.add(rest)
        return taken

    def text(self) -> str:
        """The output as text; invalid bytes become U+FFFD, a cut falls between characters."""
        tail = bytes(self._tail[len(self._tail) - min(len(self._tail), self._tail_size) :])
        if not self.dropped:
            return (bytes(self._head) + tail).decode("utf-8", "replace")
        head = _without_cut_end(bytes(self._head)).decode("utf-8", "replace")
        kept = _without_cut_start(tail).decode("utf-8", "replace")
        return f"{head}\n[... {self.dropped} bytes dropped{self.whole} ...]\n{kept}"

    def held(self) -> bytes:
        """What is kept, as it came."""
        return bytes(self._head) + bytes(self._tail)


def _without_cut_end(data: bytes) -> bytes:
    """Drops an unfinished character at the end."""
    for back in range(1, min(4, len(data)) + 1):
        byte = data[-back]
        if byte & 0xC0 != 0x80:
            length = (
                1 if byte < 0x80 else 2 if byte >> 5 == 6 else 3 if byte >> 4 == 14 else 4 if byte >> 3 == 30 else 1
            )
            return data if length <= back else data[:-back]
    return data


def _without_cut_start(data: bytes) -> bytes:
    """Drops the rest of a character at the start."""
    skip = 0
    while skip < min(3, len(data)) and data[skip] & 0xC0 == 0x80:
        skip += 1
    return data[skip:]
