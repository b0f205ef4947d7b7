"""Reading a session's events from whichever actor has it, over its death and its next run."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from greenroom.actors.handles import ActorLost, ActorSilent, SessionActorClient, SupervisorClient
from greenroom.actors.wire import Command, EventPage, Outcome
from greenroom.runtime.events import Event, parse_cursor

POLL_PAUSE = 0.2
"""Seconds between looks for a session that no actor has."""


async def follow_command(
    supervisor: SupervisorClient, command: Command, run: asyncio.Future[Outcome]
) -> AsyncIterator[Event]:
    """The events of one command, from its run_started to its run_finished.

    After a take-over the new owner's come from its own run_started on, with a reset. When no actor can tell the end
    any more, the outcome does. Raises what refused the command.
    """
    actor: SessionActorClient | None = None
    position, ours = 0, False
    while True:
        over = run.done()
        try:
            if actor is None:
                actor, position, ours = await supervisor.locate(command.key), 0, False
            if actor is not None:
                page = await actor.events(command.session_id, position)
                position = page.position
                for event in _with_gap(page) if ours else page.events:
                    ours = ours or (event.type == "run_started" and event.data.get("request_id") == command.request_id)
                    if ours:
                        yield event
                    if ours and event.type == "run_finished":
                        return
        except (ActorLost, ActorSilent):
            actor = None
        if over:
            outcome = run.result()
            result = outcome.result or getattr(outcome.error, "result", None) or outcome.unwrap()
            yield Event("0.0", "run_finished", command.session_id, 0.0, {"result": result})
            return


async def follow_session(
    supervisor: SupervisorClient, session_id: str, after: str | None, *, forever: bool
) -> AsyncIterator[Event]:
    """The events after the cursor that the session's latest actor holds; with `forever` also those to come."""
    seen = parse_cursor(after) if after is not None else (0, 0)
    position, actor_id = 0, None
    while True:
        actor = await supervisor.actor_of(session_id)
        events: list[Event] = []
        if actor is not None:
            position = position if actor.id == actor_id else 0
            actor_id = actor.id
            try:
                page = await actor.events(session_id, position)
                position = page.position
                events = [event for event in _with_gap(page) if parse_cursor(event.id) > seen]
            except (ActorLost, ActorSilent):
                actor = None
        for event in events:
            seen = parse_cursor(event.id)
            yield event
        if not events and not forever:
            return
        if actor is None:
            await asyncio.sleep(POLL_PAUSE)


def _with_gap(page: EventPage) -> tuple[Event, ...]:
    if not page.missed or not page.events:
        return page.events
    first = page.events[0]
    return (Event(first.id, "gap", first.session_id, first.time, {"missed": page.missed}), *page.events)
