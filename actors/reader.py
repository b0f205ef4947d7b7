"""Reading a session's events from whichever actor has it, over its death and its next run."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from greenroom.actors.calls import ActorLost, ActorSilent
from greenroom.actors.handles import SessionActorClient, SupervisorClient
from greenroom.actors.wire import Command, EventPage, Outcome
from greenroom.runtime.events import Event, parse_cursor

POLL_PAUSE = 0.2
"""Seconds before an actor that did not answer, or its successor, is asked."""


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
    number, position, actor_id = 0, 0, ""
    while True:
        actor, placed = await supervisor.placement(session_id, number, wait=forever)
        if actor is None:
            if not forever:
                return
            continue
        number, position, actor_id = placed, position if actor.id == actor_id else 0, actor.id
        while True:
            try:
                page = await actor.events(session_id, position)
            except ActorLost:
                await asyncio.sleep(POLL_PAUSE)  # its successor will have the rest
                break
            except ActorSilent:
                await asyncio.sleep(POLL_PAUSE)
                continue
            position = page.position
            for event in _with_gap(page):
                if parse_cursor(event.id) > seen:
                    seen = parse_cursor(event.id)
                    yield event
            if not page.events and not (forever and page.running):
                break  # nothing comes from here before the session is placed again


def _with_gap(page: EventPage) -> tuple[Event, ...]:
    if not page.missed or not page.events:
        return page.events
    first = page.events[0]
    return (Event(first.id, "gap", first.session_id, first.time, {"missed": page.missed}), *page.events)
