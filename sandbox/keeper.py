"""The keeper: a small process that owns all commands of one sandbox. Run as a script, alone (python -I -S), no imports
of ours: it may later be PID 1 of a namespace.

It speaks over one SOCK_SEQPACKET socket, a JSON object per packet:

    owner -> keeper   {"run": ID, "argv": [...], "cwd": DIR, "env": {...}}   with one descriptor: stdout and stderr
                      {"kill": ID}                                           the command's whole tree: TERM, then KILL
    keeper -> owner   {"ready": PID}
                      {"exit": ID, "status": WAIT_STATUS}                    the command's own process has ended
                      {"failed": ID, "error": TEXT}                          it could not be started
                      {"gone": ID}                                           nothing of its tree is left

Each command gets a minder: a child of ours that is a subreaper, so that whatever the command leaves behind (also under
setsid) stays below the minder and can be found and killed. When the socket closes, because the owner ended in whatever
way, everything is killed at once.
"""

from __future__ import annotations

import array
import ctypes
import json
import os
import select
import signal
import socket
import sys
import time

TYPE_CHECKING = False  # typing's import would double the start-up time
if TYPE_CHECKING:
    from typing import Any, NoReturn

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
TERM_GRACE = 0.5  # seconds between TERM and KILL
MAX_PACKET = 1 << 20

libc = ctypes.CDLL(None, use_errno=True)


def descendants(pid: int) -> list[int]:
    """Pids below `pid`, found through /proc; the process itself is left out."""
    children: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                with open(f"/proc/{entry}/stat", "rb") as file:
                    stat = file.read()
            except OSError:
                continue
            parent = int(stat[stat.rindex(b")") + 2 :].split()[1])
            children.setdefault(parent, []).append(int(entry))
    found: list[int] = []
    todo = [pid]
    while todo:
        below = children.get(todo.pop(), [])
        found += below
        todo += below
    return found


def signal_all(pids: list[int], number: int) -> None:
    for pid in pids:
        try:
            os.kill(pid, number)
        except OSError:
            pass


def kill_below(pid: int) -> None:
    """Kills everything below `pid` until nothing new appears."""
    while True:
        pids = [one for one in descendants(pid) if not is_zombie(one)]
        if not pids:
            return
        signal_all(pids, signal.SIGKILL)
        time.sleep(0.002)


def is_zombie(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            stat = file.read()
    except OSError:
        return True
    return stat[stat.rindex(b")") + 2 : stat.rindex(b")") + 3] in (b"Z", b"X")


def mind(sock: socket.socket, request: dict[str, Any], output: int) -> NoReturn:
    """A minder's whole life: starts the command, tells how it ended, stays until its tree is empty."""
    parent = os.getppid()
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(0)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    gate_read, gate_write = os.pipe()  # carries an exec failure; closes by itself when exec works
    child = os.fork()
    if child == 0:
        os.close(gate_read)
        start(request, output, gate_write)
    os.close(gate_write)
    os.close(output)
    failure = b""
    while True:
        piece = os.read(gate_read, 4096)
        if not piece:
            break
        failure += piece
    os.close(gate_read)
    if failure:
        os.waitpid(child, 0)
        send(sock, {"failed": request["run"], "error": failure.decode("utf-8", "replace")})
        os._exit(0)
    while True:
        try:
            pid, status = os.waitpid(-1, 0)
        except ChildProcessError:
            os._exit(0)
        if pid == child:
            send(sock, {"exit": request["run"], "status": status})


def start(request: dict[str, Any], output: int, gate: int) -> NoReturn:
    """In the command's own process: the surroundings, then exec. Never returns."""
    try:
        os.setsid()
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGPIPE):
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, [])
        null = os.open("/dev/null", os.O_RDONLY)
        os.dup2(null, 0)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.set_inheritable(gate, False)
        os.closerange(3, gate)
        os.closerange(gate + 1, 65536)
        os.chdir(request["cwd"])
        os.execvpe(request["argv"][0], request["argv"], request["env"])
    except BaseException as error:
        os.write(gate, str(error).encode("utf-8", "replace")[:4000])
    os._exit(127)


def send(sock: socket.socket, message: dict[str, Any]) -> None:
    try:
        sock.send(json.dumps(message).encode())
    except OSError:
        pass  # the owner is gone; the keeper sees it too and ends everything


class Keeper:
    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.minders: dict[int, str] = {}  # minder's pid -> command id
        self.doomed: dict[str, float] = {}  # command id -> when TERM becomes KILL

    def serve(self) -> None:
        wake_read, wake_write = os.pipe()
        os.set_blocking(wake_write, False)
        os.set_inheritable(wake_read, False)
        signal.set_wakeup_fd(wake_write)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        send(self.sock, {"ready": os.getpid()})
        while True:
            wait: float | None = None
            if self.doomed:
                wait = max(0.0, min(self.doomed.values()) - time.monotonic())
            readable, _, _ = select.select([self.sock.fileno(), wake_read], [], [], wait)
            if wake_read in readable:
                os.read(wake_read, 4096)
            self.reap()
            self.execute_doomed()
            if self.sock.fileno() in readable and not self.receive():
                return

    def receive(self) -> bool:
        """One packet; False when the owner has gone."""
        try:
            data, ancillary, _, _ = self.sock.recvmsg(MAX_PACKET, socket.CMSG_SPACE(4))
        except OSError:
            return False
        if not data:
            return False
        descriptors = array.array("i")
        for level, kind, raw in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                descriptors.frombytes(raw[: len(raw) - len(raw) % descriptors.itemsize])
        request = json.loads(data)
        if "run" in request:
            self.run(request, descriptors[0])
        elif "kill" in request:
            self.doom(request["kill"])
        return True

    def run(self, request: dict[str, Any], output: int) -> None:
        pid = os.fork()
        if pid == 0:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            try:
                mind(self.sock, request, output)
            finally:
                os._exit(1)
        os.close(output)
        self.minders[pid] = request["run"]

    def doom(self, command: str) -> None:
        for pid, owner in self.minders.items():
            if owner == command:
                signal_all(descendants(pid), signal.SIGTERM)
                self.doomed[command] = time.monotonic() + TERM_GRACE
                return
        send(self.sock, {"gone": command})

    def execute_doomed(self) -> None:
        now = time.monotonic()
        for pid, command in list(self.minders.items()):
            if self.doomed.get(command, now + 1) <= now:
                kill_below(pid)
                self.doomed[command] = now + 0.05  # the minder ends by itself once its last child is reaped

    def reap(self) -> None:
        while True:
            try:
                pid, _ = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            command = self.minders.pop(pid, None)
            if command is not None:
                self.doomed.pop(command, None)
                send(self.sock, {"gone": command})


def main() -> None:
    sock = socket.socket(fileno=int(sys.argv[1]))
    sock.set_inheritable(False)
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        Keeper(sock).serve()
    finally:
        kill_below(os.getpid())


if __name__ == "__main__":
    main()
