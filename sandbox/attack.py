"""The attack of probe.py, run inside a sandbox by itself (python -I -S): what can be reached from here?

Reads targets.json beside it and prints one JSON object, {CHECK: [HOLDS, DETAIL]}; HOLDS is true when the attack failed.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import platform
import socket
import time
from functools import partial

TYPE_CHECKING = False  # typing's import would double the start-up time
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

libc = ctypes.CDLL(None, use_errno=True)
NUMBERS = {"x86_64": {"keyctl": 250, "unshare": 272}, "aarch64": {"keyctl": 219, "unshare": 97}}
IO_URING_SETUP = 425  # the same everywhere
CLONE_NEWUSER = 0x10000000
PTRACE_ATTACH = 16
AF_VSOCK = 40
PLACES = ("/", "/usr", "/bin", "/sbin", "/dev", "/opt/greenroom-python")
DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom", "/dev/tty", "/dev/pts", "/dev/console")


def syscall(number: int, *arguments: int) -> str | None:
    """None when the call went through, else the error's name."""
    if libc.syscall(ctypes.c_long(number), *(ctypes.c_long(argument) for argument in arguments)) >= 0:
        return None
    return errno.errorcode.get(ctypes.get_errno(), "?")


def fails(attempt: Callable[[], object]) -> list[Any]:
    try:
        return [False, f"it worked: {attempt()!r}"[:100]]
    except Exception as error:
        return [True, f"{type(error).__name__}: {error}"]


def first_that_worked(attempts: list[list[Any]]) -> list[Any]:
    return next((attempt for attempt in attempts if not attempt[0]), attempts[0])


def connect(family: int, address: Any) -> str:
    with socket.socket(family) as client:
        client.settimeout(2)
        client.connect(address)
    return "connected"


def read(path: str, wanted: str) -> str:
    with open(path) as file:
        found = file.read()
    if wanted not in found:
        raise OSError("not what was looked for")
    return "read"


def write(path: str) -> str:
    with open(path, "w") as file:
        file.write("x")
    return "written"


def signal_process(pid: int, started: str) -> str:
    with open(f"/proc/{pid}/stat") as file:
        if file.read().rsplit(")", 1)[1].split()[19] != started:
            raise OSError("it is another process")
    os.kill(pid, 0)
    return "signalled"


def status(name: str) -> str:
    with open("/proc/self/status") as file:
        return next(line.split()[1] for line in file if line.startswith(name + ":"))


def out_of_place(workspace: str) -> list[str]:
    """Mount points that do not belong in a sandbox, or are writable and should not be."""
    found = []
    with open("/proc/self/mountinfo") as file:
        for line in file:
            point, flags = line.split()[4], line.split()[5].split(",")
            ours = point in (workspace, "/tmp", "/dev/shm") or point == "/proc" or point.startswith(DEVICES)
            known = ours or point in PLACES or point.startswith(("/etc/", "/lib", "/run/greenroom"))
            if not known or not (ours or "ro" in flags):
                found.append(f"{point} {flags[0]}")
    return found


def main() -> None:
    with open("targets.json") as file:
        at = json.load(file)
    open("made", "w").close()
    own = {kind: os.readlink(f"/proc/self/ns/{kind}") for kind in at["namespaces"]}
    shared = [kind for kind, name in own.items() if name == at["namespaces"][kind]]
    environment = [name for name, value in os.environ.items() if at["mark"] in value]
    for path in at["outside"]:  # the other side looks whether any of it is there
        fails(partial(write, path))
    strange = out_of_place(at["workspace"])
    numbers = NUMBERS.get(platform.machine(), {})
    found = {
        "namespaces": [not shared, f"shared with this machine: {', '.join(shared) or 'none'}"],
        "host_processes": fails(lambda: signal_process(at["pid"], at["started"])),
        "loopback": fails(lambda: connect(socket.AF_INET, ("127.0.0.1", at["port"]))),
        "abstract_socket": fails(lambda: connect(socket.AF_UNIX, "\0" + at["abstract"])),
        "path_socket": fails(lambda: connect(socket.AF_UNIX, at["socket"])),
        "read_outside": first_that_worked([fails(partial(read, path, at["mark"])) for path in at["secrets"]]),
        "environment": [not environment, f"found: {environment}"],
        "vsock": fails(lambda: socket.socket(AF_VSOCK, socket.SOCK_STREAM)),
        "seccomp": [
            status("Seccomp") == "2" and status("NoNewPrivs") == "1",
            f"Seccomp {status('Seccomp')}, NoNewPrivs {status('NoNewPrivs')}",
        ],
        "capabilities": [int(status("CapEff"), 16) == 0 == int(status("CapBnd"), 16), f"CapEff {status('CapEff')}"],
        "mounts": [not strange, f"out of place: {strange}"],
    }
    traced = os.fork()
    if traced == 0:
        time.sleep(600)
        os._exit(0)
    ctypes.set_errno(0)
    went = libc.ptrace(PTRACE_ATTACH, traced, 0, 0) == 0
    found["ptrace"] = [not went, errno.errorcode.get(ctypes.get_errno(), "it worked")]
    os.kill(traced, 9)
    os.waitpid(traced, 0)
    parameters = ctypes.create_string_buffer(256)
    for name, number, arguments in (
        ("io_uring", IO_URING_SETUP, (1, ctypes.addressof(parameters))),
        ("keyctl", numbers.get("keyctl", -1), (0, -3, 1)),
        ("user_namespace", numbers.get("unshare", -1), (CLONE_NEWUSER,)),
    ):
        refused = syscall(number, *arguments) if number > 0 else None
        told = "it worked" if number > 0 else f"the calls of {platform.machine()} are not known here"
        found[name] = [refused is not None, refused or told]
    print(json.dumps(found))


if __name__ == "__main__":
    main()
