"""The keeper: a small process that owns all commands of one sandbox. Run by itself (python -I -S), no import of ours:
under bubblewrap it is PID 1 of its namespace, and this file is all of ours that is in there.

    keeper.py SOCKET LIMITS         a descriptor, and JSON: {} for none, or bounds that hold from here down:
                                    {"processes": N, "file_bytes": N, "data_bytes": N, "memory_bytes": N}

It speaks over one SOCK_SEQPACKET socket, a JSON object per packet:

    owner -> keeper   {"run": ID, "argv": [...], "cwd": DIR, "home": DIR, "env": {...}}
                                                                             with one descriptor, its stdout and stderr,
                                                                             and perhaps another, its script; it begins
                                                                             in home when cwd is gone
                      {"kill": ID}                                           the command's whole tree: TERM, then KILL
                      {"stop": NUMBER}                                       everything that runs, until {"go": NUMBER}
                      {"spill": ID}                                          asks for a file for the command's output
    keeper -> owner   {"ready": PID}
                      {"exit": ID, "status": WAIT_STATUS, "cwd": DIR}        the command's own process has ended, its
                                                                             shell in that folder; null: not known
                      {"oom": ID}                                            it is being killed: too much memory
                      {"failed": ID, "error": TEXT}                          it could not be started
                      {"gone": ID}                                           nothing of its tree is left
                      {"stopped": NUMBER}, {"going": NUMBER}                 it is so
                      {"spilled": ID, "path": PATH}                          with its descriptor; null: there is none

Each command gets a minder: a child of ours that is a subreaper, so that whatever the command leaves behind (also under
setsid) stays below the minder and can be found and killed. When the socket closes, because the owner ended in whatever
way, everything is killed at once.
"""

from __future__ import annotations

import array
import ctypes
import fcntl
import json
import os
import resource
import select
import signal
import socket
import sys
import time

TYPE_CHECKING = False  # typing's import would double the start-up time
if TYPE_CHECKING:
    from typing import Any, NoReturn

PR_SET_PDEATHSIG = 1
PR_SET_DUMPABLE = 4
PR_SET_CHILD_SUBREAPER = 36
TERM_GRACE = 0.5  # seconds between TERM and KILL
LOOK_AGAIN = 0.05  # seconds between two looks meanwhile at what has had no TERM yet
STOP_PATIENCE = 2.0  # seconds in which everything has stopped, or is taken to have
SPILL_FILES = 8  # the latest files of output that are kept
WATCH_INTERVAL = 0.2  # seconds between two looks at the memory of all commands together
MAX_TEMPORARY_FILES = 200_000  # beyond it a command that goes on making more is ended
PAGE = resource.getpagesize()
MAX_PACKET = 1 << 20
SCRIPT = 3  # where a command finds its script
FIRST_WORDS = 4  # where its shell reads what it does before the command, and forgets it
STOP_AT_EXIT = b"exec 4<&-; unset BASH_ENV; trap 'builtin kill -STOP $$' EXIT\n"  # so that mind() can look at it

libc = ctypes.CDLL(None, use_errno=True)


class Processes:
    """One look at /proc: who is whose child, and how much memory each holds."""

    def __init__(self) -> None:
        self.children: dict[int, list[int]] = {}
        self.stopped: set[int] = set()
        self.memory: dict[int, int] = {}
        for entry in os.listdir("/proc"):
            if entry.isdigit():
                try:
                    with open(f"/proc/{entry}/stat", "rb") as file:
                        fields = file.read().rpartition(b")")[2].split()
                except OSError:
                    continue
                if fields[0] not in (b"Z", b"X") or int(fields[17]) > 1:  # or only its first thread has ended
                    self.children.setdefault(int(fields[1]), []).append(int(entry))
                    self.memory[int(entry)] = int(fields[21]) * PAGE
                    if fields[0] in (b"T", b"t"):
                        self.stopped.add(int(entry))

    def below(self, pid: int) -> list[int]:
        """Pids below `pid`, without those that have ended; the process itself is left out."""
        found: list[int] = []
        todo = [pid]
        while todo:
            children = self.children.get(todo.pop(), [])
            found += children
            todo += children
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
        pids = Processes().below(pid)
        if not pids:
            return
        signal_all(pids, signal.SIGKILL)
        time.sleep(0.002)


