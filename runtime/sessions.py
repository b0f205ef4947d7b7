"""What can be done with sessions by the store alone: make a root, read a head, a transcript, the list."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator

from greenroom.runtime.config import AgentConfig
from greenroom.runtime.errors import ConfigError, SessionExists, SessionNotFound
from greenroom.runtime.host import Host
from greenroom.runtime.ids import MAX_ID, check_request_id, check_root_id
from greenroom.runtime.results import SessionInfo, SessionTree, Transcript
from greenroom.runtime.state import AgentState, Ready
from greenroom.runtime.storage.head import Head, SandboxRef
from greenroom.runtime.storage.storage import Storage
from greenroom.runtime.view import info_of
from greenroom.runtime.workspace import resolved_spec


async def create_root(
    host: Host, agent: AgentConfig, session_id: str | None, user_id: str | None, request_id: str | None = None
) -> str:
    """The id of the new session; raises SessionExists, unless this very request has made it."""
    if session_id is not None:
        session_id = check_root_id(session_id)
    elif request_id is not None:  # asked again it is the same id
        session_id = hashlib.sha256(check_request_id(request_id).encode()).hexdigest()[:32]
    else:
        session_id = host.ids.new_id()
    if user_id is not None and len(user_id) > MAX_ID:
        raise ConfigError(f"a user id has up to {MAX_ID} characters, this one {len(user_id)}")
    spec = agent.sandbox_spec
    head = Head(
        session_id=session_id,
        root=session_id,
        created_by=request_id,
        user_id=user_id,
        agent=await host.shelf.put(agent),
        since=host.clock.time(),
        write_id=host.ids.new_id(),
        sandbox=None if spec is None else SandboxRef(spec=resolved_spec(spec, session_id)),
        state=Ready(agent=AgentState(session_id=session_id)),
    )
    try:
        await host.storage.checkpoints.create(session_id, head)
    except SessionExists:
        found = await host.storage.checkpoints.read(session_id)
        if request_id is None or found is None or found[0].created_by != request_id:
            raise
    return session_id


async def read_head(storage: Storage, session_id: str) -> Head:
    """Raises SessionNotFound."""
    found = await storage.checkpoints.read(session_id)
    if found is None:
        raise SessionNotFound.of(session_id)
    return await storage.gathered(found[0])


async def read_transcript(storage: Storage, session_id: str) -> Transcript:
    head = await read_head(storage, session_id)
    return Transcript(
        session_id=session_id,
        messages=await storage.messages_of(head),
        parent=head.parent,
        children=tuple(head.children.values()),
    )


async def read_tree(storage: Storage, session_id: str) -> SessionTree:
    """The session and everything below it; a child that was never made is left out. Raises SessionNotFound."""
    return await _tree(storage, await read_head(storage, session_id))


async def _tree(storage: Storage, head: Head) -> SessionTree:
    children = []
    for child in head.children.values():
        found = await storage.checkpoints.read(child)
        if found is not None:
            children.append(await _tree(storage, await storage.gathered(found[0])))
    return SessionTree(info=info_of(head), children=tuple(children))


async def list_sessions(storage: Storage, prefix: str = "", state: str | None = None) -> AsyncIterator[SessionInfo]:
    """In order of ids; `state` keeps those in that state."""
    async for sid in storage.session_ids(prefix):
        found = await storage.checkpoints.read(sid)
        if found is not None and state in (None, found[0].state.name):
            yield info_of(await storage.gathered(found[0]))
