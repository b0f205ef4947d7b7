"""RunPorts: what one run reaches the world through. The loop and its batches use nothing else."""

from __future__ import annotations

from dataclasses import dataclass

from greenroom.runtime.cancel import CancelToken
from greenroom.runtime.emitter import Emitter
from greenroom.runtime.ports import Budgets, Children, Clock, IdSource, TreeSandboxes
from greenroom.runtime.tool_tasks import ToolTasks


@dataclass(frozen=True, slots=True)
class RunPorts:
    """`cancel`: the run's own token; `children`: of the session that runs; `tasks`: of the process."""

    sandboxes: TreeSandboxes
    children: Children
    emitter: Emitter
    clock: Clock
    ids: IdSource
    tasks: ToolTasks
    budgets: Budgets
    cancel: CancelToken
