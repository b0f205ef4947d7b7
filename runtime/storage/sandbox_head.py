"""The sandbox head of a session tree: which snapshot its workspace goes back to, what that covers, its jobs.

It lies at tree/{root}/sandbox/head beside the sessions of the tree, is changed by compare-and-swap alone, and goes with
the root: a sandbox that wakes up after the deletion finds a tombstone.
"""

from __future__ import annotations

import uuid
from typing import Literal

from pydantic import Field

from greenroom.runtime.messages import Value
from greenroom.runtime.storage.documents import decode_document

SANDBOX_SCHEMA = 1


class SandboxHead(Value):
    """epoch: +1 with each sandbox that takes the tree over; owner: its incarnation; write_id: of the last write.

    snapshot: name of the last complete one, None before; watermark: session id to the last call key it covers; jobs:
    background job id to its state.
    """

    schema_version: int = Field(default=SANDBOX_SCHEMA, ge=1, le=SANDBOX_SCHEMA)
    root: str
    epoch: int = 0
    owner: str | None = None
    write_id: str
    life: Literal["live", "tombstone"] = "live"
    snapshot: str | None = None
    watermark: dict[str, str] = Field(default_factory=dict)
    jobs: dict[str, str] = Field(default_factory=dict)

    def encode(self) -> bytes:
        return self.__pydantic_serializer__.to_json(self)


def decode_sandbox_head(body: bytes, key: str) -> SandboxHead:
    """Raises NewerSchema or StorageError(serde), both naming the key."""
    return decode_document(SandboxHead, "sandbox head", SANDBOX_SCHEMA, body, key)


def sandbox_tombstone(root: str, head: SandboxHead | None) -> SandboxHead:
    """What stays of a deleted tree's sandbox: a higher epoch, and nothing to go back to."""
    epoch = 1 if head is None else head.epoch + 1
    return SandboxHead(root=root, epoch=epoch, write_id=uuid.uuid4().hex, life="tombstone")
