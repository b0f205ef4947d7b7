"""A model's web client over loopback servers: each hop is judged before it is contacted, and everything is bounded."""

from __future__ import annotations

import asyncio
import gzip
import json
import socket
import zlib
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

from greenroom import lookup_builtin_tool
from greenroom.runtime.tools import web
from greenroom.runtime.tools.addresses import UrlRefused, read_url
from greenroom.runtime.tools.system import fetch_url_tool, http_request_tool
from greenroom.runtime.tools.web import WebClient

pytestmark = pytest.mark.slow

PUBLIC = "93.184.216.34"


@dataclass
class Server:
    """Plays answers by path; `seen`: the requests, each with its head and body."""

    port: int = 0
    answers: dict[str, bytes] = field(default_factory=dict)
    seen: list[dict[str, Any]] = field(default_factory=list)


def answer(status: int = 200, body: bytes = b"", **headers: str) -> bytes:
    lines = [f"HTTP/1.1 {status} X", f"content-length: {len(body)}"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


def to(location: str, status: int = 302) -> bytes:
    return answer(status, location=location)


@asynccontextmanager
async def serving() -> AsyncIterator[Server]:
    made = Server()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        first, *lines = head.strip().split("\r\n")
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        body = await reader.readexactly(int(headers.get("content-length", 0)))
        method, path, _ = first.split(" ")
        made.seen.append({"method": method, "path": path, "body": body, **headers})
        try:
            writer.write(made.answers.get(path, answer(404)))
            await writer.drain()
            writer.close()
            await writer.wait_closed()
        except (ConnectionError, asyncio.CancelledError):
            writer.transport.abort()  # whoever asked has enough

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    made.port = server.sockets[0].getsockname()[1]
    try:
        yield made
    finally:
        server.close()


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    async with serving() as made:
        yield made


class Net:
    """Names with the answers they give, one after the other, and where connections went."""

    def __init__(self, server: Server) -> None:
        self.names: dict[str, list[list[str]]] = {}
        self.asked: list[str] = []
        self.dialed: list[str] = []
        self._server = server

    async def resolve(self, host: str, port: int) -> list[str]:
        self.asked.append(host)
        answers = self.names.get(host, [[PUBLIC]])
        return answers.pop(0) if len(answers) > 1 else answers[0]

    def dial(self, address: str, port: int) -> tuple[str, int]:
        self.dialed.append(address)
        return "127.0.0.1", self._server.port

    def client(self, **options: Any) -> WebClient:
        return WebClient(resolver=self.resolve, dial=self.dial, **options)


@pytest.fixture
def net(server: Server) -> Net:
    return Net(server)


async def test_a_page_comes_from_the_address_that_was_judged_under_its_own_name(server: Server, net: Net) -> None:
    server.answers["/a?b=c"] = answer(200, b"hello", content_type="text/plain; charset=latin-1")
    got = await net.client().request("GET", "http://pub.test/a?b=c")
    assert (got.status, got.text, got.url) == (200, "hello", "http://pub.test/a?b=c")
    assert (net.asked, net.dialed) == (["pub.test"], [PUBLIC])
    assert server.seen[0]["host"] == "pub.test"


async def test_the_second_answer_of_a_resolver_is_never_used(server: Server, net: Net) -> None:
    net.names["pub.test"] = [[PUBLIC], ["127.0.0.1"]]
    server.answers["/"] = answer(200, b"first")
    client = net.client()
    assert (await client.request("GET", "http://pub.test/")).body == b"first"
    assert net.asked == ["pub.test"]
    with pytest.raises(UrlRefused, match=r"127\.0\.0\.1"):  # and no connection of before is used for it
        await client.request("GET", "http://pub.test/")
    assert net.dialed == [PUBLIC]
    assert len(server.seen) == 1


@pytest.mark.parametrize(
    ("location", "match"),
    [
        ("http://169.254.169.254/latest/meta-data/", "no public address"),
        ("//127.0.0.1/x", "no public address"),
        ("http://inner.test/", "no public address"),
        ("file:///etc/passwd", "not http"),
        ("http://u:p@pub.test/", "names a user"),
        ("http://[::1]:80/", "no public address"),
        ("http://0177.0.0.1/", "odd spelling"),
        ("/\\127.0.0.1/", "characters"),
    ],
)
async def test_a_redirect_inside_is_refused_before_it_is_contacted(
    server: Server, net: Net, location: str, match: str
) -> None:
    net.names["inner.test"] = [["10.0.0.5"]]
    server.answers["/a"] = to(location)
    with pytest.raises(UrlRefused, match=match):
        await net.client().request("GET", "http://pub.test/a")
    assert net.dialed == [PUBLIC]
    assert len(server.seen) == 1


async def test_redirects_are_followed_to_a_bound(server: Server, net: Net) -> None:
    server.answers |= {"/a": to("/b", 301), "/b": to("c?d", 303), "/c?d": answer(200, b"end")}
    got = await net.client().request("POST", "http://pub.test/a", body=b"x")
    assert (got.body, got.url) == (b"end", "http://pub.test/c?d")
    assert [(seen["method"], seen["body"]) for seen in server.seen] == [("POST", b"x"), ("GET", b""), ("GET", b"")]
    assert net.asked == ["pub.test"] * 3, "each hop is judged anew"
    server.answers["/loop"] = to("/loop")
    with pytest.raises(UrlRefused, match="more than 5 redirects"):
        await net.client().request("GET", "http://pub.test/loop")


async def test_secrets_stay_with_their_origin(server: Server, net: Net) -> None:
    secrets = {
        "Authorization": "Bearer s",
        "X-Api-Key": "s",
        "Cookie": "s=s",
        "Accept": "text/html",
        "User-Agent": "me",
    }
    server.answers |= {
        "/a": to("http://other.test/b"),
        "/b": answer(),
        "/c": to("/b"),
        "/d": to("http://pub.test:81/b"),
    }
    for path, stay in (("/a", False), ("/c", True), ("/d", False)):
        server.seen.clear()
        await net.client().request("GET", f"http://pub.test{path}", secrets)
        first, second = server.seen
        assert first["authorization"] == "Bearer s"
        assert (
            {"authorization", "x-api-key", "cookie"} <= second.keys()
            if stay
            else "s" not in json.dumps([second.get(name) for name in ("authorization", "x-api-key", "cookie")])
        )
        assert (second["accept"], second["user-agent"]) == ("text/html", "me")


async def test_a_body_goes_to_no_other_origin_and_no_cookie_is_kept(server: Server, net: Net) -> None:
    server.answers |= {"/a": to("http://other.test/b", 307), "/b": answer(), "/c": to("/b", 308)}
    with pytest.raises(UrlRefused, match="body"):
        await net.client().request("POST", "http://pub.test/a", body=b"secret")
    assert len(server.seen) == 1
    await net.client().request("POST", "http://pub.test/c", body=b"kept")
    assert server.seen[-1]["body"] == b"kept"
    server.answers["/set"] = answer(302, set_cookie="id=1", location="/b")
    await net.client().request("GET", "http://pub.test/set")
    assert "cookie" not in server.seen[-1]


def test_https_never_leads_to_http() -> None:
    with pytest.raises(UrlRefused, match="from https to http"):
        web._next(read_url("https://api.test/a"), "http://api.test/a")
    assert web._next(read_url("http://api.test/a"), "https://api.test/a").scheme == "https"


async def test_proxies_of_the_environment_are_not_used(
    server: Server, net: Net, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "HTTPS_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    server.answers["/"] = answer(200, b"direct")
    assert (await net.client().request("GET", "http://pub.test/")).body == b"direct"


@pytest.mark.parametrize("packing", ["gzip", "deflate"])
async def test_a_bomb_stops_at_the_bound_after_unpacking(server: Server, net: Net, packing: str) -> None:
    plain = bytes(100_000_000)
    packed = gzip.compress(plain) if packing == "gzip" else zlib.compress(plain)
    server.answers["/"] = answer(200, packed, content_encoding=packing)
    got = await net.client(max_body=5000).request("GET", "http://pub.test/")
    assert (len(got.body), got.cut) == (5000, True)
    server.answers["/"] = answer(200, gzip.compress(b"x" * 5000), content_encoding="gzip")
    got = await net.client(max_body=5000).request("GET", "http://pub.test/")
    assert (len(got.body), got.cut) == (5000, False)


async def test_a_packing_that_was_not_asked_for_is_refused(server: Server, net: Net) -> None:
    for packing, body in (("br", b"x"), ("zstd", b"x"), ("gzip, gzip", b"x"), ("gzip", b"no gzip")):
        server.answers["/"] = answer(200, body, content_encoding=packing)
        with pytest.raises(UrlRefused, match=r"packed|unpacked"):
            await net.client().request("GET", "http://pub.test/")


async def test_a_server_that_never_answers_is_left(net: Net) -> None:
    left = asyncio.Event()

    async def hangs(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()  # until whoever asked has had enough
        writer.close()
        left.set()

    slow = await asyncio.start_server(hangs, "127.0.0.1", 0)
    port = slow.sockets[0].getsockname()[1]
    client = WebClient(resolver=net.resolve, dial=lambda address, _: ("127.0.0.1", port), timeout=0.2)
    with pytest.raises(TimeoutError, match=r"0\.2 s"):
        await client.request("GET", "http://pub.test/")
    await asyncio.wait_for(left.wait(), 10)
    slow.close()


@pytest.mark.parametrize("name", ["Host", "content-length", "Proxy-Authorization", "Connection", "a b", "x\r\ny", "ö"])
async def test_headers_that_no_caller_sets(net: Net, name: str) -> None:
    with pytest.raises(UrlRefused, match="header"):
        await net.client().request("GET", "http://pub.test/", {name: "x"})
    with pytest.raises(UrlRefused, match="header"):
        await net.client().request("GET", "http://pub.test/", {"x": "a\r\nb: c"})


async def test_a_name_that_leads_nowhere_is_refused() -> None:
    with pytest.raises(UrlRefused, match="cannot be resolved"):
        await WebClient().request("GET", "http://no-such-name.invalid/")
    with pytest.raises(UrlRefused, match="no public address"):
        await WebClient(resolver=_localhost).request("GET", "http://mine.test/")


async def _localhost(host: str, port: int) -> list[str]:
    found = await asyncio.get_running_loop().getaddrinfo("localhost", port, type=socket.SOCK_STREAM)
    return [str(entry[4][0]) for entry in found]


# -- the tools


async def test_the_tools_are_new_ones_each_time_and_only_these() -> None:
    for id in ("sys_get_time", "sys_http_request", "sys_fetch_url"):
        first, second = lookup_builtin_tool(id), lookup_builtin_tool(id)
        assert first is not None
        assert first is not second
        assert first.spec.name == id
    for id in ("bash", "", "sys_fetch", "read_any_file"):
        assert lookup_builtin_tool(id) is None


async def test_the_time_is_told_for_a_zone() -> None:
    tool = lookup_builtin_tool("sys_get_time")
    assert tool is not None
    told = json.loads((await tool.call({"timezone": "Europe/Berlin"})).text)
    assert told["timezone"] == "Europe/Berlin"
    assert told["time"][-6:] in ("+01:00", "+02:00")
    for zone in ("Mars", "../../etc/passwd", "/etc/localtime", ""):
        assert (await tool.call({"timezone": zone})).is_error


async def test_a_page_as_a_model_gets_it(server: Server, net: Net) -> None:
    server.answers |= {
        "/": answer(200, "grüße".encode(), content_type="text/html"),
        "/long": answer(200, b"x" * 70_000, content_type="text/plain"),
        "/image": answer(200, b"\x89PNG\0\0", content_type="image/png"),
        "/gone": answer(404, b"no", content_type="text/plain"),
    }
    tool = fetch_url_tool(net.client())
    read: Callable[[str], Any] = lambda path: tool.call({"url": f"http://pub.test{path}"})  # noqa: E731
    assert json.loads((await read("/")).text) == {
        "status": 200,
        "url": "http://pub.test/",
        "content_type": "text/html",
        "text": "grüße",
    }
    long = json.loads((await read("/long")).text)
    assert (len(long["text"]), long["truncated"]) == (65_536, True)
    assert json.loads((await read("/image")).text)["note"] == "The answer is no text."
    gone = await read("/gone")
    assert (json.loads(gone.text)["status"], gone.is_error) == (404, False)
    refused = await tool.call({"url": "http://127.0.0.1/"})
    assert refused.is_error
    assert "no public address" in refused.text
    assert len(server.seen) == 4


async def test_a_request_as_a_model_makes_it(server: Server, net: Net) -> None:
    server.answers["/items"] = answer(201, b'{"id":1}', content_type="application/json", x_limit="9")
    tool = http_request_tool(net.client())
    made = await tool.call(
        {"url": "http://pub.test/items", "method": "POST", "headers": {"X-Key": "k"}, "body": '{"a":1}'}
    )
    told = json.loads(made.text)
    assert (told["status"], told["text"], told["headers"]["x-limit"]) == (201, '{"id":1}', "9")
    assert (server.seen[0]["x-key"], server.seen[0]["body"]) == ("k", b'{"a":1}')
    assert tool.spec.effect == "effectful"
    server.answers["/broken"] = b"no http\r\n\r\n"
    failed = await tool.call({"url": "http://pub.test/broken"})
    assert failed.is_error
    assert "The request failed" in failed.text
