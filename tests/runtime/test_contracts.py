"""Every store keeps the contract, on real servers; and stores that break it in five ways are found out."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import s3servers
from s3proxy import Plan, Step, proxy

from greenroom import ConfigError, PreconditionFailed, Storage, StorageError, Undecided
from greenroom.runtime.ports import ObjectStore
from greenroom.runtime.storage import Head, MemoryObjectStore, SessionStore
from greenroom.runtime.storage.probe import probe_conditions, require_conditions
from greenroom.testing import (
    ContractBroken,
    check_checkpoint_store,
    check_object_store,
    check_transcript_store,
)

pytestmark = pytest.mark.slow

Make = Callable[[], ObjectStore]


async def test_every_object_store_keeps_the_contract(object_store: Make) -> None:
    await check_object_store(object_store, rounds=2)


async def test_the_session_store_keeps_both_contracts_over_every_store(object_store: Make) -> None:
    await check_checkpoint_store(lambda: SessionStore(object_store()))
    await check_transcript_store(lambda: SessionStore(object_store()))


async def test_racing_writers_make_one_line_of_writes(object_store: Make) -> None:
    """Linearisable: every write that succeeded replaced exactly the one before it."""
    store = object_store()
    first = await store.put_if_absent("line", b"start")
    followed: dict[str, str] = {}

    async def write(writer: int) -> None:
        for number in range(6):
            found = await store.get("line")
            assert found is not None
            try:
                made = await store.put_if_match("line", f"{writer}-{number}".encode(), found[1])
            except (PreconditionFailed, Undecided):
                continue
            assert found[1] not in followed, "two writes replaced the same one"
            followed[found[1]] = made

    await asyncio.gather(*(write(writer) for writer in range(6)))
    etag, length = first, 0
    while etag in followed:
        etag, length = followed[etag], length + 1
    assert length == len(followed) >= 6
    found = await store.get("line")
    assert found is not None
    assert found[1] == etag
    await store.close()


@pytest.mark.parametrize("object_store", ["memory", "sqlite", "file", "moto"], indirect=True)
async def test_sixteen_writers_have_one_winner_in_each_of_fifty_rounds(object_store: Make) -> None:
    await check_object_store(object_store, writers=16, rounds=50)


@pytest.mark.timeout(900)
@pytest.mark.skipif("GREENROOM_LONG" not in os.environ, reason="takes 3 to 5 minutes: set GREENROOM_LONG=1 to run it")
@pytest.mark.parametrize("object_store", ["seaweedfs"], indirect=True)
async def test_sixteen_writers_race_for_fifty_rounds_on_a_slow_server(object_store: Make) -> None:
    await check_object_store(object_store, writers=16, rounds=50)


async def test_every_store_honours_what_the_probe_asks(object_store: Make) -> None:
    report = await probe_conditions(object_store())
    assert report.usable
    assert len(report.honours) == 5


# -- broken ones


class LostUpdate(MemoryObjectStore):
    """Checks, lets others in, then writes."""

    async def put_if_match(self, key: str, body: bytes, etag: str) -> str:
        found = await self.get(key)
        if found is not None and found[1] == etag:
            await asyncio.sleep(0)
            return self._put(key, body)
        return await super().put_if_match(key, body, etag)


class IgnoresIfMatch(MemoryObjectStore):
    async def put_if_match(self, key: str, body: bytes, etag: str) -> str:
        return self._put(key, body)


class TornWrite(MemoryObjectStore):
    async def put_if_absent(self, key: str, body: bytes) -> str:
        return await super().put_if_absent(key, body[: 1 << 19])


class StaleList(MemoryObjectStore):
    def __init__(self) -> None:
        super().__init__()
        self._seen: dict[str, list[str]] = {}

    async def list(self, prefix: str) -> AsyncIterator[str]:
        if prefix not in self._seen:
            self._seen[prefix] = [key async for key in super().list(prefix)]
        for key in self._seen[prefix]:
            yield key


class SharedAlias(SessionStore):
    """Gives out what it was given: whoever changes it changes the store."""

    def __init__(self) -> None:
        super().__init__(MemoryObjectStore())
        self._heads: dict[str, Head] = {}

    async def create(self, sid: str, head: Head) -> str:
        etag = await super().create(sid, head)
        self._heads[sid] = head
        return etag

    async def _read_head(self, sid: str) -> tuple[Head, str] | None:
        found = await super()._read_head(sid)
        return None if found is None else (self._heads.get(sid, found[0]), found[1])


@pytest.mark.parametrize("store", [LostUpdate, IgnoresIfMatch, TornWrite, StaleList])
async def test_a_broken_object_store_is_found_out(store: type[MemoryObjectStore]) -> None:
    with pytest.raises(ContractBroken):
        await check_object_store(store)


async def test_a_store_that_keeps_an_alias_is_found_out() -> None:
    with pytest.raises(ContractBroken):
        await check_checkpoint_store(SharedAlias)


async def test_a_store_that_ignores_conditions_is_refused_at_the_start() -> None:
    with pytest.raises(StorageError, match="old etag is refused"):
        await require_conditions(IgnoresIfMatch(), "this store")


async def test_a_store_without_host_fences_must_refuse_them() -> None:
    with pytest.raises(ContractBroken, match="host fence"):
        await check_checkpoint_store(lambda: SessionStore(MemoryObjectStore()), supports_fencing=False)


def test_the_suites_run_without_a_test_framework() -> None:
    asyncio.run(check_object_store(MemoryObjectStore))


# -- S3


def test_real_boto3_sees_what_was_written(seaweedfs: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in s3servers.credentials().items():
        monkeypatch.setenv(name, value)
    storage = Storage.open(f"s3://{s3servers.BUCKET}/seen/by/boto3?endpoint={seaweedfs}&region=us-east-1")

    async def write() -> None:
        assert storage.objects is not None
        await storage.objects.put_if_absent("tree/s/s/head", b'{"a": 1}')
        await storage.close()

    asyncio.run(write())
    client = s3servers.client(seaweedfs)
    listed = client.list_objects_v2(Bucket=s3servers.BUCKET, Prefix="seen/")["Contents"]
    assert [entry["Key"] for entry in listed] == ["seen/by/boto3/tree/s/s/head"]
    body = client.get_object(Bucket=s3servers.BUCKET, Key="seen/by/boto3/tree/s/s/head")["Body"].read()
    assert json.loads(body) == {"a": 1}


@pytest.mark.parametrize("url", ["s3://", "s3:///prefix", "s3://bucket?colour=red"])
def test_an_s3_url_that_names_no_bucket_or_something_unknown_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="s3://BUCKET"):
        Storage.open(url)


async def test_what_goes_wrong_with_s3_is_named(moto_s3: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name, value in s3servers.credentials().items():
        monkeypatch.setenv(name, value)
    with pytest.raises(StorageError, match="no bucket 'nowhere'"):
        await Storage.open(f"s3://nowhere?endpoint={moto_s3}").probe()
    with pytest.raises(StorageError, match="reachable"):
        await Storage.open("s3://bucket?endpoint=http://127.0.0.1:9").probe()
    for name in s3servers.credentials():
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    with pytest.raises(StorageError, match="no credentials"):
        await Storage.open(f"s3://bucket?endpoint={moto_s3}").probe()


REGION = (
    '<?xml version="1.0" encoding="UTF-8"?><Error><Code>AuthorizationHeaderMalformed</Code><Message>The authorization '
    "header is malformed; the region 'us-east-1' is wrong; expecting 'eu-central-1'</Message>"
    "<Region>eu-central-1</Region></Error>"
)


@pytest.mark.parametrize(
    ("status", "body", "said"),
    [("400", REGION, "eu-central-1"), ("301", REGION.replace("AuthorizationHeaderMalformed", "PermanentRedirect"), "")],
)
async def test_a_wrong_region_is_named(
    status: str, body: str, said: str, seaweedfs: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in s3servers.credentials().items():
        monkeypatch.setenv(name, value)
    plan = Plan([Step(status, body=body)] * 9)
    with proxy(seaweedfs, plan) as endpoint, pytest.raises(StorageError) as wrong:
        await Storage.open(f"s3://bucket?endpoint={endpoint}").probe()
    assert not isinstance(wrong.value, Undecided)
    assert "region 'us-east-1'" in wrong.value.hint
    assert said in str(wrong.value)
    assert plan.seen == 1, "a wrong request is not sent again"


async def test_a_profile_that_boto3_finds_works_as_the_plain_variables_do(
    moto_s3: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in s3servers.credentials():
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "credentials").write_text(
        f"[mine]\naws_access_key_id = {s3servers.KEY}\naws_secret_access_key = {s3servers.SECRET}\n"
    )
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.setenv("AWS_PROFILE", "mine")
    storage = Storage.open(f"s3://{s3servers.BUCKET}/profile?endpoint={moto_s3}&region=us-east-1")
    await storage.probe()
    await storage.close()


@pytest.mark.parametrize("url", ["sqlite:///x.db", "file:///folder"])
def test_a_full_disk_is_named(url: str, tmp_path: Path) -> None:
    script = f"""
