"""Host: what a process gives to the sessions it drives. Values and ports only."""

from __future__ import annotations

from dataclasses import dataclass, field

from greenroom.runtime.open_parts import OpenParts
from greenroom.runtime.ports import Budgets, ChildHost, Clock, IdSource, TreeSandboxes
from greenroom.runtime.shelf import AgentShelf
from greenroom.runtime.storage.storage import Storage
from greenroom.runtime.tool_tasks import ToolTasks


@dataclass(slots=True)
class Lifetime:
    """Whether the process still takes on runs."""

    closed: bool = False


@dataclass(frozen=True, slots=True)
class Host:
    """What a process gives to the sessions it drives; `owner` names it in the heads it owns.

    parts: what their agents hold open; host_fence: an embedding host's own fencing number, 0 for none; a session that
    has seen a higher one is refused.
    """

    storage: Storage
    sandboxes: TreeSandboxes
    children: ChildHost
    clock: Clock
    ids: IdSource
    shelf: AgentShelf
    owner: str
    tasks: ToolTasks
    budgets: Budgets
    host_fence: int = 0
    parts: OpenParts = field(default_factory=OpenParts)
    lifetime: Lifetime = field(default_factory=Lifetime)
