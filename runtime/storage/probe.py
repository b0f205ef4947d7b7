"""Whether an object store honours its conditions: asked of the store itself, before anything relies on it."""

from __future__ import annotations

import contextlib
import secrets
import time
from dataclasses import dataclass

from greenroom.runtime.errors import AlreadyExists, NotFound, PreconditionFailed, StorageError, Undecided
from greenroom.runtime.ports import ObjectStore

LATENCY_WRITES = 5
ATTEMPTS = 3
"""Times the probe is made before a lost answer counts."""


@dataclass(frozen=True, slots=True)
class ProbeReport:
    """What a store was seen to do. `write_seconds`: the median time of a conditional write."""

    honours: dict[str, bool]
    write_seconds: float

    @property
    def usable(self) -> bool:
        return all(self.honours.values())


async def probe_conditions(objects: ObjectStore, prefix: str = "") -> ProbeReport:
    """Tries every condition on an object of its own, which is removed again; anew when an answer is lost.

    Raises StorageError.
    """
    for _ in range(ATTEMPTS - 1):
        with contextlib.suppress(Undecided):
            return await _probe_once(objects, prefix)
    return await _probe_once(objects, prefix)


async def _probe_once(objects: ObjectStore, prefix: str) -> ProbeReport:
    key = f"{prefix}probe/{secrets.token_hex(8)}"
    try:
        first = await objects.put_if_absent(key, b"1")
        twice = await _refused(objects.put_if_absent(key, b"2"), AlreadyExists)
        seconds = []
        etag = first
        for number in range(LATENCY_WRITES):
            began = time.monotonic()
            etag = await objects.put_if_match(key, f"{number}".encode(), etag)
            seconds.append(time.monotonic() - began)
        stale = await _refused(objects.put_if_match(key, b"stale", first), PreconditionFailed)
        found = await objects.get(key)
        last = found is not None and found == (f"{LATENCY_WRITES - 1}".encode(), etag)
        missing = await _refused(objects.put_if_match(f"{key}-none", b"x", etag), (NotFound, PreconditionFailed))
        listed = [listed async for listed in objects.list(key)] == [key]
    finally:
        with contextlib.suppress(StorageError):  # what went wrong before is what matters
            await objects.delete_many([key, f"{key}-none"])
    honours = {
        "a second create is refused": twice,
        "a write with an old etag is refused": stale,
        "a write to a missing object is refused": missing,
        "what was written last is read": last,
        "what was written is listed": listed,
    }
    return ProbeReport(honours, sorted(seconds)[len(seconds) // 2])


async def require_conditions(objects: ObjectStore, name: str, prefix: str = "") -> None:
    """Raises StorageError naming what the store does not honour."""
    report = await probe_conditions(objects, prefix)
    broken = [what for what, honoured in report.honours.items() if not honoured]
    if broken:
        raise StorageError(
            f"{name} cannot be used: it does not hold that {broken[0]}",
            kind="unavailable",
            hint="Sessions are only safe on a store with conditional writes (If-Match, If-None-Match); use another one",
        )


async def _refused(write: object, how: type[StorageError] | tuple[type[StorageError], ...]) -> bool:
    try:
        await write  # type: ignore[misc]  # one of the store's coroutines
    except how:
        return True
    return False
