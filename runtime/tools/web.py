"""A web client that a model may drive: it reaches public addresses and nothing else, whatever it is led to.

Every hop is judged before it is contacted: the URL as it is written, each address that its name resolves to, and the
connection then goes to the very address that was judged, with the name kept for Host and for TLS. Nothing is taken from
the environment (proxies, netrc), no connection is used twice, no cookie is kept, and what a body unpacks to is bounded.
"""

from __future__ import annotations

import asyncio
import socket
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urljoin

import httpx

from greenroom.runtime.tools.addresses import Target, UrlRefused, judge_all, read_url

MAX_HOPS = 5
"""Redirects that are followed."""

MAX_BODY = 1024 * 1024
"""Bytes of an answer, unpacked, that are kept."""

TIMEOUT = 30.0
"""Seconds for all of it, redirects and body included."""

CONNECT_TIMEOUT = 10.0

HARMLESS = frozenset({"accept", "accept-language", "user-agent", "content-type", "range", "if-none-match"})
"""Headers that go along to another origin; any other may be a secret of the first."""

OURS = frozenset(
    {
        *("host", "content-length", "transfer-encoding", "connection", "te", "trailer", "upgrade", "expect"),
        "accept-encoding",
    }
)
"""Headers that no caller sets."""

_SAME_METHOD = (307, 308)

Resolver = Callable[[str, int], Awaitable[list[str]]]
Dial = Callable[[str, int], tuple[str, int]]


@dataclass(frozen=True, slots=True)
class Answer:
    """`url`: of the last hop; body: at most MAX_BODY bytes, unpacked; cut: whether there was more."""

    url: str
    status: int
    headers: Mapping[str, str]
    body: bytes
    cut: bool

    @property
    def text(self) -> str:
        """The body in the charset that its header names, UTF-8 otherwise; what is invalid becomes U+FFFD."""
        _, _, charset = self.headers.get("content-type", "").partition("charset=")
        try:
            return self.body.decode(charset.split(";")[0].strip("\"' ") or "utf-8", "replace")
        except LookupError:
            return self.body.decode("utf-8", "replace")


async def resolve(host: str, port: int) -> list[str]:
    """Every address of a name, from the system's resolver."""
    loop = asyncio.get_running_loop()
    try:
        found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise UrlRefused(f"{host!r} cannot be resolved: {error.strerror}") from None
    return list(dict.fromkeys(str(answer[4][0]) for answer in found))