def shared_memory() -> int:
    """Bytes of System V shared memory, which belong to no process."""
    try:
        with open("/proc/sysvipc/shm") as file:
            return sum(int(line.split()[14]) for line in file.readlines()[1:])
    except (OSError, ValueError, IndexError):
        return 0


def temporary_files() -> int:
    """Files in the sandbox's file systems in memory, each of which costs the machine a kilobyte beside its bytes."""
    total = 0
    for folder in ("/tmp", "/dev/shm"):
        found = os.statvfs(folder)
        total += found.f_files - found.f_ffree
    return total


def mind(sock: socket.socket, request: dict[str, Any], output: int, script: int | None) -> NoReturn:
    """A minder's whole life: starts the command, tells how it ended, stays until its tree is empty."""
    parent = os.getppid()
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    signal.signal(signal.SIGUSR1, end_all)
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGUSR1, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(0)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])  # one that comes to the child too early waits for it
    gate_read, gate_write = os.pipe()  # carries an exec failure; closes by itself when exec works
    try:
        child = os.fork()
    except OSError as error:  # as many processes as there may be
        send(sock, {"failed": request["run"], "error": error.strerror})
        os._exit(0)
    if child == 0:
        os.close(gate_read)
        start(request, output, script, gate_write)
    os.close(gate_write)
    os.close(output)
    if script is not None:
        os.close(script)
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
    cwd = None
    while True:
        try:
            pid, status = os.waitpid(-1, os.WUNTRACED)
        except ChildProcessError:
            os._exit(0)
        if pid == child and os.WIFSTOPPED(status):
            cwd = folder_of(child)
            signal_all([child], signal.SIGCONT)
        elif pid == child:
            send(sock, {"exit": request["run"], "status": status, "cwd": cwd})


def end_all(*_: object) -> NoReturn:
    """The keeper is gone: this minder's tree goes too."""
    kill_below(os.getpid())
    os._exit(0)


def folder_of(pid: int) -> str | None:
    """The folder that a process is in; None when it is gone."""
    try:
        found = os.readlink(f"/proc/{pid}/cwd")
    except OSError:
        return None
    return None if found.endswith(" (deleted)") else found


def start(request: dict[str, Any], output: int, script: int | None, gate: int) -> NoReturn:
    """In the command's own process: the surroundings, then exec. Never returns."""
    try:
        os.setsid()
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        for stop in (signal.SIGTERM, signal.SIGINT, signal.SIGPIPE, signal.SIGUSR1):
            signal.signal(stop, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, [])
        null = os.open("/dev/null", os.O_RDONLY)
        words, words_end = os.pipe()
        os.write(words_end, STOP_AT_EXIT)
        wanted = {0: null, 1: output, 2: output, SCRIPT: null if script is None else script, FIRST_WORDS: words}
        moved = {number: fcntl.fcntl(fd, fcntl.F_DUPFD, 16) for number, fd in wanted.items()}  # out of the way
        gate = fcntl.fcntl(gate, fcntl.F_DUPFD_CLOEXEC, 16)
        for number, fd in moved.items():
            os.dup2(fd, number)
        if script is None:
            os.close(SCRIPT)
        os.closerange(FIRST_WORDS + 1, gate)
        os.closerange(gate + 1, 65536)
        try:
            os.chdir(request["cwd"])
        except OSError as error:
            os.chdir(request["home"])
            os.write(1, f"[{request['cwd']}: {error.strerror}; this runs in {request['home']}]\n".encode())
        env = {"BASH_ENV": f"/dev/fd/{FIRST_WORDS}", **request["env"]}
        os.execvpe(request["argv"][0], request["argv"], env)
    except BaseException as error:
        os.write(gate, str(error).encode("utf-8", "replace")[:4000])
    os._exit(127)


