"""Limits of a run, with their defaults. Values only."""

from __future__ import annotations

from pydantic import Field

from greenroom.runtime.messages import Value

MAX_CHILDREN = 1024
"""A session's head names all its children, and a head is bounded."""


class Limits(Value):
    """Bounds of one session's runs; times in seconds, 0 switches a time limit off.

    max_iter: model replies a run may take, kept over resume and answer; the batch of the last one still runs.
    max_consecutive_fail: steps in a row without any success. retry_backoff: base of the exponential back-off between
    model attempts. tool_timeout: of one call. max_depth: levels of sub-agents below the root. max_children:
    sub-agents one session may start, at most MAX_CHILDREN. max_seconds: of one run (it is then cancelled), None for no
    bound; a sub-agent has no more than what is left to its parent. max_tokens_total: of input and output, None for no
    budget; a root's bounds its whole tree, a sub-agent's that session besides; a call that has begun may go beyond it.
    """

    max_iter: int = Field(default=10, ge=1)
    max_consecutive_fail: int = Field(default=3, ge=1)
    retry_backoff: float = Field(default=0.2, ge=0)
    tool_timeout: float = Field(default=120.0, ge=0)
    max_depth: int = Field(default=4, ge=0)
    max_children: int = Field(default=64, ge=0, le=MAX_CHILDREN)
    max_seconds: float | None = Field(default=None, ge=0)
    max_tokens_total: int | None = Field(default=None, ge=1)
