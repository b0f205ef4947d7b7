"""What travels between client, Supervisor and actors: plain values, and the version of this very protocol."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from greenroom.runtime.errors import ConfigError, GreenroomError
from greenroom.runtime.events import Event
from greenroom.runtime.results import RunResult

PROTOCOL = 1
"""Raised whenever a value of this module changes its meaning; both sides must agree."""

SUPERVISOR = "greenroom-supervisor"

CommandKey = tuple[str, str]
"""(session id, request id)."""

Verb = Literal["run", "resume", "answer", "child"]


@dataclass(frozen=True, slots=True)
class PoolConfig:
    """The green room of a namespace.

    session_actors: warm session actors, each for one live session at a time; further root sessions queue. Children and
    recoveries never queue: beyond the bound they get an actor of their own, which ends with them.
    """

    session_actors: int = field(default_factory=lambda: max(2, min(8, os.cpu_count() or 2)))

    def __post_init__(self) -> None:
        if self.session_actors < 1:
            raise ConfigError(f"session_actors is {self.session_actors}", hint="Give at least 1")


@dataclass(frozen=True, slots=True)
class Hello:
    """A client's handshake; all of it must match the pool that is there."""

    protocol: int
    version: str
    store: str


@dataclass(frozen=True, slots=True)
class Command:
    """A verb for a session. `request_id` names it: the same command twice is one command.

    agent: digest of the agent to use instead of the stored one; paths: the client's folders to import from; recover:
    the actor that had it died; cancelled: it was cancelled before it could begin, with this reason.
    """

    request_id: str
    session_id: str
    verb: Verb
    text: str | None = None
    interrupt_id: str = ""
    response: Any = None
    timeout: float | None = None
    agent: str | None = None
    paths: tuple[str, ...] = ()
    recover: bool = False
    cancelled: str | None = None

    @property
    def key(self) -> CommandKey:
        """What names it in the pool: a caller's request ids are its session's own."""
        return self.session_id, self.request_id

    def same_content(self, other: Command) -> bool:
        """Whether the other command asks for the same."""
        mine = (self.verb, self.text, self.interrupt_id, self.response)
        return mine == (other.verb, other.text, other.interrupt_id, other.response)

    @property
    def first(self) -> bool:
        """Whether it goes ahead of new work and beyond the bound: somebody already running waits for it."""
        return self.verb == "child" or self.recover or self.cancelled is not None


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a command ended: a result, an error, or neither (nothing was in flight)."""

    result: RunResult | None = None
    error: GreenroomError | None = None

    def unwrap(self) -> RunResult | None:
        if self.error is not None:
            raise self.error
        return self.result


@dataclass(frozen=True, slots=True)
class EventPage:
    """A page of a session's events: those from a position on, where to go on, how many were missed."""

    events: tuple[Event, ...]
    position: int
    missed: int


@dataclass(frozen=True, slots=True)
class SandboxFacts:
    """What a TreeSandbox says of itself, fixed from its opening on."""

    incarnation: str
    guarantees: frozenset[str]
    saves: bool
    restored: Mapping[str, str] | None


@dataclass(frozen=True, slots=True)
class SandboxInfo:
    """An open sandbox and the actor that holds it."""

    actor: Any
    facts: SandboxFacts


@dataclass(frozen=True, slots=True)
class PoolStatus:
    """session_actors, sandbox_actors: processes; busy: sessions that run; queued: commands that wait."""

    session_actors: int
    sandbox_actors: int
    busy: tuple[str, ...]
    queued: int
    pids: tuple[int, ...] = ()
