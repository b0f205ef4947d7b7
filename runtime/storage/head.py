"""The head: the one mutable object of a session, and the segments it points to. Values and their JSON form.

A head holds everything a new owner needs: who owns the session, its state, the open batch, where its messages lie.
How versions are told apart and brought up is documents.py.
"""

from __future__ import annotations

import hashlib
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import Field, model_serializer, model_validator

from greenroom.runtime.calls import SandboxSpec
from greenroom.runtime.errors import StorageError
from greenroom.runtime.ids import child_id, root_of
from greenroom.runtime.journal import Batch, later_call
from greenroom.runtime.messages import Compaction, Message, ShortText, Usage, Value
from greenroom.runtime.state import AgentState, Ready, State
from greenroom.runtime.storage.documents import Migration, decode_document

SCHEMA_VERSION = 5

MAX_UNSAVED = 32
"""Calls without a snapshot that a head keeps, the latest; a snapshot is due after far fewer."""

MAX_JOBS = 64
"""Background jobs that a head names, the latest."""


class SegmentRef(Value):
    """Where a run of messages lies: object name, number of messages, bytes, and their hash (128 bits of sha256).

    Its JSON is one short text, `name:count:size:hash`: a head carries up to 64 of them in every write.
    """

    name: str
    count: int
    size: int
    hash: str

    @model_validator(mode="before")
    @classmethod
    def _from_text(cls, value: Any) -> Any:
        if not isinstance(value, str):
            return value
        name, count, size, digest = value.split(":")
        return {"name": name, "count": int(count), "size": int(size), "hash": digest}

    @model_serializer(mode="plain")
    def _to_text(self) -> str:
        return f"{self.name}:{self.count}:{self.size}:{self.hash}"


def short_hash(body: bytes) -> str:
    return hashlib.sha256(body).hexdigest()[:32]


@dataclass(frozen=True, slots=True)
class Segment:
    """Messages to be stored as one immutable object; `name` is `{epoch}-{write_no}-{write_id}` of their head write."""

    name: str
    messages: tuple[Message, ...]

    def encode(self) -> bytes:
        """JSON lines, one message each."""
        return b"".join(message.encoded + b"\n" for message in self.messages)


class SandboxRef(Value):
    """The tree's sandbox, the same for all its sessions; `incarnation`: what this session last used, None before.

    cwd: where this session's next command begins, None for the workspace.
    """

    spec: SandboxSpec
    incarnation: str | None = None
    cwd: str | None = None


class CancelMark(Value):
    """The run is being cancelled; durable before anything else is done about it."""

    reason: ShortText
    at: float


class Claim(Value):
    """The request that the current run, or the last one, answers; `given`: by its caller, who may ask again."""

    request_id: str
    verb: str
    digest: str
    given: bool = False


class Receipt(Value):
    """A request that was answered: asked again with the same content, it gets the same result, from a blob."""

    request_id: str
    digest: str
    blob: str


class Head(Value):
    """See the module docstring.

    created_by: the request that made the session, if its caller named it; since: Unix seconds of the last change of
    owner or stop; epoch_write_no: the write that began this epoch;
    host_fence: an embedding host's own number; usage_before: what the session had used when this run began; index:
    where the references of earlier segments lie; batch_blob, text_blob: where the batch and the final text lie when
    they are large; spawned: the calls that started a child, without the session id that begins their keys: a child's id
    follows; jobs: background jobs that ran when they were last looked at; unsaved: calls that changed the workspace
    since its last snapshot, as far as there are snapshots; notice: what the model is told beside the next results;
    budget: tokens that the whole tree may use; compaction: how the history is shown to a model that would not take all
    of it.
    """

    schema_version: int = Field(default=SCHEMA_VERSION, ge=SCHEMA_VERSION, le=SCHEMA_VERSION)
    session_id: str
    root: str
    parent: str | None = None
    parent_call: str | None = None
    depth: int = 0
    user_id: str | None = None
    created_by: str | None = None
    agent: str
    epoch: int = 0
    owner: str | None = None
    since: float = 0.0
    epoch_write_no: int = 0
    write_no: int = 0
    write_id: str = ""
    revision: int = 0
    host_fence: int = 0
    life: Literal["live", "tombstone"] = "live"
    claim: Claim | None = None
    cancel: CancelMark | None = None
    sandbox: SandboxRef | None = None
    state: State
    batch: Batch | None = None
    batch_blob: str | None = None
    text_blob: str | None = None
    spawned: tuple[str, ...] = ()
    jobs: tuple[str, ...] = ()
    unsaved: tuple[str, ...] = ()
    notice: str = ""
    compaction: Compaction | None = None
    index: SegmentRef | None = None
    segments: tuple[SegmentRef, ...] = ()
    inline: tuple[Message, ...] = ()
    receipts: tuple[Receipt, ...] = ()
    usage_before: Usage = Usage()
    budget: int | None = None

    @property
    def children(self) -> dict[str, str]:
        """Call key to session id of every sub-agent this session has started, in order."""
        keys = (f"{self.session_id}/{call}" for call in self.spawned)
        return {key: child_id(self.root, key) for key in keys}

    def with_child(self, call_key: str) -> Head:
        """The head with the child of this call registered."""
        call = call_key.removeprefix(f"{self.session_id}/")
        return self if call in self.spawned else self.but(spawned=(*self.spawned, call))

    def with_jobs(self, seen: Mapping[str, bool]) -> Head:
        """The head after a look at these jobs: whether each still runs."""
        kept = tuple(id for id in self.jobs if seen.get(id, True))
        fresh = tuple(id for id, runs in seen.items() if runs and id not in kept)
        return self.but(jobs=(*kept, *fresh)[-MAX_JOBS:])

    def with_unsaved(self, key: str, tool: str) -> Head:
        """The head after an operation that may have changed the workspace, which is saved now and then."""
        entry = f"{key.removeprefix(f'{self.session_id}/')} {tool}"
        return self.but(unsaved=(*self.unsaved, entry)[-MAX_UNSAVED:])

    def uncovered(self, through: str | None) -> tuple[str, ...]:
        """Those of `unsaved` that came after this operation, the last that a snapshot covers; None: no snapshot."""
        if through is None:
            return self.unsaved
        keys = {entry: f"{self.session_id}/{entry.partition(' ')[0]}" for entry in self.unsaved}
        return tuple(entry for entry, key in keys.items() if key != through and later_call(through, key) == key)

    def in_folder(self, cwd: str | None) -> Head:
        """The head after commands that ended in this folder."""
        if self.sandbox is None or self.sandbox.cwd == cwd:
            return self
        return self.but(sandbox=self.sandbox.but(cwd=cwd))

    def encode(self) -> bytes:
        """Its JSON; the messages in it are encoded once, not with every save."""
        rest = self.__pydantic_serializer__.to_json(self, exclude={"inline"})
        return rest[:-1] + b',"inline":[' + b",".join(message.encoded for message in self.inline) + b"]}"


