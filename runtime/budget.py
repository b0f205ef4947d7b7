"""Token budgets of session trees: what every session of a tree has used, and what its running model calls may yet use.

A ledger is a cache: each session tells its own sum whenever it asks, and a ledger that does not know a tree (because
its process is new) is told by whoever asks what the heads in the store say.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass

from greenroom.runtime.ids import root_of
from greenroom.runtime.storage.storage import Storage

KEPT_TREES = 4096
"""Trees that a ledger remembers, the least recently used go first."""


@dataclass(slots=True)
class _Account:
    used: int = 0
    reserved: int = 0


class TokenLedger:
    """Trees by root, their sessions by id; tokens are those of input and output together."""

    def __init__(self) -> None:
        self._trees: OrderedDict[str, dict[str, _Account]] = OrderedDict()

    def reserve(
        self, session_id: str, used: int, wanted: int, limit: int, known: Mapping[str, int] | None = None
    ) -> bool | None:
        """Whether the session may make a call of about `wanted` tokens; None: the ledger has to be told `known`.

        used: what the session has used so far; known: what every session of its tree has. The last call that is let
        through may go beyond the limit: how much it takes shows only when it is over.
        """
        root = root_of(session_id)
        if root not in self._trees:
            if known is None:
                return None
            self._trees[root] = {sid: _Account(used=sum) for sid, sum in known.items()}
        self._trees.move_to_end(root)
        while len(self._trees) > KEPT_TREES:
            self._trees.popitem(last=False)
        tree = self._trees[root]
        tree[session_id] = _Account(used=used)
        if sum(account.used + account.reserved for account in tree.values()) >= limit:
            return False
        tree[session_id].reserved = wanted
        return True

    def settle(self, session_id: str, used: int) -> None:
        """The session's call is over, and its sum is this now."""
        tree = self._trees.get(root_of(session_id))
        if tree is not None:
            tree[session_id] = _Account(used=used)


async def used_by_tree(storage: Storage, root: str) -> dict[str, int]:
    """What every session of the tree has used, by its head."""
    used = {}
    async for sid in storage.session_ids(root):
        found = await storage.checkpoints.read(sid) if root_of(sid) == root else None
        if found is not None:
            used[sid] = found[0].state.agent.usage.total
    return used


class LocalBudgets:
    """Budgets of sessions that all run in this process."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._ledger = TokenLedger()

    async def reserve(self, session_id: str, used: int, wanted: int, limit: int) -> bool:
        granted = self._ledger.reserve(session_id, used, wanted, limit)
        if granted is None:
            known = await used_by_tree(self._storage, root_of(session_id))
            granted = self._ledger.reserve(session_id, used, wanted, limit, known)
        return bool(granted)

    async def settle(self, session_id: str, used: int) -> None:
        self._ledger.settle(session_id, used)
