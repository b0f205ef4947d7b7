"""OpenParts: what the agents of a process hold open, to be let go of when that process is done with them."""

from __future__ import annotations

from typing import Any
from weakref import WeakValueDictionary

from greenroom.runtime.config import AgentConfig
from greenroom.runtime.middleware import close_all, has_hook
from greenroom.runtime.ports import LlmProvider
from greenroom.runtime.providers.optional import close


class OpenParts:
    """Providers for as long as anybody uses them; middleware until it is closed."""

    def __init__(self) -> None:
        self._providers: WeakValueDictionary[int, LlmProvider] = WeakValueDictionary()
        self._lasting: dict[int, LlmProvider] = {}  # those that take no weak references
        self._middleware: dict[int, Any] = {}

    def remember(self, agent: AgentConfig) -> None:
        summarizer = getattr(agent.compactor, "provider", None)
        for provider in [*agent.providers, *([summarizer] if summarizer is not None else [])]:
            if hasattr(provider, "close"):
                try:
                    self._providers[id(provider)] = provider
                except TypeError:
                    self._lasting[id(provider)] = provider
        for part in agent.middleware:
            if has_hook(part, "close"):
                self._middleware[id(part)] = part

    async def close(self) -> None:
        """Middleware first, each once, the last one first; then the connections of the providers."""
        parts, self._middleware = list(self._middleware.values()), {}
        await close_all(parts)
        for provider in [*self._providers.values(), *self._lasting.values()]:
            await close(provider)