def decode_head(body: bytes, key: str) -> Head:
    """The head in `body`, brought up to this schema; raises NewerSchema or StorageError(serde), both naming the key."""
    return decode_document(Head, "head", SCHEMA_VERSION, body, key, MIGRATIONS)


def decode_segment(body: bytes, ref: SegmentRef, key: str) -> tuple[Message, ...]:
    """The messages in `body`, which must be exactly what `ref` says; raises StorageError(serde)."""
    if short_hash(body) != ref.hash:
        raise StorageError(
            f"{key} does not have the content its session recorded",
            kind="serde",
            key=key,
            hint="The object was damaged or replaced; restore it from a backup",
        )
    return tuple(Message.model_validate_json(line) for line in body.split(b"\n") if line)


def ref_of(segment: Segment, body: bytes) -> SegmentRef:
    return SegmentRef(name=segment.name, count=len(segment.messages), size=len(body), hash=short_hash(body))


def _to_2(document: dict[str, Any]) -> dict[str, Any]:
    """Version 2 added index, batch_blob and receipts, all empty at first, and wrote references as texts."""
    refs = [f"{r['name']}:{r['count']}:{r['size']}:{r['sha256'][:32]}" for r in document["segments"]]
    return document | {"segments": refs, "index": None, "batch_blob": None, "receipts": []}


def _to_3(document: dict[str, Any]) -> dict[str, Any]:
    """Version 3 keeps of a child the call that started it: its id follows from that."""
    prefix = f"{document['session_id']}/"
    spawned = [key.removeprefix(prefix) for key in document["children"]]
    return {**{key: value for key, value in document.items() if key != "children"}, "spawned": spawned}


def _to_4(document: dict[str, Any]) -> dict[str, Any]:
    """Version 4 knows more bounds of a sandbox, with their defaults for one made before, and background jobs."""
    return document


def _to_5(document: dict[str, Any]) -> dict[str, Any]:
    """Version 5 knows the folder that a session's commands have gone to, and what no snapshot holds yet."""
    return document


MIGRATIONS: dict[int, Migration] = {1: _to_2, 2: _to_3, 3: _to_4, 4: _to_5}
"""From a version to the one after it."""


def tombstone_of(sid: str, head: Head | None) -> Head:
    """What stays of a deleted session: what it takes to delete the rest of it, and a higher epoch.

    Also of one that never had a head.
    """
    if head is None:
        head = Head(session_id=sid, root=root_of(sid), agent="", state=Ready(agent=AgentState(session_id=sid)))
    return Head(
        session_id=sid,
        root=head.root,
        parent=head.parent,
        agent=head.agent,
        epoch=head.epoch + 1,
        since=time.time(),
        write_no=head.write_no + 1,
        write_id=uuid.uuid4().hex,
        revision=head.revision,
        host_fence=head.host_fence,
        life="tombstone",
        sandbox=head.sandbox,
        spawned=head.spawned,
        state=Ready(agent=AgentState(session_id=sid)),
    )
