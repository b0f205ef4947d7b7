"""Values around one call: what a model is asked, what a tool is given and gives back, what a sandbox answers.

They lie below `ports`, which names them in its signatures. No port is imported here.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from greenroom.runtime.errors import ConfigError
from greenroom.runtime.messages import ContentBlock, Message, TextBlock, Value

if TYPE_CHECKING:
    from greenroom.runtime.cancel import CancelToken
    from greenroom.runtime.ports import BoundSandbox, Progress

Effect = Literal["read_only", "idempotent", "effectful"]


@dataclass(frozen=True, slots=True)
class ToolSchema:
    """What the model sees of a tool; `parameters` is a JSON Schema with an object at its root."""

    name: str
    description: str
    parameters: dict[str, Any]


@dataclass(frozen=True, slots=True)
class CallBounds:
    """How many calls an endpoint gets at once, and how many begin in a minute; None for no bound."""

    endpoint: str
    max_concurrent: int | None
    requests_per_minute: float | None


@dataclass(frozen=True, slots=True)
class ModelRequest:
    """One model call; `call_no` counts the model calls this session has made before, failed ones included."""

    session_id: str
    call_no: int
    system: str | None
    messages: tuple[Message, ...]
    tools: tuple[ToolSchema, ...] = ()
    temperature: float | None = None
    max_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class ProposedCall:
    """A call as a policy sees it: final, with a value for every argument that the model gave."""

    key: str
    tool: str
    arguments: dict[str, Any]
    effect: Effect


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a policy says of a call: it may run, may not, or someone is asked; `reason` is told to whom it concerns."""

    decision: Literal["allow", "deny", "ask"]
    reason: str = ""

    def __post_init__(self) -> None:
        if self.decision not in ("allow", "deny", "ask"):
            raise ConfigError(f"a verdict is allow, deny or ask, not {self.decision!r}")


class ToolOutput(Value):
    """A tool's result as the model gets it."""

    content: tuple[ContentBlock, ...] = ()
    is_error: bool = False

    @property
    def text(self) -> str:
        return "".join(block.text for block in self.content if isinstance(block, TextBlock))

    @classmethod
    def of_text(cls, text: str, *, is_error: bool = False) -> ToolOutput:
        return cls.trusted(content=(TextBlock.trusted(text=text),), is_error=is_error)


class Interrupt(Value):
    """A tool asks someone and the run waits; on a result, `id` is the key of the waiting call."""

    kind: str
    payload: dict[str, Any] = Field(default_factory=dict)
    id: str = ""


@dataclass(frozen=True, slots=True)
class CallRef:
    """Who asks a sandbox: session, its owner's epoch, the call key, and a digest of (tool, final arguments).

    step: of the call; acked_through: the last step whose outcomes the session has recorded for good.
    """

    session_id: str
    epoch: int
    call_key: str
    digest: str
    step: int = 0
    acked_through: int = -1

    def later(self, number: int) -> CallRef:
        """The reference of a call's further operation."""
        return replace(self, call_key=f"{self.call_key}#{number}")


class ToolContext:
    """What a tool may know and use; read only.

    cancel: tells a long tool that its run is being cancelled; sandbox: None when the agent has none.
    """

    __slots__ = ("_call_key", "_cancel", "_progress", "_sandbox", "_session_id")

    def __init__(
        self,
        session_id: str,
        call_key: str,
        cancel: CancelToken,
        progress: Progress,
        sandbox: BoundSandbox | None = None,
    ) -> None:
        self._session_id = session_id
        self._call_key = call_key
        self._cancel = cancel
        self._progress = progress
        self._sandbox = sandbox

    @property
    def session_id(self) -> str:
        return self._session_id

    @property
    def call_key(self) -> str:
        """The call's key: the same over every recovery of this call, never used for another."""
        return self._call_key

    @property
    def idempotency_key(self) -> str:
        """What to hand to an outside service so that it can tell a repeated call; equals the call key."""
        return self._call_key

    @property
    def cancel(self) -> CancelToken:
        return self._cancel

    @property
    def progress(self) -> Progress:
        return self._progress

    @property
    def sandbox(self) -> BoundSandbox | None:
        return self._sandbox


