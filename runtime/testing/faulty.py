"""FaultyStore: an ObjectStore that fails on purpose, at chosen requests, the way real ones do."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass, field
from typing import Literal

from greenroom.runtime.errors import StorageError, Undecided
from greenroom.runtime.ports import ObjectStore

Kind = Literal["lose_reply", "lose_request", "undecided", "unavailable", "delay"]


@dataclass(slots=True)
class Fault:
    """What happens at matching requests.

    kind: lose_reply (the write is made, its answer is lost), lose_request (it is not made, the answer is lost),
    undecided (as lose_request, answered at once), unavailable (a plain StorageError), delay (seconds, then as usual).
    verb: get, put_if_absent, put_if_match, delete, list, or "" for any; key: what the key must contain; skip: matching
    requests that go well first; times: how often it then happens.
    """

    kind: Kind
    verb: str = ""
    key: str = ""
    skip: int = 0
    times: int = 1
    seconds: float = 0.0


@dataclass(slots=True)
class Request:
    """One request that came in."""

    verb: str
    key: str


@dataclass
class FaultyStore:
    """Wraps a store. `faults`: what is to go wrong, may be changed at any time; `requests`: all that came in."""

    inner: ObjectStore
    faults: list[Fault] = field(default_factory=list)
    requests: list[Request] = field(default_factory=list)

    async def get(self, key: str) -> tuple[bytes, str] | None:
        await self._before("get", key)
        return await self.inner.get(key)

    async def put_if_absent(self, key: str, body: bytes) -> str:
        lost = await self._before("put_if_absent", key)
        made = await self.inner.put_if_absent(key, body)
        return _answer(made, key, lost=lost)

    async def put_if_match(self, key: str, body: bytes, etag: str) -> str:
        lost = await self._before("put_if_match", key)
        made = await self.inner.put_if_match(key, body, etag)
        return _answer(made, key, lost=lost)

    async def delete(self, key: str) -> None:
        await self._before("delete", key)
        await self.inner.delete(key)

    async def delete_many(self, keys: Iterable[str]) -> None:
        wanted = list(keys)
        for key in wanted:
            await self._before("delete", key)
        await self.inner.delete_many(wanted)

    async def list(self, prefix: str) -> AsyncIterator[str]:
        await self._before("list", prefix)
        async for key in self.inner.list(prefix):
            yield key

    async def probe(self) -> None:
        await self.inner.probe()

    async def close(self) -> None:
        await self.inner.close()

    async def _before(self, verb: str, key: str) -> bool:
        """Lets a matching fault happen; answers whether the reply is to be lost."""
        self.requests.append(Request(verb, key))
        for fault in self.faults:
            if fault.verb not in ("", verb) or fault.key not in key or not fault.times:
                continue
            if fault.skip:
                fault.skip -= 1
                continue
            fault.times -= 1
            match fault.kind:
                case "lose_reply":
                    return True
                case "lose_request" | "undecided":
                    raise Undecided(f"{key}: no answer", kind="unavailable", key=key)
                case "unavailable":
                    raise StorageError(f"{key}: the store is away", kind="unavailable", key=key)
                case "delay":
                    await asyncio.sleep(fault.seconds)
        return False


def _answer(etag: str, key: str, *, lost: bool) -> str:
    if lost:
        raise Undecided(f"{key}: the answer was lost", kind="unavailable", key=key)
    return etag
