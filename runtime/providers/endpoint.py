"""Endpoint: the HTTP side of a model, whatever its dialect: connections, time limits, throttling, failures.

Closing the stream closes the connection, which is what stops the model on the other side.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import AsyncIterable, AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from greenroom.runtime.calls import CallBounds, ModelRequest
from greenroom.runtime.cancel import CancelToken
from greenroom.runtime.errors import ConfigError, PreflightError, ProviderError
from greenroom.runtime.messages import Delta, clean
from greenroom.runtime.ports import SharedTurns
from greenroom.runtime.providers.failures import broken_stream, error_of_response
from greenroom.runtime.providers.throttle import Throttle
from greenroom.runtime.results import FailureKind
from greenroom.runtime.retry import parse_retry_after

if TYPE_CHECKING:
    import httpx

CONNECT_TIMEOUT = 10.0
IDLE_TIMEOUT = 120.0
"""Seconds without a byte from the server before the stream counts as broken."""

DRAIN_TIMEOUT = 0.25
"""Seconds that the rest of a body may take after the reply has ended."""

TOTAL_TIMEOUT = 1800.0
"""Seconds that one reply may take from its request to its end."""


@dataclass(slots=True)
class _Line:
    """What one event loop holds for an endpoint."""

    client: httpx.AsyncClient
    throttle: Throttle
    streams: int = 0


class Endpoint(ABC):
    """Base of the providers that speak HTTP.

    base_url: checked here; api_key_env: the variable that holds the key, read at each call; only its name is ever
    stored. max_concurrent: calls at once; requests_per_minute: starts of calls; of this process, on Ray of the whole
    pool. total_timeout: seconds for one reply, 0 for no limit; needs_key: a run without a key is refused before it
    begins.
    """

    def __init__(
        self,
        model: str,
        base_url: str,
        api_key_env: str,
        *,
        max_concurrent: int | None = None,
        requests_per_minute: float | None = None,
        total_timeout: float = TOTAL_TIMEOUT,
        needs_key: bool = False,
    ) -> None:
        if not model:
            raise ConfigError("the model's name is empty", hint="Give the name the endpoint knows")
        if not base_url.startswith(("http://", "https://")):
            raise ConfigError(f"base_url {base_url!r} is no http address", hint="It begins with http:// or https://")
        if max_concurrent is not None and max_concurrent < 1:
            raise ConfigError(f"max_concurrent is {max_concurrent}", hint="Give at least 1, or None for no bound")
        if requests_per_minute is not None and requests_per_minute <= 0:
            raise ConfigError(f"requests_per_minute is {requests_per_minute}", hint="Give more than 0, or None")
        if total_timeout < 0:
            raise ConfigError(f"total_timeout is {total_timeout}", hint="Give seconds, 0 for no limit")
        self.model = model
        self.base_url = base_url.rstrip("/")
        self.api_key_env = api_key_env
        self.max_concurrent = max_concurrent
        self.requests_per_minute = requests_per_minute
        self.total_timeout = total_timeout
        self.needs_key = needs_key
        self._shared: SharedTurns | None = None
        self._lines: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, _Line] = weakref.WeakKeyDictionary()

    # -- what a dialect adds

    @abstractmethod
    def url(self) -> str: ...

    @abstractmethod
    def body(self, request: ModelRequest) -> str: ...

    @abstractmethod
    def headers(self, key: str | None) -> dict[str, str]: ...

    @abstractmethod
    def decode(self, chunks: AsyncIterable[bytes]) -> AsyncIterator[Delta]: ...

    @abstractmethod
    def settings(self) -> dict[str, Any]:
        """The arguments that make this endpoint again, in JSON; no secret is among them."""

    # -- the provider

    def preflight(self) -> None:
        if self.needs_key and self.key() is None:
            raise PreflightError(
                f"the model {self.model!r} needs a key and {self.api_key_env} is not set",
                hint=f"Set {self.api_key_env} (or LLM_API_KEY), or give the base_url of an endpoint of your own",
            )

    async def stream(self, request: ModelRequest, cancel: CancelToken) -> AsyncIterator[Delta]:
        import httpx

        emitted = False
        line = self._line()
        line.streams += 1
        content = clean(self.body(request)).encode()
        headers = {"content-type": "application/json", **self.headers(self.key())}
        try:
            async with (
                self._turn(line),
                line.client.stream("POST", self.url(), content=content, headers=headers) as response,
            ):
                if response.status_code >= 400:
                    raise await self._refused(response, line)
                chunks = self._within(response.aiter_bytes())
                async for delta in self.decode(chunks):
                    emitted = True
                    yield delta
                await _drain(chunks)
        except httpx.HTTPError as error:
            raise self._transport_error(error, emitted=emitted) from error
        finally:
            line.streams -= 1

    async def close(self) -> None:
        """Closes this loop's idle connections; running streams keep theirs."""
        loop = asyncio.get_running_loop()
        line = self._lines.get(loop)
        if line is not None and not line.streams:
            del self._lines[loop]
            await line.client.aclose()

    def key(self) -> str | None:
        """The key, from where it is kept; None when there is none."""
        return os.environ.get(self.api_key_env) or os.environ.get("LLM_API_KEY") or None

    def __reduce__(self) -> tuple[Any, ...]:
        return _remade, (type(self), self.settings())

    def _common_settings(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "base_url": self.base_url,
            "api_key_env": self.api_key_env,
            "max_concurrent": self.max_concurrent,
            "requests_per_minute": self.requests_per_minute,
            "total_timeout": self.total_timeout,
            "needs_key": self.needs_key,
        }

    def share(self, turns: SharedTurns) -> None:
        """From now on the bounds hold for all processes that share these turns."""
        if self.max_concurrent is not None or self.requests_per_minute is not None:
            self._shared = turns

    @property
    def _bounds(self) -> CallBounds:
        return CallBounds(f"{self.base_url} {self.api_key_env}", self.max_concurrent, self.requests_per_minute)

    @asynccontextmanager
    async def _turn(self, line: _Line) -> AsyncIterator[None]:
        async with line.throttle.place():
            if self._shared is None:
                yield
            else:
                async with self._shared.place(self._bounds):
                    yield

    def _line(self) -> _Line:
        import httpx

        loop = asyncio.get_running_loop()
        line = self._lines.get(loop)
        if line is None:
            timeout = httpx.Timeout(IDLE_TIMEOUT, connect=CONNECT_TIMEOUT)
            limits = httpx.Limits(max_connections=None, max_keepalive_connections=32)
            client = httpx.AsyncClient(timeout=timeout, limits=limits)
            line = self._lines[loop] = _Line(client, Throttle(self.max_concurrent, self.requests_per_minute))
        return line

    async def _within(self, chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        """The body, as long as it may take."""
        deadline = asyncio.get_running_loop().time() + self.total_timeout if self.total_timeout else None
        while True:
            try:
                async with asyncio.timeout_at(deadline):
                    chunk = await anext(chunks)
            except StopAsyncIteration:
                return
            except TimeoutError:
                raise broken_stream(f"the reply took longer than {self.total_timeout:g} s", emitted=False) from None
            yield chunk

    async def _refused(self, response: httpx.Response, line: _Line) -> ProviderError:
        wait = parse_retry_after(response.headers.get("retry-after"), time.time())
        error = error_of_response(await response.aread(), response.status_code, wait)
        if wait is not None and error.retryable:
            line.throttle.hold(wait)
            if self._shared is not None:
                self._shared.hold(self._bounds, wait)
        return error

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


async def _drain(chunks: AsyncIterator[bytes]) -> None:
    """Reads what comes after a reply's end, so that its connection can be used again; not for long."""
    with contextlib.suppress(TimeoutError, ProviderError):
        async with asyncio.timeout(DRAIN_TIMEOUT):
            async for _ in chunks:
                pass


def _remade(kind: type[Endpoint], settings: dict[str, Any]) -> Endpoint:
    return kind(**settings)
