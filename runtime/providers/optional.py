"""What a provider may have beside `stream`: a check before a run, and connections to let go of."""

from __future__ import annotations

from weakref import WeakValueDictionary

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


class OpenProviders:
    """Providers whose connections `close` lets go of, for as long as anybody uses them."""

    def __init__(self) -> None:
        self._known: WeakValueDictionary[int, LlmProvider] = WeakValueDictionary()
        self._lasting: dict[int, LlmProvider] = {}  # those that take no weak references

    def remember(self, provider: LlmProvider) -> None:
        if not hasattr(provider, "close"):
            return
        try:
            self._known[id(provider)] = provider
        except TypeError:
            self._lasting[id(provider)] = provider

    async def close(self) -> None:
        for provider in [*self._known.values(), *self._lasting.values()]:
            await close(provider)
