"""ShippedSandboxes: the SandboxFactory of the kinds that come with Greenroom. Never falls back to a weaker kind."""

from __future__ import annotations

from pathlib import Path

from greenroom.runtime.calls import SandboxSpec
from greenroom.runtime.errors import SandboxUnavailable
from greenroom.sandbox.host import HostSandbox


class ShippedSandboxes:
    async def open(self, spec: SandboxSpec, root: str, snapshot: str | None = None) -> HostSandbox:
        if spec.kind != "host":
            raise SandboxUnavailable(
                f"the sandbox {spec.kind!r} is not available in this version",
                hint="Use sandbox='host' (--sandbox host): no isolation, commands run on this machine as you",
            )
        if snapshot is not None:
            raise SandboxUnavailable("the host sandbox has no snapshots", hint="Its workspace folder is kept as it is")
        if spec.workspace is None:
            raise SandboxUnavailable("the session has no workspace folder", hint="Give SandboxSpec(workspace=...)")
        return await HostSandbox.open(Path(spec.workspace), spec)
