"""An ObjectStore on S3 and what speaks its protocol: data through obstore, credentials where boto3 finds them.

A reply that was lost, or a 409, says nothing about the write: it is reported as Undecided, and whoever called compares
write ids. For that reason the client's own retries are switched off for writes; a refusal would otherwise be of its own
first try.
"""

from __future__ import annotations

import os
import re
from collections.abc import AsyncIterator, Callable, Iterable
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import parse_qs, urlsplit

from greenroom.runtime.errors import (
    AlreadyExists,
    ConfigError,
    NotFound,
    PreconditionFailed,
    StorageError,
    Undecided,
)
from greenroom.runtime.storage.probe import require_conditions
from greenroom.runtime.storage.quiet_exit import wait_at_exit

if TYPE_CHECKING:
    from obstore.store import S3Store

CONNECT_TIMEOUT = timedelta(seconds=5)
REQUEST_TIMEOUT = timedelta(seconds=30)
READ_RETRIES = 3
DELETE_PAGE = 1000

T = TypeVar("T")


class S3ObjectStore:
    """`bucket` and `prefix` ("" or ending with a slash); endpoint: another server's URL; region: its own or boto3's.

    Credentials come from where boto3 finds them: environment, profiles, SSO, an instance's role.
    """

    def __init__(
        self, bucket: str, prefix: str = "", *, endpoint: str | None = None, region: str | None = None
    ) -> None:
        self.bucket = bucket
        self.prefix = prefix
        self.endpoint = endpoint
        self.region = region
        self._writer: S3Store | None = None
        self._reader: S3Store | None = None

    @classmethod
    def from_url(cls, url: str) -> S3ObjectStore:
        """`s3://bucket/prefix?endpoint=http://127.0.0.1:9000&region=us-east-1`; raises ConfigError."""
        parts = urlsplit(url)
        options = {name: values[-1] for name, values in parse_qs(parts.query).items()}
        unknown = sorted(set(options) - {"endpoint", "region"})
        if not parts.netloc or unknown:
            what = f"the option {unknown[0]!r}" if unknown else "no bucket"
            raise ConfigError(f"{url!r} has {what}", hint="Write s3://BUCKET/PREFIX?endpoint=URL&region=NAME")
        prefix = parts.path.strip("/")
        return cls(parts.netloc, f"{prefix}/" if prefix else "", **options)

    async def get(self, key: str) -> tuple[bytes, str] | None:
        async def read() -> tuple[bytes, str] | None:
            import obstore

            found = await obstore.get_async(self._read_store(), self.prefix + key)
            body = await found.bytes_async()
            return bytes(body), self._etag(found.meta["e_tag"], key)

        found: tuple[bytes, str] | None = await self._do(key, read, missing=None)
        return found

    async def put_if_absent(self, key: str, body: bytes) -> str:
        return await self._put(key, body, "create")

    async def put_if_match(self, key: str, body: bytes, etag: str) -> str:
        return await self._put(key, body, {"e_tag": etag})

    async def delete(self, key: str) -> None:
        await self.delete_many([key])

    async def delete_many(self, keys: Iterable[str]) -> None:
        wanted = [self.prefix + key for key in keys]

        async def remove(page: list[str]) -> None:
            import obstore

            await obstore.delete_async(self._read_store(), page)

        for start in range(0, len(wanted), DELETE_PAGE):
            page = wanted[start : start + DELETE_PAGE]
            await self._do(page[0], lambda page=page: remove(page), missing=None)  # type: ignore[misc]  # binds the page

    async def list(self, prefix: str) -> AsyncIterator[str]:
        import obstore

        full = self.prefix + prefix
        # The service lists by whole path elements: the folder is asked for, the rest of the prefix compared here.
        folder = full.rpartition("/")[0]
        stream = obstore.list(self._read_store(), folder or None)
        found: list[str] = []
        while page := await self._do(prefix, lambda: anext(aiter(stream), []), missing=[]):
            found += [entry["path"] for entry in page if entry["path"].startswith(full)]
        for path in sorted(found):  # AWS lists in order of keys, not everybody does
            yield path[len(self.prefix) :]

    async def probe(self) -> None:
        await require_conditions(self, self._name)

    async def close(self) -> None:
        self._writer = self._reader = None

    def __reduce__(self) -> tuple[Any, ...]:
        return _remade, (self.bucket, self.prefix, self.endpoint, self.region)

    @property
    def _name(self) -> str:
        return f"s3://{self.bucket}/{self.prefix}" + (f" at {self.endpoint}" if self.endpoint else "")

    async def _put(self, key: str, body: bytes, mode: Any) -> str:
        async def write() -> str:
            import obstore

            made = await obstore.put_async(self._write_store(), self.prefix + key, body, mode=mode, use_multipart=False)
            return self._etag(made["e_tag"], key)

        made: str = await self._do(key, write, writing=True, creating=mode == "create")
        return made

    def _etag(self, given: str | None, key: str) -> str:
        """An etag as If-Match takes it; some servers leave out the quotes, in some of their answers."""
        if not given:
            raise StorageError(f"{self._name} gives no etags", kind="unavailable", key=key)
        return given if given.endswith('"') else f'"{given}"'

    async def _do(
        self,
        key: str,
        work: Callable[[], Any],
        *,
        missing: Any = NotFound,
        writing: bool = False,
        creating: bool = False,
    ) -> Any:
        """Runs a request and names what went wrong; `missing`: what a 404 means for it."""
        from obstore import exceptions as failed

        try:
            return await work()
        except (FileNotFoundError, failed.NotFoundError) as error:
            if "NoSuchBucket" in str(error):
                raise StorageError(
                    f"there is no bucket {self.bucket!r}", kind="unavailable", key=key, hint="Make it, or name another"
                ) from error
            if missing is NotFound:
                raise NotFound(f"there is no {key}", kind="not_found", key=key) from error
            return missing
        except failed.AlreadyExistsError as error:
            if creating and _status_in(error) != 409:
                raise AlreadyExists(f"{key} is already there", key=key) from error
            raise Undecided(f"{key}: the store left the write undecided", key=key) from error
        except failed.PreconditionError as error:
            if _status_in(error) == 404:
                raise NotFound(f"there is no {key}", kind="not_found", key=key) from error
            raise PreconditionFailed(f"{key} was changed by somebody else", key=key) from error
        except (failed.PermissionDeniedError, failed.UnauthenticatedError) as error:
            raise StorageError(
                f"{self._name} refuses access: {_what_it_says(error)}",
                kind="unavailable",
                key=key,
                hint="See the credentials that boto3 finds (environment, profile, role) and what they may do",
            ) from error
        except failed.BaseError as error:
            text = _what_it_says(error)
            if writing and not _certainly_refused(error):
                raise Undecided(f"{key}: no answer to the write: {text}", kind="unavailable", key=key) from error
            hint = "See that the endpoint, the region and the bucket are right and the server is reachable"
            if "region" in str(error):
                hint = f"The region {self._region()!r} is not the bucket's: name it, as in s3://...?region=NAME"
            raise StorageError(
                f"{self._name} cannot be used: {text}", kind="unavailable", key=key, hint=hint
            ) from error

    def _write_store(self) -> S3Store:
        if self._writer is None:
            self._writer = self._make(retries=0)
        return self._writer

    def _read_store(self) -> S3Store:
        if self._reader is None:
            self._reader = self._make(retries=READ_RETRIES)
        return self._reader

    def _make(self, *, retries: int) -> S3Store:
        from obstore.store import S3Store

        wait_at_exit()
        options: dict[str, Any] = {"region": self._region()}
        if self.endpoint is not None:
            options |= {"endpoint": self.endpoint, "virtual_hosted_style_request": False}
        if "AWS_ACCESS_KEY_ID" in os.environ and "AWS_SECRET_ACCESS_KEY" in os.environ:
            options |= _keys_of_environment()
        else:
            options |= self._found_by_boto3()
        return S3Store(
            self.bucket,
            **options,
            client_options={
                "allow_http": (self.endpoint or "").startswith("http://"),
                "connect_timeout": CONNECT_TIMEOUT,
                "timeout": REQUEST_TIMEOUT,
            },
            retry_config={"max_retries": retries, "retry_timeout": REQUEST_TIMEOUT},
        )

    def _region(self) -> str:
        return self.region or os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION") or "us-east-1"

    def _found_by_boto3(self) -> dict[str, Any]:
        """What boto3 finds in profiles, SSO and instance roles, kept fresh; raises StorageError when it is nothing."""
        from boto3.session import Session
        from obstore.auth.boto3 import Boto3CredentialProvider

        session = Session(region_name=self.region)
        if session.get_credentials() is None:
            raise StorageError(
                f"there are no credentials for {self._name}",
                kind="unavailable",
                hint="Set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or a profile that boto3 finds",
            )
        found: dict[str, Any] = {"credential_provider": Boto3CredentialProvider(session)}
        return found | ({"region": session.region_name} if session.region_name else {})


