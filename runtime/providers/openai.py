"""OpenAICompatible: chat completions over HTTP, for OpenAI and every endpoint that speaks its dialect.

The dialect itself is openai_codec.py; here are the request, its time limits and its failures. Closing the stream
closes the connection, which is what stops the model on the other side.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
import weakref
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

from greenroom.runtime.calls import ModelRequest
from greenroom.runtime.cancel import CancelToken
from greenroom.runtime.errors import ConfigError, PreflightError, ProviderError
from greenroom.runtime.messages import Delta
from greenroom.runtime.providers.failures import broken_stream, error_of_response
from greenroom.runtime.providers.openai_codec import decode_openai, encode_openai
from greenroom.runtime.results import FailureKind
from greenroom.runtime.retry import parse_retry_after

if TYPE_CHECKING:
    import httpx

DEFAULT_BASE_URL = "https://api.openai.com/v1"
CONNECT_TIMEOUT = 10.0
IDLE_TIMEOUT = 120.0
"""Seconds without a byte from the server before the stream counts as broken."""


class OpenAICompatible:
    """An endpoint and a model of it.

    base_url: up to and including the version, as in http://127.0.0.1:8080/v1; None takes OPENAI_BASE_URL, LLM_BASE_URL
    or OpenAI itself, now. api_key_env: the variable that holds the key, read at each call, with LLM_API_KEY as its
    stand-in; only its name is ever stored. With a base_url and no key no Authorization is sent.
    """

    def __init__(self, model: str, base_url: str | None = None, api_key_env: str = "OPENAI_API_KEY") -> None:
        if not model:
            raise ConfigError("the model's name is empty", hint="Give the name the endpoint knows")
        self.model = model
        named = base_url or os.environ.get("OPENAI_BASE_URL") or os.environ.get("LLM_BASE_URL")
        self.base_url = (named or DEFAULT_BASE_URL).rstrip("/")
        if not self.base_url.startswith(("http://", "https://")):
            raise ConfigError(
                f"base_url {self.base_url!r} is no http address", hint="It begins with http:// or https://"
            )
        self.api_key_env = api_key_env
        self._clients: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, httpx.AsyncClient] = (
            weakref.WeakKeyDictionary()
        )
        self._streams = 0

    def preflight(self) -> None:
        if self.base_url == DEFAULT_BASE_URL and self._key() is None:
            raise PreflightError(
                f"the model {self.model!r} needs a key and {self.api_key_env} is not set",
                hint=f"Set {self.api_key_env} (or LLM_API_KEY), or OPENAI_BASE_URL for an endpoint of your own",
            )

    async def stream(self, request: ModelRequest, cancel: CancelToken) -> AsyncIterator[Delta]:
        import httpx

        emitted = False
        self._streams += 1
        try:
            async with self._client().stream(
                "POST", f"{self.base_url}/chat/completions", content=self._body(request), headers=self._headers()
            ) as response:
                if response.status_code >= 400:
                    body = await response.aread()
                    wait = parse_retry_after(response.headers.get("retry-after"), time.time())
                    raise error_of_response(body, response.status_code, wait)
                async for delta in decode_openai(response.aiter_bytes()):
                    emitted = True
                    yield delta
        except httpx.HTTPError as error:
            raise self._transport_error(error, emitted=emitted) from error
        finally:
            self._streams -= 1

    async def close(self) -> None:
        """Closes this loop's idle connections; running streams keep theirs."""
        if self._streams:
            return
        client = self._clients.pop(asyncio.get_running_loop(), None)
        if client is not None:
            await client.aclose()

    def __reduce__(self) -> tuple[type[OpenAICompatible], tuple[str, str, str]]:
        return OpenAICompatible, (self.model, self.base_url, self.api_key_env)

    def _client(self) -> httpx.AsyncClient:
        import httpx

        loop = asyncio.get_running_loop()
        client = self._clients.get(loop)
        if client is None:
            timeout = httpx.Timeout(IDLE_TIMEOUT, connect=CONNECT_TIMEOUT)
            limits = httpx.Limits(max_connections=None, max_keepalive_connections=32)
            client = self._clients[loop] = httpx.AsyncClient(timeout=timeout, limits=limits)
        return client

    def _body(self, request: ModelRequest) -> bytes:
        body = {
            "model": self.model,
            **encode_openai(request),
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        return json.dumps(body, ensure_ascii=False).encode()

    def _headers(self) -> dict[str, str]:
        key = self._key()
        return {"content-type": "application/json", **({"authorization": f"Bearer {key}"} if key else {})}

    def _key(self) -> str | None:
        return os.environ.get(self.api_key_env) or os.environ.get("LLM_API_KEY") or None

    def _transport_error(self, error: httpx.HTTPError, *, emitted: bool) -> ProviderError:
        import httpx

        what = str(error) or type(error).__name__
        if isinstance(error, httpx.ConnectError | httpx.ConnectTimeout):
            refused = "CERTIFICATE_VERIFY_FAILED" in what
            return ProviderError(
                f"the model at {self.base_url} cannot be reached: {what}",
                kind=FailureKind.provider_permanent if refused else FailureKind.provider,
                retryable=not refused,
                hint="See that the address is right and the server runs",
            )
        return broken_stream(f"the connection to {self.base_url} broke: {what}", emitted=emitted)
