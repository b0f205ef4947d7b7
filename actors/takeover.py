"""What a new Supervisor finds: the actors that live, and the sessions whose owner is gone."""

from __future__ import annotations

from collections.abc import Container
from typing import Any

import ray

from greenroom.actors.pool import SANDBOX_ACTOR, SESSION_ACTOR
from greenroom.actors.wire import Command, child_request
from greenroom.runtime.storage.head import Head
from greenroom.runtime.storage.storage import Storage


async def find_orphans(storage: Storage, namespace: str, actors: Container[str]) -> list[Head]:
    """Heads of active sessions whose owner was an actor of this namespace and is none of those that live."""
    found = []
    for sid in await storage.active_ids():
        read = await storage.checkpoints.read(sid)
        kind, owned_in, actor = f"{read[0].owner if read is not None else ''}::".split(":", 2)
        if read is not None and (kind, owned_in) == ("ray", namespace) and actor.removesuffix("::") not in actors:
            found.append(read[0])
    return found


def command_for(head: Head, paths: tuple[str, ...]) -> Command:
    """What goes on with a session whose owner is gone, under the name that whoever waits for it knows."""
    sid = head.session_id
    if head.parent is not None:
        request = child_request(sid)
        return Command(request, sid, "child", recover=True, rebuilt=True, parent=head.parent, paths=paths)
    request = head.claim.request_id if head.claim is not None else f"recover:{head.epoch}"
    return Command(request, sid, "resume", recover=True, rebuilt=True, paths=paths)


def pool_actors(namespace: str) -> list[str]:
    """Names of the pool's actors that live."""
    named: Any = ray.util.list_named_actors(all_namespaces=True)  # dicts, then
    mine = [str(entry["name"]) for entry in named if entry["namespace"] == namespace]
    return [name for name in mine if name.startswith((SESSION_ACTOR, SANDBOX_ACTOR))]