class ExecResult(Value):
    """How a command ended. `output` holds stdout and stderr in order of arrival, head and tail within the bound.

    exit_code: only for exited; signal: only for signaled; dropped_bytes: what lay between head and tail; cwd: the
    folder that its shell ended in, None where that is not known.
    """

    status: Literal["exited", "signaled", "timed_out", "output_limit", "oom"]
    exit_code: int | None = None
    signal: int | None = None
    output: str = ""
    dropped_bytes: int = 0
    cwd: str | None = None

    @property
    def ok(self) -> bool:
        return self.status == "exited" and self.exit_code == 0


class JobState(Value):
    """A background job as it is now; `output`: what is new since the last look.

    status: running, or how it ended; killed: because somebody asked for it; lost: nobody knows how. exit_code, signal:
    of one that has ended.
    """

    id: str
    status: Literal["running", "exited", "signaled", "timed_out", "output_limit", "oom", "killed", "lost"]
    exit_code: int | None = None
    signal: int | None = None
    output: str = ""
    dropped_bytes: int = 0


class SandboxLimits(Value):
    """Bounds of a sandbox.

    Of one command: output_head, output_tail: bytes of output kept at its start and its end; spill_bytes: of longer
    output, how much goes to a file in the sandbox, 0 for none; max_seconds: that it may take, 0 for no limit;
    max_file_bytes: of a file that a tool reads. Enforced by isolating kinds only: max_processes: processes and threads
    at once; memory_bytes: of one process's data, and of all together, which is looked at every 0.2 s; max_write_bytes:
    of a file that a command writes; tmp_bytes, shm_bytes: of /tmp and /dev/shm.

    Of the whole: snapshot_bytes: of a workspace that is saved; idle_seconds: from the last call until a sandbox that
    keeps snapshots is saved and closed; job_seconds: how long a running background job may hold that up.
    """

    output_head: int = Field(default=16 * 1024, ge=0)
    output_tail: int = Field(default=48 * 1024, ge=0)
    spill_bytes: int = Field(default=8 * 1024 * 1024, ge=0)
    max_seconds: float = Field(default=0.0, ge=0)
    max_file_bytes: int = Field(default=16 * 1024 * 1024, ge=1)
    max_processes: int = Field(default=512, ge=8)
    memory_bytes: int = Field(default=4 * 1024**3, ge=64 * 1024**2)
    max_write_bytes: int = Field(default=4 * 1024**3, ge=1)
    tmp_bytes: int = Field(default=1024**3, ge=1)
    shm_bytes: int = Field(default=64 * 1024**2, ge=1)
    snapshot_bytes: int = Field(default=8 * 1024**3, ge=1)
    idle_seconds: float = Field(default=600.0, gt=0)
    job_seconds: float = Field(default=1800.0, ge=0)


class SandboxSpec(Value):
    """Which sandbox a session tree works in.

    workspace: None keeps it under the home folder until the session is deleted; a path is the user's own folder;
    managed: set by the runtime when it put the path there for None.
    env: variables for its commands, beside a small fixed set; network: whether a sandbox that can deny it allows it.
    snapshots: whether the workspace is saved to the store, at every stop of the root and after every `snapshot_every`
    calls that may have changed it; auto: only where its folder may be lost with a machine.
    """

    kind: str
    workspace: str | None = None
    managed: bool = False
    env: dict[str, str] = Field(default_factory=dict)
    network: bool = False
    snapshots: Literal["auto", "on", "off"] = "auto"
    snapshot_every: int = Field(default=10, ge=1)
    limits: SandboxLimits = SandboxLimits()


_COMPACT = json.JSONEncoder(sort_keys=True, separators=(",", ":"), ensure_ascii=False)


def compact_json(value: Any) -> str:
    """JSON with sorted keys and no spaces: the form that digests are made of."""
    return _COMPACT.encode(value)