import asyncio, resource, signal
from greenroom import Storage, StorageError
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
async def main():
    storage = Storage.open({url!r})
    await storage.probe()
    resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000))
    try:
        for number in range(100):
            await storage.objects.put_if_absent(f"k/{{number}}", b"x" * 1_000_000)
    except StorageError as error:
        print(error.kind, error.key, bool(error.hint))
asyncio.run(main())
"""
    ran = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert ran.stdout == "unavailable k/0 True\n", ran.stderr


@pytest.mark.parametrize("url", ["sqlite:///{}/x.db", "file:///{}/folder"])
def test_what_may_only_be_read_is_named(url: str) -> None:
    """As a plain user: root may write everything."""
    script = """
import asyncio, os, pathlib, sys
import greenroom.runtime.storage.files, greenroom.runtime.storage.sqlite
from greenroom import Storage, StorageError
folder = pathlib.Path(sys.argv[1])
async def main():
    storage = Storage.open(sys.argv[2])
    await storage.objects.put_if_absent("a/k", b"1")
    await storage.close()
    for path in [*folder.rglob("*"), folder]:
        path.chmod(0o555 if path.is_dir() else 0o444)
    if os.geteuid() == 0:
        os.seteuid(65534)
    storage = Storage.open(sys.argv[2])
    try:
        await storage.objects.put_if_absent("b/k", b"2")
    except StorageError as error:
        print(error.kind, error.key, "can be written" in error.hint)
    os.seteuid(os.getuid())
asyncio.run(main())
"""
    with tempfile.TemporaryDirectory() as folder:
        arguments = [sys.executable, "-c", script, folder, url.format(folder)]
        ran = subprocess.run(arguments, capture_output=True, text=True, check=False)
        for path in [Path(folder), *Path(folder).rglob("*")]:
            path.chmod(0o755)
    assert ran.stdout == "unavailable b/k True\n", ran.stderr


def test_file_stores_are_readable_by_hand(tmp_path: Path) -> None:
    storage: Any = Storage.open(f"file:///{tmp_path}/store")

    async def write() -> None:
        await storage.objects.put_if_absent("tree/a/a/head", b'{"state": {"name": "Ready"}}')
        with pytest.raises(StorageError, match="no key"):
            await storage.objects.put_if_absent("tree/../../escape", b"")

    asyncio.run(write())
    assert json.loads((tmp_path / "store" / "tree" / "a" / "a" / "head").read_text())["state"]["name"] == "Ready"
