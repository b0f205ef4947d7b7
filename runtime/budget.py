"""Token budgets of session trees: what all sessions of a tree have used together.

A ledger is a cache: each session tells its own sum whenever it asks, and a ledger that does not know a tree (because
its process is new) is told by whoever asks what the heads in the store say. Calls that run when the budget is reached
go on: the most that a tree uses beyond it is what its running calls take.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping

from greenroom.runtime.ids import root_of
from greenroom.runtime.storage.storage import Storage

KEPT_TREES = 4096
"""Trees that a ledger remembers, the least recently used go first."""


class TokenLedger:
    """Trees by root, their sessions by id; tokens are those of input and output together."""

    def __init__(self) -> None:
        self._trees: OrderedDict[str, dict[str, int]] = OrderedDict()

    def left(self, session_id: str, used: int, limit: int, known: Mapping[str, int] | None = None) -> bool | None:
        """Whether the session's tree has used less than `limit`; None: the ledger has to be told `known`.

        used: what the session has used so far; known: what every session of its tree has.
        """
        root = root_of(session_id)
        if root not in self._trees:
            if known is None:
                return None
            self._trees[root] = dict(known)
        self._trees.move_to_end(root)
        while len(self._trees) > KEPT_TREES:
            self._trees.popitem(last=False)
        self._trees[root][session_id] = used
        return sum(self._trees[root].values()) < limit

    def tell(self, session_id: str, used: int) -> None:
        """The session's sum is this now."""
        tree = self._trees.get(root_of(session_id))
        if tree is not None:
            tree[session_id] = used


async def used_by_tree(storage: Storage, root: str) -> dict[str, int]:
    """What every session of the tree has used, by its head."""
    used: dict[str, int] = {}
    missing = [root]
    while missing:
        sid = missing.pop()
        found = await storage.checkpoints.read(sid)
        if found is not None:
            used[sid] = found[0].state.agent.usage.total
            missing += found[0].children.values()
    return used


class LocalBudgets:
    """Budgets of sessions that all run in this process."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._ledger = TokenLedger()

    async def left(self, session_id: str, used: int, limit: int) -> bool:
        left = self._ledger.left(session_id, used, limit)
        if left is None:
            known = await used_by_tree(self._storage, root_of(session_id))
            left = self._ledger.left(session_id, used, limit, known)
        return bool(left)

    async def tell(self, session_id: str, used: int) -> None:
        self._ledger.tell(session_id, used)
