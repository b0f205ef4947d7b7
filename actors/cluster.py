"""Finding a Ray to work on, or starting one on this machine; and ending only what was started here."""

from __future__ import annotations

import logging
import os

import ray

from greenroom.actors.handles import SupervisorClient
from greenroom.actors.wire import SUPERVISOR
from greenroom.runtime.errors import ClusterError

OBJECT_STORE_BYTES = 128 * 1024 * 1024
"""Of a Ray started here: nothing large goes through it."""

HINTS = {
    "local": "See that this Python has a working ray, and that /tmp has free space",
    "auto": "Start one with `ray start --head`, or leave the address out to have one started here",
}


def ensure_ray(address: str | None, *, start: bool = True) -> bool:
    """Makes this process a driver of a Ray: the one it has, the one at `address`, a running one, or a new local one.

    `address` None takes RAY_ADDRESS, as Ray itself does.

    True when a local one was started here. Raises ClusterError; with `start=False` also when none is running.
    """
    if ray.is_initialized():
        return False
    address = address or os.environ.get("RAY_ADDRESS") or None
    os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")  # Ray would start every worker through uv
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # silences a notice about accelerators
    if address is not None and address != "local":
        _init(address)
        return False
    if address is None and _attach_if_running():
        return False
    if not start:
        raise ClusterError("no Ray is running", hint="Start one with `ray start --head`, or use --local")
    _init("local")
    return True


def _attach_if_running() -> bool:
    try:
        ray.init(address="auto", log_to_driver=False, logging_level=logging.ERROR)
    except ConnectionError:
        return False
    except Exception as error:
        raise ClusterError(
            f"a Ray seems to be running, but cannot be joined: {error}",
            hint="`ray stop` ends it; or give address='local'",
        ) from error
    return True


def _init(address: str) -> None:
    local = {
        "include_dashboard": False,
        "object_store_memory": OBJECT_STORE_BYTES,
    }
    try:
        ray.init(
            address=address, log_to_driver=False, logging_level=logging.ERROR, **(local if address == "local" else {})
        )
    except Exception as error:
        text = str(error).strip().splitlines()
        raise ClusterError(
            f"Ray cannot be {'started here' if address == 'local' else f'joined at {address!r}'}: "
            f"{text[0] if text else type(error).__name__}",
            hint=HINTS.get(address, 'With token authentication only address="auto" on a node of the cluster works'),
        ) from error


def find_pool(namespace: str) -> SupervisorClient | None:
    """The Supervisor of a pool on the Ray that runs here; None when there is no Ray or no pool. Starts nothing."""
    try:
        ensure_ray("auto", start=False)
        return SupervisorClient.find(SUPERVISOR, namespace)
    except ClusterError:
        return None