def send(sock: socket.socket, message: dict[str, Any]) -> None:
    try:
        sock.send(json.dumps(message).encode())
    except OSError:
        pass  # the owner is gone; the keeper sees it too and ends everything


class Keeper:
    def __init__(self, sock: socket.socket, memory_bytes: int) -> None:
        self.sock = sock
        self.memory_bytes = memory_bytes
        self.minders: dict[int, str] = {}  # minder's pid -> command id
        self.doomed: dict[str, float] = {}  # command id -> when TERM becomes KILL
        self.told: dict[str, set[int]] = {}  # of these, the pids that got their TERM
        self.look_again = 0.0
        self.killed: set[str] = set()  # of these, whose tree was killed already
        self.temporary_files = 0
        self.next_look = 0.0
        self.stopped: list[int] = []  # pids, minders first
        self.spilled: list[str] = []  # paths

    def serve(self) -> None:
        wake_read, wake_write = os.pipe()
        os.set_blocking(wake_write, False)
        os.set_inheritable(wake_read, False)
        signal.set_wakeup_fd(wake_write)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        send(self.sock, {"ready": os.getpid()})
        while True:
            wait: float | None = None
            if self.memory_bytes and self.minders:
                wait = WATCH_INTERVAL
            if self.doomed:
                soonest = min(LOOK_AGAIN, max(0.0, min(self.doomed.values()) - time.monotonic()))
                wait = soonest if wait is None else min(wait, soonest)
            readable, _, _ = select.select([self.sock.fileno(), wake_read], [], [], wait)
            if wake_read in readable:
                os.read(wake_read, 4096)
            self.reap()
            self.watch()
            self.execute_doomed()
            if self.sock.fileno() in readable and not self.receive():
                return

    def receive(self) -> bool:
        """One packet; False when the owner has gone."""
        try:
            data, ancillary, _, _ = self.sock.recvmsg(MAX_PACKET, socket.CMSG_SPACE(2 * array.array("i").itemsize))
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
            self.run(request, descriptors[0], descriptors[1] if len(descriptors) > 1 else None)
        elif "kill" in request:
            self.doom(request["kill"])
        elif "spill" in request:
            self.spill(request["spill"])
        elif "stop" in request:
            self.stop()
            send(self.sock, {"stopped": request["stop"]})
        elif "go" in request:
            signal_all(self.stopped[::-1], signal.SIGCONT)
            self.stopped.clear()
            send(self.sock, {"going": request["go"]})
        return True

    def run(self, request: dict[str, Any], output: int, script: int | None) -> None:
        try:
            pid = os.fork()
        except OSError as error:
            send(self.sock, {"failed": request["run"], "error": error.strerror})
            send(self.sock, {"gone": request["run"]})
            pid = -1
        if pid == 0:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            try:
                mind(self.sock, request, output, script)
            finally:
                os._exit(1)
        for fd in (output, script):
            if fd is not None:
                os.close(fd)
        if pid > 0:
            self.minders[pid] = request["run"]

    def watch(self) -> None:
        """Ends the command that holds the most memory when all of them together hold too much."""
        if not self.memory_bytes or not self.minders or time.monotonic() < self.next_look:
            return
        self.next_look = time.monotonic() + WATCH_INTERVAL
        seen = Processes()
        used = {pid: sum(seen.memory.get(one, 0) for one in seen.below(pid)) for pid in self.minders}
        files, before = temporary_files(), self.temporary_files
        self.temporary_files = files
        too_many = files > MAX_TEMPORARY_FILES and files > before
        if sum(used.values()) + shared_memory() > self.memory_bytes or too_many:
            worst = max(used, key=lambda pid: used[pid])
            send(self.sock, {"oom": self.minders[worst]})
            kill_below(worst)
            self.temporary_files = temporary_files()  # what it made until now is not the next one's doing

    def spill(self, command: str) -> None:
        """A file that the owner fills and commands can read; in the sandbox's own room, where it has one."""
        path = f"/tmp/output-{command}-{os.urandom(4).hex()}.txt"
        try:
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        except OSError:
            send(self.sock, {"spilled": command, "path": None})
            return
        self.spilled.append(path)
        while len(self.spilled) > SPILL_FILES:
            remove(self.spilled.pop(0))
        try:
            socket.send_fds(self.sock, [json.dumps({"spilled": command, "path": path}).encode()], [fd])
        except OSError:
            pass  # as in send()
        os.close(fd)

    def stop(self) -> None:
        """Stops whatever runs, the minders first: they would let a shell of theirs go on."""
        deadline = time.monotonic() + STOP_PATIENCE
        while time.monotonic() < deadline:  # one that waits for a disk stops later
            seen = Processes()
            mine = list(self.minders) + [pid for minder in self.minders for pid in seen.below(minder)]
            running = [pid for pid in mine if pid in seen.memory and pid not in seen.stopped]
            if not running:
                return
            fresh = [pid for pid in running if pid not in self.stopped]
            self.stopped += fresh
            signal_all(running, signal.SIGSTOP)
            if not fresh:
                time.sleep(0.001)  # they were told already

    def doom(self, command: str) -> None:
        for pid, owner in self.minders.items():
            if owner == command:
                self.doomed[command] = time.monotonic() + TERM_GRACE
                self.told[command] = set()
                self.tell(pid, command)
                self.look_again = time.monotonic() + LOOK_AGAIN
                return
        send(self.sock, {"gone": command})

    def tell(self, minder: int, command: str) -> None:
        """TERM to what has none yet: a command may be starting others, or be about to start, when it is doomed."""
        fresh = [pid for pid in Processes().below(minder) if pid not in self.told[command]]
        self.told[command].update(fresh)
        signal_all(fresh, signal.SIGTERM)

    def execute_doomed(self) -> None:
        now = time.monotonic()
        look = now >= self.look_again
        if look:
            self.look_again = now + LOOK_AGAIN
        for pid, command in list(self.minders.items()):
            if command not in self.doomed:
                continue
            if self.doomed[command] > now:
                if look:
                    self.tell(pid, command)
                continue
            kill_below(pid)
            if command in self.killed:  # its minder does not end by itself: a command has stopped it
                send(self.sock, {"exit": command, "status": int(signal.SIGKILL)})
                signal_all([pid], signal.SIGKILL)
            self.killed.add(command)
            self.doomed[command] = now + 0.2

    def sweep(self) -> None:
        """Ends what a minder left behind that was itself ended by a command: nobody else would look after it."""
        while True:
            strays = [pid for pid in Processes().children.get(os.getpid(), []) if pid not in self.minders]
            if not strays:
                return
            for pid in strays:
                kill_below(pid)
            signal_all(strays, signal.SIGKILL)
            time.sleep(0.002)  # until they have really ended

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
                self.sweep()
                self.doomed.pop(command, None)
                self.told.pop(command, None)
                self.killed.discard(command)
                send(self.sock, {"gone": command})


def remove(path: str) -> None:
    try:
        os.unlink(path)
    except OSError:
        pass


def bound(limits: dict[str, int]) -> None:
    """Limits of everything that is started from here on; core files are never written."""
    kinds = {
        "processes": resource.RLIMIT_NPROC,
        "file_bytes": resource.RLIMIT_FSIZE,
        "data_bytes": resource.RLIMIT_DATA,
    }
    for name, kind in kinds.items():
        if limits.get(name):
            resource.setrlimit(kind, (limits[name], limits[name]))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def main() -> None:
    sock = socket.socket(fileno=int(sys.argv[1]))
    sock.set_inheritable(False)
    limits = json.loads(sys.argv[2])
    bound(limits)
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    libc.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)  # no command may look into this process or speak for it
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    keeper = Keeper(sock, limits.get("memory_bytes", 0))
    try:
        keeper.serve()
    finally:
        kill_below(os.getpid())
        for path in keeper.spilled:
            remove(path)


if __name__ == "__main__":
    main()
