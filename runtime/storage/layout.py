"""How large parts of a session lie in objects of their own, and how they are put together again.

    tree/{root}/{sid}/blob/{sha256}       a large outcome, a whole batch, a receipt's result
    tree/{root}/{sid}/index/{name}        references of segments that were folded

Everything here is immutable and named by its content or by the head write that refers to it; what is missing or altered
fails by name.
"""

from __future__ import annotations

import json

from pydantic import TypeAdapter

from greenroom.runtime.calls import compact_json
from greenroom.runtime.errors import StorageError
from greenroom.runtime.journal import Batch, Outcome
from greenroom.runtime.messages import ContentBlock, Message
from greenroom.runtime.storage.head import Head, SegmentRef, short_hash
from greenroom.runtime.storage.session_store import SessionStore

LARGE_VALUE = 1024
"""Bytes of an outcome or of arguments in the open batch beyond which they get a blob of their own."""

LARGE_TEXT = 2048
"""Bytes of what the run last said beyond which it gets a blob of its own."""

_CONTENT: TypeAdapter[tuple[ContentBlock, ...]] = TypeAdapter(tuple[ContentBlock, ...])
_REFS: TypeAdapter[tuple[SegmentRef, ...]] = TypeAdapter(tuple[SegmentRef, ...])


async def spill_values(store: SessionStore, head: Head, known: set[str]) -> Head:
    """The head with its large text, and the large arguments and outcomes of its batch, in blobs."""
    text = (head.state.agent.final_text or "").encode("utf-8", "surrogatepass")
    if len(text) > LARGE_TEXT:
        head = _with_text(head, None, await store.put_blob(head.session_id, text, known))
    if head.batch is None:
        return head
    batch = head.batch
    for call in batch.calls:
        if call.size > LARGE_VALUE:
            body = compact_json(call.arguments).encode("utf-8", "surrogatepass")
            blob = await store.put_blob(head.session_id, body, known)
            call = call.but(arguments={}, arguments_blob=blob)
            batch = batch.put(call)
        for field in ("outcome", "answered"):
            small = await _spilled(store, head.session_id, getattr(call, field), known)
            if small is not None:
                call = call.but(**{field: small})
                batch = batch.put(call)
    return head.but(batch=batch) if batch is not head.batch else head


async def _spilled(store: SessionStore, sid: str, outcome: Outcome | None, known: set[str]) -> Outcome | None:
    """The outcome with its content in a blob; None when it stays as it is."""
    if outcome is None:
        return None
    body = _CONTENT.dump_json(outcome.content)
    if len(body) <= LARGE_VALUE:
        return None
    return outcome.but(content=(), blob=await store.put_blob(sid, body, known))


async def spill_batch(store: SessionStore, head: Head, known: set[str]) -> Head:
    """The head with its whole batch in a blob."""
    if head.batch is None:
        return head
    blob = await store.put_blob(head.session_id, head.batch.model_dump_json().encode(), known)
    return head.but(batch=None, batch_blob=blob)


async def gathered(store: SessionStore, head: Head) -> Head:
    """The head with its text and its batch whole again."""
    if head.text_blob is not None:
        text = await store.get_blob(head.session_id, head.text_blob)
        head = _with_text(head, text.decode("utf-8", "surrogatepass"), None)
    batch = head.batch
    if head.batch_blob is not None:
        batch = Batch.model_validate_json(await store.get_blob(head.session_id, head.batch_blob))
    for call in batch.calls if batch is not None else ():
        if batch is not None and call.arguments_blob is not None:
            arguments = json.loads(await store.get_blob(head.session_id, call.arguments_blob))
            call = call.but(arguments=arguments, arguments_blob=None)
            batch = batch.put(call)
        for field in ("outcome", "answered"):
            small: Outcome | None = getattr(call, field)
            if batch is not None and small is not None and small.blob is not None:
                content = _CONTENT.validate_json(await store.get_blob(head.session_id, small.blob))
                whole = Outcome(content=content, is_error=small.is_error, counts=small.counts)
                call = call.but(**{field: whole})
                batch = batch.put(call)
    return head.but(batch=batch, batch_blob=None) if batch is not head.batch else head


def _with_text(head: Head, text: str | None, blob: str | None) -> Head:
    agent = head.state.agent.but(final_text=text)
    return head.but(state=head.state.but(agent=agent), text_blob=blob)


async def fold(store: SessionStore, head: Head, name: str) -> Head:
    """The head with all its references in one index object."""
    refs = (*await folded_refs(store, head), *head.segments)
    body = _REFS.dump_json(refs)
    await store.put_index(head.session_id, name, body)
    index = SegmentRef(name=name, count=sum(ref.count for ref in refs), size=len(body), hash=short_hash(body))
    return head.but(index=index, segments=())


async def folded_refs(store: SessionStore, head: Head) -> tuple[SegmentRef, ...]:
    """The references that lie in the head's index."""
    if head.index is None:
        return ()
    body = await store.get_index(head.session_id, head.index.name)
    if short_hash(body) != head.index.hash:
        raise StorageError(
            f"the index {head.index.name} of session {head.session_id!r} was altered", kind="serde", key=head.index.name
        )
    return _REFS.validate_json(body)


async def messages_of(store: SessionStore, head: Head) -> tuple[Message, ...]:
    """The whole transcript of a head."""
    refs = (*await folded_refs(store, head), *head.segments)
    return (*await store.read(head.session_id, refs), *head.inline)
