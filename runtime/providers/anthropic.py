"""Anthropic: the Messages API, at Anthropic and at every endpoint that speaks its dialect (anthropic_codec.py)."""

from __future__ import annotations

import os
from collections.abc import AsyncIterable, AsyncIterator
from typing import Any

from greenroom.runtime.calls import ModelRequest
from greenroom.runtime.messages import Delta
from greenroom.runtime.providers.anthropic_codec import DEFAULT_MAX_TOKENS, anthropic_text, decode_anthropic
from greenroom.runtime.providers.endpoint import TOTAL_TIMEOUT, Endpoint

DEFAULT_BASE_URL = "https://api.anthropic.com"
API_VERSION = "2023-06-01"


class Anthropic(Endpoint):
    """An endpoint and a model of it.

    base_url: without /v1; None takes ANTHROPIC_BASE_URL or Anthropic itself, now. With a base_url and no key none is
    sent. thinking_tokens: budget for extended thinking, None for none.
    """

    def __init__(
        self,
        model: str,
        base_url: str | None = None,
        api_key_env: str = "ANTHROPIC_API_KEY",
        *,
        thinking_tokens: int | None = None,
        max_concurrent: int | None = None,
        requests_per_minute: float | None = None,
        total_timeout: float = TOTAL_TIMEOUT,
        needs_key: bool = False,
    ) -> None:
        named = base_url or os.environ.get("ANTHROPIC_BASE_URL")
        super().__init__(
            model,
            (named or DEFAULT_BASE_URL).rstrip("/").removesuffix("/v1"),
            api_key_env,
            max_concurrent=max_concurrent,
            requests_per_minute=requests_per_minute,
            total_timeout=total_timeout,
            needs_key=needs_key or not named or named.rstrip("/") == DEFAULT_BASE_URL,
        )
        self.thinking_tokens = thinking_tokens

    def url(self) -> str:
        return f"{self.base_url}/v1/messages"

    def body(self, request: ModelRequest) -> str:
        more: dict[str, Any] = {"model": self.model, "stream": True}
        if self.thinking_tokens:
            more["thinking"] = {"type": "enabled", "budget_tokens": self.thinking_tokens}
            asked = DEFAULT_MAX_TOKENS if request.max_tokens is None else request.max_tokens
            more["max_tokens"] = max(asked, self.thinking_tokens + 1)
        return anthropic_text(request, **more)

    def headers(self, key: str | None) -> dict[str, str]:
        return {"anthropic-version": API_VERSION, **({"x-api-key": key} if key else {})}

    def decode(self, chunks: AsyncIterable[bytes]) -> AsyncIterator[Delta]:
        return decode_anthropic(chunks)

    def settings(self) -> dict[str, Any]:
        return self._common_settings() | {"thinking_tokens": self.thinking_tokens}
