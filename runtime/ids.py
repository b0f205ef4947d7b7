"""Ids: how a session's, a child's and a root's id hang together. Pure."""

from __future__ import annotations

import hashlib
from urllib.parse import quote

from greenroom.runtime.errors import ConfigError

SANDBOX = "sandbox"
"""The path element of a tree's sandbox, beside those of its sessions; no session's id is encoded so."""

MAX_REQUEST_ID = 128
"""Characters of a caller's request id."""

MAX_ID = 200
"""Characters of a host-chosen session id."""


def check_root_id(session_id: str) -> str:
    """A host-chosen id as it is; raises ConfigError for one that cannot be a root's."""
    if not session_id or len(session_id) > MAX_ID:
        raise ConfigError(f"a session id has 1 to {MAX_ID} characters, this one {len(session_id)}")
    if "~" in session_id:
        raise ConfigError(f"the session id {session_id!r} holds a ~", hint="Only ids of sub-agents do; choose another")
    if not session_id.isprintable():
        raise ConfigError(f"the session id {session_id!r} holds unprintable characters")
    return session_id


def check_request_id(request_id: str) -> str:
    """A caller's request id as it is; raises ConfigError for one that no receipt can carry."""
    if not 0 < len(request_id) <= MAX_REQUEST_ID or not request_id.isprintable() or not request_id.isascii():
        raise ConfigError(
            f"the request id {request_id[:MAX_REQUEST_ID]!r} cannot be used",
            hint=f"Use 1 to {MAX_REQUEST_ID} printable ASCII characters; a UUID does",
        )
    return request_id


def root_of(session_id: str) -> str:
    """A child's id is `{root}~{hash}`: the root follows from any id."""
    return session_id.partition("~")[0]


def child_id(root: str, call_key: str) -> str:
    """The id of the child that this call starts: the same however often the call is repeated."""
    return f"{root}~{hashlib.sha256(call_key.encode()).hexdigest()[:20]}"


def encode_id(session_id: str) -> str:
    """A session id as one path element; host-chosen ids may hold anything."""
    quoted = quote(session_id, safe="~")
    if quoted in (".", "..", SANDBOX):  # mean something in a path, or in a tree
        return f"%{ord(quoted[0]):02X}{quoted[1:].replace('.', '%2E')}"
    return quoted
