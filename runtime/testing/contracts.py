"""What every store must hold to, as suites that run without a test framework: `await check_object_store(factory)`.

A factory makes a fresh, empty store; what it makes is disposed of by `close` if it has one. The first promise that is
broken raises ContractBroken with what was expected and what was seen.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from greenroom.runtime.errors import (
    AlreadyExists,
    Conflict,
    Deleted,
    Fenced,
    NotFound,
    PreconditionFailed,
    SessionExists,
    SessionNotFound,
    StorageError,
    Undecided,
)
from greenroom.runtime.messages import Message
from greenroom.runtime.ports import CheckpointStore, ObjectStore, TranscriptStore
from greenroom.runtime.state import AgentState, Ready
from greenroom.runtime.storage.head import Head, Segment

S = TypeVar("S")
Factory = Callable[[], S | Awaitable[S]]

WRITERS = 8
ROUNDS = 10


class ContractBroken(AssertionError):
    """A store does not keep a promise that sessions rest on."""


def check(what: str, held: object) -> None:
    if not held:
        raise ContractBroken(f"broken promise: {what}")


async def check_object_store(factory: Factory[ObjectStore], *, writers: int = WRITERS, rounds: int = ROUNDS) -> None:
    """The seven verbs of an ObjectStore, their conditions, and races for them. Raises ContractBroken.

    Not asked: that equal contents have different etags. S3's are often hashes of the content, and every head is unlike
    every other by its write id.
    """
    async with _made(factory) as store:
        await store.probe()
        check("a missing object is None", await store.get("a/none") is None)
        refusals = (NotFound, PreconditionFailed)
        await _raises("a write to a missing object is refused", store.put_if_match("a/none", b"x", "1"), refusals)
        check("a refused write leaves nothing", await store.get("a/none") is None)
        await store.delete("a/none")

        body = bytearray(b"one")
        first = await store.put_if_absent("a/k", bytes(body))
        body[:] = b"xxx"
        check("what is read is what was written", await store.get("a/k") == (b"one", first))
        await _raises("a second create is refused", store.put_if_absent("a/k", b"two"), AlreadyExists)
        check("a refused create changes nothing", await store.get("a/k") == (b"one", first))
        await store.put_if_absent("a/409-412/404", b"")
        await _raises("whatever its name says", store.put_if_absent("a/409-412/404", b""), AlreadyExists)
        second = await store.put_if_match("a/k", b"two", first)
        check("another content has another etag", first != second)
        check("a write is read at once", await store.get("a/k") == (b"two", second))
        await _raises("an old etag is refused", store.put_if_match("a/k", b"three", first), PreconditionFailed)
        check("a refused write changes nothing", await store.get("a/k") == (b"two", second))

        keys = [f"b/{number:03}" for number in range(25)] + ["b/x/y", "b/x-y"]
        for key in reversed(keys):
            await store.put_if_absent(key, key.encode())
        listed = [key async for key in store.list("b/")]
        check("a listing has every key below its prefix, in order", listed == sorted(keys))
        check("a prefix may end inside a name", [k async for k in store.list("b/x")] == ["b/x-y", "b/x/y"])
        await store.delete("b/000")
        check("a deleted object is gone at once", await store.get("b/000") is None)
        check("and from the listing", [key async for key in store.list("b/")] == sorted(keys)[1:])
        await store.delete_many([*keys, "b/never"])
        check("many are deleted, missing ones are fine", [key async for key in store.list("b/")] == [])

        for size in (0, 1, 1 << 10, 10 << 20):
            data = bytes(range(256)) * (size // 256) if size > 1 else b"x" * size
            await store.put_if_absent(f"c/{size}", data)
            found = await store.get(f"c/{size}")
            check(f"an object of {size} bytes comes back whole", found is not None and found[0] == data)
        await _check_races(store, writers, rounds)


async def _check_races(store: ObjectStore, writers: int, rounds: int) -> None:
    made = await asyncio.gather(
        *(_attempt(store.put_if_absent("race", f"w{number}".encode())) for number in range(writers))
    )
    etags = [etag for etag in made if etag is not None]
    check("of many creators exactly one wins", len(etags) == 1)
    etag = etags[0]
    for round in range(rounds):
        bodies = [f"{round}-{number}".encode() for number in range(writers)]
        ends = await asyncio.gather(*(_attempt(store.put_if_match("race", body, etag)) for body in bodies))
        won = [(body, end) for body, end in zip(bodies, ends, strict=True) if end is not None]
        check("of many writers exactly one wins", len(won) == 1)
        check("and what it wrote is there", await store.get("race") == won[0])
        etag = won[0][1]


async def check_checkpoint_store(factory: Factory[CheckpointStore], *, supports_fencing: bool = True) -> None:
    """Heads by compare-and-swap, epochs, deletion, host fences. Raises ContractBroken.

    supports_fencing: whether it keeps host fences; one that does not must refuse every non-zero fence.
    """
    async with _made(factory) as store:
        check("an unknown session is None", await store.read("s") is None)
        await _raises("and cannot be acquired", store.acquire("s", "a"), SessionNotFound)
        head = _head("s")
        etag = await store.create("s", head)
        check("a head comes back as it was written", await store.read("s") == (head, etag))
        await _raises("a session is created once", store.create("s", _head("s", write_id="other")), SessionExists)
        check("a refused create changes nothing", await store.read("s") == (head, etag))

        first, first_etag = await store.acquire("s", "a")
        check("acquiring makes the owner and the next epoch", (first.owner, first.epoch) == ("a", head.epoch + 1))
        second, second_etag = await store.acquire("s", "b")
        check("acquiring again takes over", (second.owner, second.epoch) == ("b", first.epoch + 1))
        await _raises("the old owner is fenced", store.save("s", _next(first), first_etag), Fenced)
        check("and changed nothing", await store.read("s") == (second, second_etag))
        saved = _next(second)
        etag = await store.save("s", saved, second_etag)
        check("the owner's save is read", await store.read("s") == (saved, etag))
        again = await store.save("s", saved, second_etag)
        check("the same write again is that write", await store.read("s") == (saved, again))
        await _raises("a stale save at the same epoch conflicts", store.save("s", _next(second), second_etag), Conflict)

        winners = await asyncio.gather(*(store.acquire("s", str(number)) for number in range(WRITERS)))
        epochs = sorted(won.epoch for won, _ in winners)
        check("racing owners get epochs one after another", epochs == list(range(3, 3 + WRITERS)))
        await _check_host_fence(store, supports_fencing=supports_fencing)

        last, last_etag = max(winners, key=lambda won: won[0].epoch)
        await store.delete("s")
        check("a deleted session is gone", await store.read("s") is None)
        await _raises("its owner's save says so", store.save("s", _next(last), last_etag), (Deleted, Fenced))
        await store.delete("s")
        await store.delete("never")


async def _check_host_fence(store: CheckpointStore, *, supports_fencing: bool) -> None:
    etag = await store.create("f", _head("f"))
    if not supports_fencing:
        fenced = _head("f", write_id="f1", write_no=1, host_fence=7)
        await _raises("a host fence that cannot be kept is refused", store.save("f", fenced, etag), StorageError)
        return
    etag = await store.save("f", _head("f", write_id="f1", write_no=1, host_fence=7), etag)
    stale = _head("f", write_id="f2", write_no=2, host_fence=6)
    await _raises("a lower host fence is refused", store.save("f", stale, etag), Fenced)
    await store.save("f", _head("f", write_id="f3", write_no=2, host_fence=7), etag)


async def check_transcript_store(factory: Factory[TranscriptStore]) -> None:
    """Immutable segments, read in order, removed per session. Raises ContractBroken."""
    async with _made(factory) as store:
        one = Segment("1-1-a", (Message.user("line one\nline two ü\u2028"), Message.user("b")))
        two = Segment("1-2-b", (Message.user("c"),))
        refs = [await store.append("s", one), await store.append("s", two)]
        check("the same segment again is that segment", await store.append("s", one) == refs[0])
        check("segments are read in order", await store.read("s", refs) == one.messages + two.messages)
        check("also in another", await store.read("s", refs[::-1]) == two.messages + one.messages)
        check("no references are no messages", await store.read("s", ()) == ())
        other = await store.append("t", two)
        await store.remove("s")
        await _raises("a missing segment fails loudly", store.read("s", refs), StorageError)
        check("removing one session leaves the others", await store.read("t", [other]) == two.messages)
        await store.remove("s")


def _head(sid: str, **fields: Any) -> Head:
    base = Head(session_id=sid, root=sid, agent="a", write_id=f"{sid}-0", state=Ready(agent=AgentState(session_id=sid)))
    return base.but(**fields)


_count = 0


def _next(head: Head) -> Head:
    """The head as its owner's next write."""
    global _count
    _count += 1
    return head.but(write_no=head.write_no + 1, write_id=f"next-{_count}")


@asynccontextmanager
async def _made(factory: Factory[S]) -> AsyncIterator[S]:
    made = factory()
    store: Any = await made if inspect.isawaitable(made) else made
    try:
        yield store
    finally:
        if hasattr(store, "close"):
            await store.close()


async def _attempt(write: Awaitable[str]) -> str | None:
    try:
        return await write
    except (AlreadyExists, PreconditionFailed, Undecided):
        return None


async def _raises(what: str, work: Awaitable[Any], how: type[Exception] | tuple[type[Exception], ...]) -> None:
    try:
        await work
    except how:
        return
    except Exception as error:
        raise ContractBroken(f"broken promise: {what}; it raised {type(error).__name__}: {error}") from error
    raise ContractBroken(f"broken promise: {what}; nothing was raised")
