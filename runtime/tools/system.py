"""Tools that are safe to give to any model: the time, and the public web. Made anew for whoever asks for one."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any, Literal
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

import httpx
from pydantic import BaseModel, ConfigDict, Field

from greenroom.runtime.calls import ToolContext, ToolOutput
from greenroom.runtime.messages import clean
from greenroom.runtime.tools.addresses import UrlRefused
from greenroom.runtime.tools.output import plain_json
from greenroom.runtime.tools.registry import Tool, ToolSpec
from greenroom.runtime.tools.web import Answer, WebClient

MAX_TEXT = 64 * 1024
"""Characters of an answer that a model gets."""

MAX_SENT = 1024 * 1024
"""Characters of a body that it may send."""


class _Arguments(BaseModel):
    model_config = ConfigDict(extra="forbid")


class GetTimeArguments(_Arguments):
    timezone: str = Field(default="UTC", description="A name of the IANA database, such as Europe/Berlin")


class FetchUrlArguments(_Arguments):
    url: str = Field(description="A public http or https address")


class HttpRequestArguments(_Arguments):
    url: str = Field(description="A public http or https address")
    method: Literal["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE"] = "GET"
    headers: dict[str, str] = Field(default_factory=dict)
    body: str = Field(default="", max_length=MAX_SENT, description="Sent as UTF-8")


def lookup_builtin_tool(id: str) -> Tool | None:
    """A new Tool for `sys_get_time`, `sys_http_request` or `sys_fetch_url`; None for any other id."""
    make = _BUILTIN.get(id)
    return None if make is None else make(WebClient())


def get_time_tool(_: WebClient) -> Tool:
    spec = ToolSpec(
        name="sys_get_time",
        description="The current date and time.",
        arguments=GetTimeArguments,
        effect="read_only",
    )
    return Tool(spec, _get_time)


def fetch_url_tool(client: WebClient) -> Tool:
    """`client`: what reaches the web."""

    async def fetch_url(ctx: ToolContext, arguments: FetchUrlArguments) -> ToolOutput:
        return await _asked(client, "GET", arguments.url)

    spec = ToolSpec(
        name="sys_fetch_url",
        description="Fetches a public web page or document and gives its text.",
        arguments=FetchUrlArguments,
        effect="read_only",
    )
    return Tool(spec, fetch_url)


def http_request_tool(client: WebClient) -> Tool:
    """`client`: what reaches the web."""

    async def http_request(ctx: ToolContext, arguments: HttpRequestArguments) -> ToolOutput:
        body = clean(arguments.body).encode()
        return await _asked(client, arguments.method, arguments.url, arguments.headers, body, shows_headers=True)

    spec = ToolSpec(
        name="sys_http_request",
        description="Sends an HTTP request to a public server and gives its answer.",
        arguments=HttpRequestArguments,
    )
    return Tool(spec, http_request)


_BUILTIN: dict[str, Callable[[WebClient], Tool]] = {
    "sys_get_time": get_time_tool,
    "sys_http_request": http_request_tool,
    "sys_fetch_url": fetch_url_tool,
}


async def _get_time(ctx: ToolContext, arguments: GetTimeArguments) -> ToolOutput:
    try:
        zone = ZoneInfo(arguments.timezone)
    except (ZoneInfoNotFoundError, ValueError, OSError):
        return ToolOutput.of_text(f"There is no time zone {arguments.timezone!r}; Europe/Berlin is one", is_error=True)
    now = datetime.now(UTC)
    shown = {
        "time": now.astimezone(zone).isoformat(timespec="seconds"),
        "weekday": f"{now.astimezone(zone):%A}",
        "timezone": arguments.timezone,
        "unix": int(now.timestamp()),
    }
    return ToolOutput.of_text(plain_json(shown))


async def _asked(
    client: WebClient,
    method: str,
    url: str,
    headers: dict[str, str] | None = None,
    body: bytes = b"",
    *,
    shows_headers: bool = False,
) -> ToolOutput:
    try:
        answer = await client.request(method, url, headers, body)
    except UrlRefused as error:
        return ToolOutput.of_text(f"Refused: {error}", is_error=True)
    except TimeoutError as error:
        return ToolOutput.of_text(str(error), is_error=True)
    except (httpx.HTTPError, httpx.InvalidURL, OSError) as error:
        return ToolOutput.of_text(f"The request failed: {error or type(error).__name__}", is_error=True)
    shown: dict[str, Any] = {"status": answer.status, "url": answer.url}
    if shows_headers:
        shown["headers"] = {name: value[:1000] for name, value in list(answer.headers.items())[:50]}
    return ToolOutput.of_text(plain_json({**shown, **_content(answer)}))


def _content(answer: Answer) -> dict[str, Any]:
    kind = answer.headers.get("content-type", "")
    if b"\0" in answer.body[:4096]:
        return {"content_type": kind, "bytes": len(answer.body), "text": "", "note": "The answer is no text."}
    text = clean(answer.text)
    cut = answer.cut or len(text) > MAX_TEXT
    return {"content_type": kind, "text": text[:MAX_TEXT], **({"truncated": True} if cut else {})}
