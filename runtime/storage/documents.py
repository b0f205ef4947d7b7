"""Stored documents: versioned JSON, read by the model that wrote it or brought up to it. Never pickle.

An older version is migrated as it is read, a newer one is refused and left untouched, a damaged one is named by its
key and the field that is wrong.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from pydantic import ValidationError

from greenroom.runtime.errors import NewerSchema, StorageError
from greenroom.runtime.messages import Value

V = TypeVar("V", bound=Value)
Migration = Callable[[dict[str, Any]], dict[str, Any]]


def decode_document(
    model: type[V], what: str, version: int, body: bytes, key: str, migrations: Mapping[int, Migration] | None = None
) -> V:
    """The value in `body`; raises NewerSchema or StorageError(serde), both naming the key.

    what: how a message calls the document; version: the one that `model` reads; migrations: from a version to the one
    after it.
    """
    try:
        return model.model_validate_json(body)
    except ValidationError as error:
        problem = error
    found = _version_of(body)
    if found is not None and found > version:
        raise NewerSchema(
            f"{key} was written with schema version {found}, this is version {version}",
            kind="serde",
            key=key,
            hint="It was left untouched: use the newer Greenroom that wrote it",
        )
    if found is not None and found < version:
        document: dict[str, Any] = json.loads(body)
        while migrations and found in migrations:
            document = migrations[found](document)
            found += 1
        try:
            return model.model_validate(document | {"schema_version": found}, strict=False)
        except ValidationError as error:
            problem = error
    first = problem.errors(include_input=False, include_url=False)[0]
    where = ".".join(str(part) for part in first["loc"]) or "the document"
    raise StorageError(
        f"{key} is no valid {what}: {where}: {first['msg']}",
        kind="serde",
        key=key,
        hint="The object was damaged or changed by something else; restore it from a backup",
    )


def _version_of(body: bytes) -> int | None:
    """The version a stored document says it has; None when it says none."""
    try:
        document: Any = json.loads(body)
    except ValueError:
        return None
    version = document.get("schema_version") if isinstance(document, dict) else None
    return version if isinstance(version, int) else None
