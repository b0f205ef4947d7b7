"""What travels between client, Supervisor and actors: plain values, and the version of this very protocol."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

import greenroom
from greenroom.runtime.errors import ClusterError, ConfigError, GreenroomError
from greenroom.runtime.events import Event
from greenroom.runtime.results import RunResult

PROTOCOL = 3
"""Raised whenever a value of this module changes its meaning; both sides must agree."""

SUPERVISOR = "greenroom-supervisor"

CommandKey = tuple[str, str]
"""(session id, request id)."""

Verb = Literal["run", "resume", "answer", "child"]


MIN_STUCK_AFTER = 5.0
"""Seconds; below it a busy machine would look like a stuck one."""


@dataclass(frozen=True, slots=True)
class PoolConfig:
    """The green room of a namespace; times in seconds.

    session_actors: how many root sessions may live at once, each in a process of its own; further ones queue. None lets
    the pool choose by the cluster's CPUs and memory. Children and recoveries never queue: beyond the bound they get an
    actor of their own, which ends with them. min_idle: warm session actors kept ready; idle_after: until an idle one
    beyond that ends. idle_shutdown: without a client and without work until the whole pool ends, 0 for never.
    stuck_after: without a beat of an actor's run loop until it is taken for dead. slot_resource: a custom resource of
    Ray that names the nodes where sessions run, and how many root sessions (up to 99) each of them takes; the pool's
    own size is then the sum of those that are there, so give session_actors where nodes are to be added.
    """

    session_actors: int | None = None
    min_idle: int = 1
    idle_after: float = 60.0
    idle_shutdown: float = 600.0
    stuck_after: float = 60.0
    slot_resource: str | None = None

    def __post_init__(self) -> None:
        if self.session_actors is not None and self.session_actors < 1:
            raise ConfigError(f"session_actors is {self.session_actors}", hint="Give at least 1")
        if self.min_idle < 0 or self.idle_after < 0 or self.idle_shutdown < 0:
            raise ConfigError("min_idle, idle_after and idle_shutdown cannot be negative", hint="Give 0 or more")
        if self.stuck_after < MIN_STUCK_AFTER:
            hint = f"Give at least {MIN_STUCK_AFTER:g}: a machine may be busy"
            raise ConfigError(f"stuck_after is {self.stuck_after:g} s", hint=hint)


@dataclass(frozen=True, slots=True)
class Hello:
    """A client's handshake; all of it must match the pool that is there."""

    protocol: int
    version: str
    python: str
    code: str
    store: str

    @classmethod
    def of(cls, store: str) -> Hello:
        """This process's."""
        return cls(
            PROTOCOL, greenroom.__version__, f"{sys.version_info.major}.{sys.version_info.minor}", _code(), store
        )

    def difference(self, other: Hello) -> str:
        """What the other's differs in, as text."""
        names = [name for name in self.__slots__ if getattr(self, name) != getattr(other, name)]
        return ", ".join(f"{name} {getattr(self, name)!r} here, {getattr(other, name)!r} there" for name in names)


@cache
def _code() -> str:
    """Of the package's own sources: actors and client must run the same ones."""
    folder = Path(greenroom.__file__).parent
    digest = hashlib.sha256()
    for part in ("", "actors", "runtime", "sandbox"):
        for path in sorted((folder / part).glob("*.py" if not part else "**/*.py")):
            digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


@dataclass(frozen=True, slots=True)
class Command:
    """A verb for a session. `request_id` names it: the same command twice is one command.

    agent: digest of the agent to use instead of the stored one; paths: the client's folders to import from; recover:
    whoever had it died; cancelled: it was cancelled before it could begin, with this reason; parent: of a child's;
    rebuilt: a new Supervisor made it of what the store says, for an owner that is gone.
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
    parent: str | None = None
    rebuilt: bool = False

    @property
    def key(self) -> CommandKey:
        """What names it in the pool: a caller's request ids are its session's own."""
        return self.session_id, self.request_id

    def same_content(self, other: Command) -> bool:
        """Whether the other command asks for the same, as far as that is known; a child's key is its own for good."""
        if self.rebuilt or self.verb == other.verb == "child":
            return True
        mine = (self.verb, self.text, self.interrupt_id, self.response)
        return mine == (other.verb, other.text, other.interrupt_id, other.response)

    @property
    def first(self) -> bool:
        """Whether it goes ahead of new work and beyond the bound: somebody already running waits for it."""
        return self.verb == "child" or self.recover or self.cancelled is not None


class UnknownCommand(ClusterError):
    """The Supervisor knows no such command: it died and lost its memory. Start it again, to be recovered."""


def child_request(child_id: str) -> str:
    """The one command that a child's first run is, however often its parent asks for it."""
    return f"spawn:{child_id}"


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
    """A page of a session's events: those from a position on, where to go on, how many were missed.

    running: whether the session runs where they come from, so that more may follow.
    """

    events: tuple[Event, ...]
    position: int
    missed: int
    running: bool


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
class SessionReport:
    """A session actor as it is; running: its commands; beat: seconds since its run loop last turned."""

    name: str
    pid: int
    running: tuple[Command, ...]
    beat: float


@dataclass(frozen=True, slots=True)
class SandboxReport:
    """A sandbox actor as it is; root and facts: of the tree whose sandbox it has open."""

    pid: int
    root: str | None = None
    facts: SandboxFacts | None = None


@dataclass(frozen=True, slots=True)
class PoolStatus:
    """size: root sessions that may live at once; session_actors, sandbox_actors: processes.

    idle: warm session actors; busy: sessions that run; queued: sessions whose command waits, in order; clients: that
    have told of themselves lately; pids: of all processes but the Supervisor's.
    """

    size: int
    session_actors: int
    idle: int
    sandbox_actors: int
    busy: tuple[str, ...]
    queued: tuple[str, ...]
    clients: int
    supervisor_pid: int
    pids: tuple[int, ...] = ()
