"""AgentShelf: agents by digest, as objects in this process and as documents in the store."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Awaitable, Callable

from greenroom.runtime.agents import AgentPacket, decode_document, encode_document, pack, subagent_digests, unpack
from greenroom.runtime.config import AgentConfig
from greenroom.runtime.errors import AgentUnavailable
from greenroom.runtime.ports import SharedTurns, SharesTurns
from greenroom.runtime.storage.storage import Storage

KEPT_AGENTS = 256
"""Agents a process keeps as objects, the least recently used go first."""


Fetch = Callable[[str, bool], Awaitable[AgentPacket | None]]


class AgentShelf:
    """`fetch`: asks whoever keeps packets with local parts, before the store is asked.

    Its second argument: whether to wait a while for one that is not there, when the store's alone does not do.
    turns: shared by the models of all agents that are taken from here, where they can share theirs.
    """

    def __init__(self, storage: Storage, fetch: Fetch | None = None, turns: SharedTurns | None = None) -> None:
        self._storage = storage
        self._fetch = fetch
        self._turns = turns
        self._agents: OrderedDict[str, AgentConfig] = OrderedDict()

    async def put(self, agent: AgentConfig) -> str:
        """Stores the agent and its sub-agents; answers the digest."""
        packet = pack(agent)
        if packet.digest not in self._agents:
            for digest, document in packet.documents.items():
                await self._storage.put_agent(digest, encode_document(document))
        self.keep(packet.digest, agent)
        return packet.digest

    def keep(self, digest: str, agent: AgentConfig) -> None:
        """Holds an agent in this process alone."""
        if self._turns is not None:
            for provider in agent.providers:
                if isinstance(provider, SharesTurns):
                    provider.share(self._turns)
        self._agents[digest] = agent
        self._agents.move_to_end(digest)
        while len(self._agents) > KEPT_AGENTS:
            self._agents.popitem(last=False)

    async def get(self, digest: str) -> AgentConfig:
        """Raises AgentUnavailable when neither this process nor the store has it, or parts of it."""
        found = self._agents.get(digest)
        if found is None:
            packet = await self._fetch(digest, False) if self._fetch is not None else None
            try:
                found = unpack(packet or await self._stored(digest))
            except AgentUnavailable:
                packet = await self._fetch(digest, True) if self._fetch is not None else None
                if packet is None:
                    raise
                found = unpack(packet)
            self.keep(digest, found)
        return found

    async def _stored(self, digest: str) -> AgentPacket:
        documents = {}
        missing = [digest]
        while missing:
            wanted = missing.pop()
            body = await self._storage.get_agent(wanted)
            if body is None:
                raise AgentUnavailable(
                    f"the store has no agent {wanted[:12]}", hint="Open the session with agent=... from its script"
                )
            documents[wanted] = decode_document(body)
            missing += [d for d in subagent_digests(documents[wanted]) if d not in documents]
        return AgentPacket(digest, documents)
