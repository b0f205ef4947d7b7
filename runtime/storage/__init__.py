"""Stores: object stores of several kinds, and the session store over any of them."""

from greenroom.runtime.storage.head import Head, Segment, SegmentRef
from greenroom.runtime.storage.memory import MemoryObjectStore
from greenroom.runtime.storage.session_store import SessionStore
from greenroom.runtime.storage.sqlite import SqliteObjectStore
from greenroom.runtime.storage.storage import Storage

__all__ = ["Head", "MemoryObjectStore", "Segment", "SegmentRef", "SessionStore", "SqliteObjectStore", "Storage"]