def _keys_of_environment() -> dict[str, Any]:
    """The plain variables; boto3 and its 8 MiB are then not needed."""
    keys = {
        "access_key_id": os.environ["AWS_ACCESS_KEY_ID"],
        "secret_access_key": os.environ["AWS_SECRET_ACCESS_KEY"],
    }
    token = os.environ.get("AWS_SESSION_TOKEN")
    return {**keys, "session_token": token} if token else keys


def _remade(bucket: str, prefix: str, endpoint: str | None, region: str | None) -> S3ObjectStore:
    return S3ObjectStore(bucket, prefix, endpoint=endpoint, region=region)


def _certainly_refused(error: BaseException) -> bool:
    """Whether a write certainly was not made: nothing reached the server, or it turned the request down as wrong."""
    text, status = str(error), _status_in(error)
    if status is not None and (300 <= status < 400 or status in (400, 405, 411, 413, 501)):
        return True
    return "Connection refused" in text or "dns error" in text or "ConnectError" in text or "redirect" in text


def _status_in(error: BaseException) -> int | None:
    """The HTTP status that obstore's message tells, in its own fixed words; the key and the URL may hold any number."""
    found = re.search(r"returned non-2xx status code: (\d{3})", str(error))
    return int(found.group(1)) if found else None


def _what_it_says(error: BaseException) -> str:
    """What the server says, in its own words if it gave any; else the client's."""
    said = re.search(r"<Code>(.*?)</Code>.*?<Message>(.*?)</Message>", str(error), re.DOTALL)
    if said:
        return f"{said.group(1)}: {said.group(2)}"[:300]
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]
