"""Writes that decide themselves: what is believed, how often it is tried, and to whom a write was lost."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import pytest

from greenroom import AlreadyExists, Conflict, Deleted, Fenced, StorageError, Undecided
from greenroom.runtime.errors import NotFound, PreconditionFailed
from greenroom.runtime.storage import MemoryObjectStore, deciding
from greenroom.runtime.storage.deciding import bury, create, lost_to, pause_before, put_immutable

Answer = Callable[[], None]


@dataclass(frozen=True)
class Doc:
    """A mutable object in its simplest form."""

    write_id: str
    epoch: int = 1
    owner: str | None = None
    life: str = "live"

    def encode(self) -> bytes:
        return f"{self.write_id} {self.epoch} {self.owner or '-'} {self.life}".encode()


def decode(body: bytes, _key: str) -> Doc:
    write_id, epoch, owner, life = body.decode().split()
    return Doc(write_id, int(epoch), None if owner == "-" else owner, life)


@dataclass
class Lossy(MemoryObjectStore):
    """Raises what it is told to, in turn: before the request is carried out, or after it was."""

    before: list[Exception | None] = field(default_factory=list)
    after: list[Exception | None] = field(default_factory=list)
    reads: list[Exception | None] = field(default_factory=list)
    writes: int = 0

    def __post_init__(self) -> None:
        super().__init__()

    async def get(self, key: str) -> tuple[bytes, str] | None:
        _raise_next(self.reads)
        return await super().get(key)

    async def put_if_absent(self, key: str, body: bytes) -> str:
        self.writes += 1
        _raise_next(self.before)
        etag = await super().put_if_absent(key, body)
        _raise_next(self.after)
        return etag

    async def put_if_match(self, key: str, body: bytes, etag: str) -> str:
        self.writes += 1
        _raise_next(self.before)
        new = await super().put_if_match(key, body, etag)
        _raise_next(self.after)
        return new


def _raise_next(answers: list[Exception | None]) -> None:
    error = answers.pop(0) if answers else None
    if error is not None:
        raise error


SILENT = Undecided("no answer")
AWAY = StorageError("away")


async def stored(store: MemoryObjectStore, key: str = "k") -> Doc:
    found = await store.get(key)
    assert found is not None
    return decode(found[0], key)


def test_pauses_double_from_a_twentieth_of_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    assert [pause_before(attempt) for attempt in range(5)] == [0.0, 0.05, 0.1, 0.2, 0.4]


def test_a_write_is_tried_for_some_seconds_and_a_burial_for_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    assert (deciding.DECIDE_ATTEMPTS, deciding.BURY_ATTEMPTS) == (8, 30)
    assert 6 < sum(map(pause_before, range(deciding.DECIDE_ATTEMPTS))) < 7


async def test_a_create_whose_answer_was_lost_is_its_own_and_another_ones_is_not() -> None:
    store = Lossy(after=[SILENT])
    etag = await create(store, "k", Doc("a"), decode)
    assert etag == (await store.get("k") or (b"", ""))[1]
    with pytest.raises(AlreadyExists):
        await create(store, "k", Doc("b"), decode)
    assert (await stored(store)).write_id == "a"


async def test_a_create_that_did_not_land_is_sent_again_also_when_the_look_fails() -> None:
    store = Lossy(before=[SILENT, SILENT], reads=[AWAY])
    await create(store, "k", Doc("a"), decode)
    assert (await stored(store)).write_id == "a"
    assert store.writes == 3


async def test_a_create_that_is_never_decided_says_so_and_what_to_do() -> None:
    store = Lossy(before=[SILENT] * 20)
    with pytest.raises(Undecided, match="never said") as silent:
        await create(store, "k", Doc("a"), decode)
    assert store.writes == deciding.DECIDE_ATTEMPTS
    assert "resume" in silent.value.hint


async def test_a_replacement_whose_answer_was_lost_is_its_own() -> None:
    store = Lossy()
    etag = await create(store, "k", Doc("a"), decode)
    store.after = [SILENT]
    new = await deciding.replace(store, "k", Doc("b"), etag, decode)
    assert new == (await store.get("k") or (b"", ""))[1] != etag
    assert store.writes == 2, "it was found, not sent again"


async def test_a_replacement_that_did_not_land_is_sent_again_also_when_the_look_fails() -> None:
    store = Lossy()
    etag = await create(store, "k", Doc("a"), decode)
    store.before, store.reads = [SILENT, SILENT], [AWAY]
    await deciding.replace(store, "k", Doc("b"), "".join(list(etag)), decode)
    assert (await stored(store)).write_id == "b"
    assert store.writes == 4


async def test_a_replacement_that_is_never_decided_stops_in_the_end() -> None:
    store = Lossy()
    etag = await create(store, "k", Doc("a"), decode)
    store.before = [SILENT] * 20
    with pytest.raises(Undecided):
        await deciding.replace(store, "k", Doc("b"), etag, decode)
    assert store.writes == 1 + deciding.DECIDE_ATTEMPTS


@pytest.mark.parametrize(
    ("there", "error", "said"),
    [
        (None, Deleted, "was deleted"),
        (Doc("x", life="tombstone", epoch=9), Deleted, "was deleted"),
        (Doc("x", epoch=3, owner="b"), Fenced, "taken over by b at epoch 3"),
        (Doc("x", epoch=3), Fenced, "taken over by another owner at epoch 3"),
        (Doc("x", epoch=2, owner="b"), Conflict, "changed by somebody else"),
        (Doc("x", epoch=1), Conflict, "changed by somebody else"),
        (Doc("x", life="unheard-of"), Conflict, "changed by somebody else"),
    ],
)
async def test_a_write_is_told_to_whom_it_was_lost(there: Doc | None, error: type[Exception], said: str) -> None:
    assert isinstance(lost_to(there, Doc("ours", epoch=2), "k"), error)
    store = Lossy()
    if there is not None:
        await store.put_if_absent("k", there.encode())
    with pytest.raises(error, match=said):
        await deciding.replace(store, "k", Doc("ours", epoch=2), "an-old-etag", decode)


async def test_an_immutable_object_that_is_there_is_the_same() -> None:
    store = Lossy(before=[SILENT], after=[SILENT])
    await put_immutable(store, "k", b"x")
    assert store.writes == 3
    assert await store.get("k") is not None
    store.before = [SILENT] * 20
    with pytest.raises(Undecided):
        await put_immutable(store, "other", b"x")
    assert store.writes == 3 + deciding.DECIDE_ATTEMPTS


def tombstone(stands: Doc | None) -> Doc:
    return replace(
        stands or Doc("new", epoch=0), write_id="tomb", epoch=(stands.epoch if stands else 0) + 1, life="tombstone"
    )


async def test_a_burial_fences_whatever_stands_there_and_stays_when_it_comes_again() -> None:
    store = Lossy()
    await create(store, "k", Doc("a", epoch=4), decode)
    assert (await bury(store, "k", decode, tombstone)).epoch == 5
    assert (await bury(store, "k", decode, tombstone)).epoch == 5
    assert (await bury(store, "fresh", decode, tombstone)).epoch == 1
    assert (await stored(store, "fresh")).life == "tombstone"


@pytest.mark.parametrize("error", [SILENT, PreconditionFailed("changed"), NotFound("gone"), AlreadyExists("made")])
async def test_a_burial_that_was_overtaken_looks_again(error: Exception) -> None:
    store = Lossy()
    await create(store, "k", Doc("a"), decode)
    store.before = [error, error]
    await bury(store, "k", decode, tombstone)
    assert (await stored(store)).life == "tombstone"
    assert store.writes == 4
    store.before = [error]
    await bury(store, "fresh", decode, tombstone)
    assert (await stored(store, "fresh")).life == "tombstone"


async def test_a_burial_that_never_lands_says_so() -> None:
    store = Lossy(before=[SILENT] * 100)
    with pytest.raises(Undecided):
        await bury(store, "k", decode, tombstone)
    assert store.writes == deciding.BURY_ATTEMPTS
