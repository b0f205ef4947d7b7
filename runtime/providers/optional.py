"""What a provider may have beside `stream`: a check before a run, and connections to let go of."""

from __future__ import annotations

from greenroom.runtime.ports import LlmProvider


def preflight(provider: LlmProvider) -> None:
    """Raises PreflightError when the provider knows that it cannot work here."""
    check = getattr(provider, "preflight", None)
    if check is not None:
        check()


async def close(provider: LlmProvider) -> None:
    """Lets go of what the provider holds for this event loop; it stays usable."""
    ending = getattr(provider, "close", None)
    if ending is not None:
        await ending()
