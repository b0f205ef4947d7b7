"""A proxy before a real S3 server that fails chosen requests: scripted statuses, lost answers, delays, slow bodies."""

from __future__ import annotations

import http.client
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

ERROR = (
    '<?xml version="1.0" encoding="UTF-8"?><Error><Code>{code}</Code><Message>scripted</Message>'
    "<Resource>r</Resource><RequestId>1</RequestId></Error>"
)


@dataclass(slots=True)
class Step:
    """What happens to one request.

    pass: as usual; lose_reply: the server gets it, then the connection breaks; lose_request: it breaks before; a status
    and code, as in "409 ConditionalRequestConflict": this answer, the server sees nothing; delay: seconds, then as
    usual; slow: the answer's body in single bytes. body: of a scripted status, in place of the usual one.
    """

    what: str = "pass"
    seconds: float = 0.0
    body: str = ""


@dataclass(slots=True)
class Plan:
    """`steps`: for matching requests in turn, later ones pass; `method`, `key`: which match; `seen`: how many did.

    bare_etags: methods whose answers give etags without their quotes.
    """

    steps: list[Step] = field(default_factory=list)
    method: str = "PUT"
    key: str = ""
    seen: int = 0
    bare_etags: tuple[str, ...] = ()

    def next(self, method: str, path: str) -> Step:
        if method != self.method or self.key not in path:
            return Step()
        self.seen += 1
        return self.steps.pop(0) if self.steps else Step()


@contextmanager
def proxy(endpoint: str, plan: Plan) -> Iterator[str]:
    """Runs the proxy before `endpoint`; gives its address."""
    target = urlsplit(endpoint)
    lock = threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def handle_any(self) -> None:
            body = self.rfile.read(int(self.headers.get("content-length") or 0))
            with lock:
                step = plan.next(self.command, self.path)
            if step.what == "lose_request":
                self.break_off()
                return
            if step.what[0].isdigit():
                status, _, code = step.what.partition(" ")
                self.answer(int(status), [], (step.body or ERROR.format(code=code or "Scripted")).encode())
                return
            if step.what == "delay":
                time.sleep(step.seconds)
            upstream = http.client.HTTPConnection(str(target.hostname), target.port, timeout=30)
            upstream.request(self.command, self.path, body, dict(self.headers))
            response = upstream.getresponse()
            data = response.read()
            upstream.close()
            if step.what == "lose_reply":
                self.break_off()
                return
            self.answer(response.status, response.getheaders(), data, slow=step.what == "slow")

        def answer(self, status: int, headers: list[tuple[str, str]], data: bytes, *, slow: bool = False) -> None:
            self.send_response_only(status)
            skipped = {"content-length", "transfer-encoding", "connection"}
            for name, value in headers:
                if name.lower() == "etag" and self.command in plan.bare_etags:
                    value = value.strip('"')
                if name.lower() not in skipped:
                    self.send_header(name, value)
            length = next((value for name, value in headers if name.lower() == "content-length"), str(len(data)))
            self.send_header("content-length", length if self.command == "HEAD" else str(len(data)))
            self.end_headers()
            if self.command != "HEAD":
                for piece in [data[i : i + 1] for i in range(len(data))] if slow else [data]:
                    self.wfile.write(piece)

        def break_off(self) -> None:
            self.close_connection = True
            self.connection.shutdown(socket.SHUT_RDWR)

        do_GET = do_PUT = do_HEAD = do_DELETE = do_POST = handle_any  # noqa: N815  # the standard library's names

        def log_message(self, format: str, *args: object) -> None:
            """Says nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
