"""OpenAICompatible: chat completions, for OpenAI and every endpoint that speaks its dialect (openai_codec.py)."""

from __future__ import annotations

import os
from collections.abc import AsyncIterable, AsyncIterator
from typing import Any

from greenroom.runtime.calls import ModelRequest
from greenroom.runtime.messages import Delta
from greenroom.runtime.providers.endpoint import TOTAL_TIMEOUT, Endpoint
from greenroom.runtime.providers.openai_codec import decode_openai, openai_text

DEFAULT_BASE_URL = "https://api.openai.com/v1"


class OpenAICompatible(Endpoint):
    """An endpoint and a model of it.

    base_url: up to and including the version, as in http://127.0.0.1:8080/v1; None takes OPENAI_BASE_URL, LLM_BASE_URL
    or OpenAI itself, now. With a base_url and no key no Authorization is sent. reasoning: whether `reasoning_content`
    goes back with the turns it came with; strict: whether tools are sent with strict schemas; usage: whether the
    endpoint is asked for usage in the stream; key_header: where the key goes, as it is, instead of a bearer token.
    """

    def __init__(
        self,
        model: str,
        base_url: str | None = None,
        api_key_env: str = "OPENAI_API_KEY",
        *,
        reasoning: bool = True,
        strict: bool = False,
        usage: bool = True,
        key_header: str | None = None,
        max_concurrent: int | None = None,
        requests_per_minute: float | None = None,
        total_timeout: float = TOTAL_TIMEOUT,
        needs_key: bool = False,
    ) -> None:
        named = base_url or os.environ.get("OPENAI_BASE_URL") or os.environ.get("LLM_BASE_URL")
        super().__init__(
            model,
            named or DEFAULT_BASE_URL,
            api_key_env,
            max_concurrent=max_concurrent,
            requests_per_minute=requests_per_minute,
            total_timeout=total_timeout,
            needs_key=needs_key or not named or named.rstrip("/") == DEFAULT_BASE_URL,
        )
        self.reasoning = reasoning
        self.strict = strict
        self.usage = usage
        self.key_header = key_header

    def url(self) -> str:
        return f"{self.base_url}/chat/completions"

    def body(self, request: ModelRequest) -> str:
        more: dict[str, Any] = {"stream_options": {"include_usage": True}} if self.usage else {}
        return openai_text(request, reasoning=self.reasoning, strict=self.strict, model=self.model, stream=True, **more)

    def headers(self, key: str | None) -> dict[str, str]:
        if not key:
            return {}
        return {self.key_header: key} if self.key_header else {"authorization": f"Bearer {key}"}

    def decode(self, chunks: AsyncIterable[bytes]) -> AsyncIterator[Delta]:
        return decode_openai(chunks)

    def settings(self) -> dict[str, Any]:
        own = {"reasoning": self.reasoning, "strict": self.strict, "usage": self.usage, "key_header": self.key_header}
        return self._common_settings() | own
