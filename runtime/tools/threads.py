"""Plain functions in threads of their own: a tool that blocks holds up neither the loop nor the end of the process."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import Callable
from typing import Any


class ToolEnded(RuntimeError):
    """A tool tried to end the process, or raised what only an interpreter should."""


async def run_in_thread(function: Callable[[], Any]) -> Any:
    """Its result or exception. Cancelling stops the waiting, not the thread: nothing can stop a thread."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Any] = loop.create_future()
    context = contextvars.copy_context()

    def deliver(settle: Callable[[], None]) -> None:
        try:
            loop.call_soon_threadsafe(lambda: None if future.done() else settle())
        except RuntimeError:
            pass  # the loop has ended; nobody waits any more

    def work() -> None:
        try:
            made = context.run(function)
        except BaseException as error:  # whatever the function raised is its caller's to see
            failure = error if isinstance(error, Exception) else ToolEnded(f"{type(error).__name__}: {error}")
            if isinstance(error, StopIteration):  # no future takes one
                failure = ToolEnded(f"StopIteration: {error}")
            deliver(lambda: future.set_exception(failure))
        else:
            deliver(lambda: future.set_result(made))

    threading.Thread(target=work, name="greenroom-tool", daemon=True).start()
    return await future