class WebClient:
    """resolver: gives the addresses of a name, asked once per hop; dial: where a connection to an address goes, for
    tests; max_body, timeout: as MAX_BODY and TIMEOUT.
    """

    def __init__(
        self,
        *,
        resolver: Resolver = resolve,
        dial: Dial = lambda address, port: (address, port),
        max_body: int = MAX_BODY,
        timeout: float = TIMEOUT,
        verify: Any = True,
    ) -> None:
        self._resolver = resolver
        self._dial = dial
        self._max_body = max_body
        self._timeout = timeout
        self._verify = verify

    async def request(
        self, method: str, url: str, headers: Mapping[str, str] | None = None, body: bytes = b""
    ) -> Answer:
        """Raises UrlRefused for where it may not go, TimeoutError, and httpx.HTTPError for what the network does."""
        given = _checked_headers(headers or {})
        target = read_url(url)
        try:
            async with asyncio.timeout(self._timeout):
                for _ in range(MAX_HOPS + 1):
                    answer, location = await self._hop(method, target, given, body)
                    if location is None:
                        return answer
                    following = _next(target, location)
                    method, body = _redirected(answer.status, method, body)
                    if following.origin != target.origin:
                        if body:
                            raise UrlRefused(f"{target} sends the request's body on to {following.netloc}")
                        given = {name: value for name, value in given.items() if name in HARMLESS}
                    target = following
        except TimeoutError:
            raise TimeoutError(f"{target.netloc} did not answer within {self._timeout:g} s") from None
        raise UrlRefused(f"more than {MAX_HOPS} redirects, the last to {target}")

    async def _hop(
        self, method: str, target: Target, headers: Mapping[str, str], body: bytes
    ) -> tuple[Answer, str | None]:
        """One request to one server; the answer, and where it redirects to."""
        address = target.address
        if address is None:
            addresses = judge_all(target.host, await self._resolver(target.host, target.port))
        else:
            addresses = [str(address)]
        place, port = self._dial(addresses[0], target.port)
        url = httpx.URL(scheme=target.scheme, host=place, port=port, raw_path=target.path.encode())
        seconds = {"connect": CONNECT_TIMEOUT, "read": self._timeout, "write": self._timeout, "pool": self._timeout}
        request = httpx.Request(
            method,
            url,
            headers={**headers, "host": target.netloc, "accept-encoding": "gzip, deflate"},
            content=body,
            extensions={"sni_hostname": target.host, "timeout": seconds},
        )
        async with httpx.AsyncHTTPTransport(verify=self._verify, trust_env=False) as transport:
            response = await transport.handle_async_request(request)
            response.request = request
            try:
                location = response.headers.get("location") if 300 <= response.status_code < 400 else None
                content, cut = (b"", False) if location is not None else await self._body(response)
            finally:
                await response.aclose()
        return Answer(str(target), response.status_code, dict(response.headers), content, cut), location

    async def _body(self, response: httpx.Response) -> tuple[bytes, bool]:
        """The body unpacked, as far as it goes; unpacking stops where the bound is."""
        found = bytearray()
        async for piece in _unpacked(response, self._max_body):
            found += piece
            if len(found) > self._max_body:
                return bytes(found[: self._max_body]), True
        return bytes(found), False


async def _unpacked(response: httpx.Response, at_once: int) -> AsyncIterator[bytes]:
    """Pieces of the body of at most `at_once` + 1 bytes; raises UrlRefused for a packing that was not asked for."""
    packing = response.headers.get("content-encoding", "identity").strip().lower()
    if packing in ("identity", ""):
        async for piece in response.aiter_raw():
            yield piece
        return
    if packing not in ("gzip", "x-gzip", "deflate"):
        raise UrlRefused(f"the answer is packed as {packing!r}, which was not asked for")
    unpack = zlib.decompressobj(wbits=zlib.MAX_WBITS | 32)
    try:
        async for piece in response.aiter_raw():
            while piece and not unpack.eof:
                yield unpack.decompress(piece, at_once + 1)
                piece = unpack.unconsumed_tail
    except zlib.error as error:
        raise UrlRefused(f"the answer cannot be unpacked: {error}") from None


def _checked_headers(headers: Mapping[str, str]) -> dict[str, str]:
    """Headers by their names in lower case; raises UrlRefused for one that a caller may not set."""
    found: dict[str, str] = {}
    for name, value in headers.items():
        low = name.strip().lower()
        if low in OURS or low.startswith("proxy-"):
            raise UrlRefused(f"the header {name!r} cannot be set", hint="Leave it out")
        if not low.isascii() or not low.replace("-", "").replace("_", "").isalnum() or not value.isprintable():
            raise UrlRefused(f"the header {name!r} is none, or has a value that none can have")
        found[low] = value
    return found


def _next(target: Target, location: str) -> Target:
    """Where a redirect leads, judged; raises UrlRefused."""
    following = read_url(urljoin(str(target), location))
    if target.scheme == "https" and following.scheme == "http":
        raise UrlRefused(f"{target} leads from https to http", hint="Ask for the http address itself if that is meant")
    return following


def _redirected(status: int, method: str, body: bytes) -> tuple[str, bytes]:
    """Method and body of the next hop, as browsers do it."""
    if status in _SAME_METHOD or method in ("GET", "HEAD"):
        return method, body
    return "GET", b""
