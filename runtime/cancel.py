"""CancelToken: a tree of cooperative cancellation with an optional deadline.

A token tells; it stops nothing by itself. Cancelling a token cancels its children, never its parent or siblings.
Tokens live on one event loop; `cancelled` and `remaining` may be read from any thread.
"""

from __future__ import annotations

import asyncio
import time
import weakref
from collections.abc import Callable
from functools import partial


class CancelToken:
    """Asks a run to stop at its next safe point."""

    def __init__(
        self,
        *,
        timeout: float | None = None,
        monotonic: Callable[[], float] = time.monotonic,
        parent: CancelToken | None = None,
    ) -> None:
        self._cancelled = False
        self._hard = False
        self._reason = ""
        self._monotonic = monotonic
        self._deadline = None if timeout is None else monotonic() + timeout
        self._children: weakref.WeakSet[CancelToken] | None = None  # most tokens have none
        self._callbacks: dict[object, Callable[[], object]] = {}
        self._parent = parent  # keeps the chain alive while a descendant listens
        if parent is not None:
            if parent._children is None:
                parent._children = weakref.WeakSet()
            parent._children.add(self)
            if parent._deadline is not None:
                self._deadline = parent._deadline if self._deadline is None else min(self._deadline, parent._deadline)
            if parent.cancelled:
                self.cancel(parent.reason, hard=parent.hard)

    def cancel(self, reason: str = "", *, hard: bool = False) -> None:
        """Cancels this token and its children; a second call only makes it hard: no time to clean up."""
        self._hard = self._hard or hard
        if self._cancelled:
            for child in list(self._children or ()) if hard else ():
                child.cancel(reason, hard=True)
            return
        self._reason = reason
        self._cancelled = True
        callbacks, self._callbacks = self._callbacks, {}
        errors: list[Exception] = []
        tellings: list[Callable[[], object]] = list(callbacks.values())
        tellings += [partial(child.cancel, reason, hard=hard) for child in self._children or ()]
        for tell in tellings:
            try:
                tell()
            except Exception as error:  # the others are told all the same
                errors.append(error)
        if errors:
            raise errors[0]

    @property
    def cancelled(self) -> bool:
        return self._cancelled

    @property
    def hard(self) -> bool:
        """Whether what is cancelled gets no time to clean up."""
        return self._hard

    @property
    def reason(self) -> str:
        return self._reason

    @property
    def remaining(self) -> float | None:
        """Seconds until the deadline, never below 0; None without one."""
        return None if self._deadline is None else max(0.0, self._deadline - self._monotonic())

    def bound(self, seconds: float) -> None:
        """Brings the deadline forward to so many seconds from now; nothing is cancelled by it."""
        deadline = self._monotonic() + seconds
        self._deadline = deadline if self._deadline is None else min(self._deadline, deadline)

    def child(self, *, timeout: float | None = None) -> CancelToken:
        """A token that is cancelled with this one and bounded by its deadline."""
        return CancelToken(timeout=timeout, monotonic=self._monotonic, parent=self)

    def on_cancel(self, callback: Callable[[], object]) -> Callable[[], object]:
        """Calls back, once, when the token is cancelled, at once if it is already; answers what takes that back."""
        if self.cancelled:
            callback()
            return _nothing
        key = object()
        self._callbacks[key] = callback
        return lambda: self._callbacks.pop(key, None)

    async def wait(self) -> None:
        """Returns once the token is cancelled."""
        told: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        forget = self.on_cancel(lambda: None if told.done() else told.set_result(None))
        try:
            await told
        finally:
            forget()


def _nothing() -> None:
    """There is nothing to take back."""
