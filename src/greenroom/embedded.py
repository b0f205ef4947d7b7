"""AgentRuntime: the embedded edition, the runtime's engine with the sandboxes that ship with Greenroom."""

from __future__ import annotations

from greenroom.runtime.engine import Engine
from greenroom.runtime.ports import Clock, IdSource, SandboxFactory
from greenroom.runtime.storage.storage import Storage
from greenroom.sandbox.factory import ShippedSandboxes


class AgentRuntime(Engine):
    """Sessions in this process, without Ray.

    storage: a URL (memory:, sqlite:///FILE) or a Storage; sandboxes: instead of the shipped ones.
    """

    def __init__(
        self,
        storage: str | Storage = "sqlite:///greenroom.db",
        host_fence: int = 0,
        *,
        sandboxes: SandboxFactory | None = None,
        clock: Clock | None = None,
        ids: IdSource | None = None,
    ) -> None:
        super().__init__(storage, host_fence, sandboxes=sandboxes or ShippedSandboxes(), clock=clock, ids=ids)
