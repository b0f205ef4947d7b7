"""Writes that decide themselves: tried again, byte for byte, until it is known what became of them.

A 412 alone proves nothing: it may be of our own write, whose answer was lost. So after any refusal or silence the
object is read and its write id compared.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol, TypeVar

from greenroom.runtime.errors import (
    AlreadyExists,
    Conflict,
    Deleted,
    Fenced,
    NotFound,
    PreconditionFailed,
    StorageError,
    Undecided,
)
from greenroom.runtime.ports import ObjectStore

DECIDE_ATTEMPTS = 8
"""Times an undecided write is tried again before it is reported."""

BURY_ATTEMPTS = 30
"""Times a tombstone is tried to be put in place of a head that others keep changing."""

DECIDE_PAUSE = 0.05
"""Seconds before the second try of an undecided write; doubled for each further one."""


class Mutable(Protocol):
    """What every object that is changed by compare-and-swap says of its last write."""

    @property
    def write_id(self) -> str: ...

    @property
    def epoch(self) -> int: ...

    @property
    def owner(self) -> str | None: ...

    @property
    def life(self) -> str: ...

    def encode(self) -> bytes: ...


M = TypeVar("M", bound=Mutable)
Decode = Callable[[bytes, str], Mutable]


async def put_immutable(objects: ObjectStore, key: str, body: bytes) -> None:
    """Writes an object named by its content or by a unique write: one that is there already is the same."""
    refused: StorageError | None = None
    for attempt in range(DECIDE_ATTEMPTS):
        await _pause(attempt)
        try:
            await objects.put_if_absent(key, body)
            return
        except AlreadyExists:
            return
        except Undecided as error:
            refused = error
    raise _never_said(key) from refused


async def create(objects: ObjectStore, key: str, made: Mutable, decode: Decode) -> str:
    """The etag; raises AlreadyExists when another write made the object."""
    body = made.encode()
    refused: StorageError | None = None
    for attempt in range(DECIDE_ATTEMPTS):
        await _pause(attempt)
        try:
            return await objects.put_if_absent(key, body)
        except (AlreadyExists, Undecided) as error:
            refused = error
        try:
            found = await objects.get(key)
        except StorageError:
            continue  # looked at again
        if found is None:
            continue  # missing means not landed on create
        if decode(found[0], key).write_id == made.write_id:
            return found[1]
        raise AlreadyExists(f"{key} is already there", key=key) from refused
    raise _never_said(key) from refused


async def replace(objects: ObjectStore, key: str, changed: Mutable, etag: str, decode: Decode) -> str:
    """The new etag; raises Fenced, Deleted or Conflict when somebody else's write stands there."""
    body = changed.encode()
    refused: StorageError | None = None
    for attempt in range(DECIDE_ATTEMPTS):
        await _pause(attempt)
        try:
            return await objects.put_if_match(key, body, etag)
        except (PreconditionFailed, NotFound, Undecided) as error:
            refused = error
        try:
            found = await objects.get(key)
        except StorageError as away:
            refused = away
            continue  # still undecided
        stored = None if found is None else decode(found[0], key)
        if found is not None and stored is not None and stored.write_id == changed.write_id:
            return found[1]
        if found is None or found[1] != etag:
            raise lost_to(stored, changed, key) from refused
    raise _never_said(key) from refused


def lost_to(stored: Mutable | None, ours: Mutable, key: str) -> StorageError:
    """Why our write lost to what stands there now: Deleted, Fenced or Conflict."""
    if stored is None or stored.life == "tombstone":
        return Deleted(f"{key} was deleted", kind="not_found", key=key)
    if stored.epoch > ours.epoch:
        owner = stored.owner or "another owner"
        return Fenced(f"{key} was taken over by {owner} at epoch {stored.epoch}", key=key)
    return Conflict(f"{key} was changed by somebody else", key=key)


async def bury(
    objects: ObjectStore, key: str, decode: Callable[[bytes, str], M], tombstone: Callable[[M | None], M]
) -> M:
    """Puts a tombstone in place of whatever stands there, which fences every owner; answers the one that stays.

    tombstone: of what stands there, None for nothing.
    """
    refused: StorageError | None = None
    for attempt in range(BURY_ATTEMPTS):
        await _pause(min(attempt, DECIDE_ATTEMPTS))
        found = await objects.get(key)
        stands = None if found is None else decode(found[0], key)
        if stands is not None and stands.life == "tombstone":
            return stands
        buried = tombstone(stands)
        try:
            if found is None:
                await objects.put_if_absent(key, buried.encode())
            else:
                await objects.put_if_match(key, buried.encode(), found[1])
            return buried
        except (AlreadyExists, PreconditionFailed, NotFound, Undecided) as error:
            refused = error  # somebody wrote meanwhile, or nobody knows: look again
    raise _never_said(key) from refused


def pause_before(attempt: int) -> float:
    """Seconds before the attempt of this number, counted from 0: none before the first."""
    return DECIDE_PAUSE * 2 ** (attempt - 1) if attempt else 0.0


async def _pause(attempt: int) -> None:
    if attempt:
        await asyncio.sleep(pause_before(attempt))


def _never_said(key: str) -> Undecided:
    return Undecided(
        f"{key}: the store never said what became of a write",
        kind="unavailable",
        key=key,
        hint="Nothing is lost that was saved before; `resume` goes on when the store is back",
    )
