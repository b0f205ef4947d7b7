"""The system calls that no command in a sandbox may make, as a filter that bubblewrap loads. Made by libseccomp.

Denied calls fail with EPERM, so that programs notice and go on; clone3, io_uring and memfd look as if the kernel did
not have them, since programs then fall back to what a filter can look into. Unix sockets stay, since a network
namespace of its own holds none of the host's; with the host's network there are none, for they would reach the host's
abstract ones.
"""

from __future__ import annotations

import ctypes
import errno
import os
import tempfile
from functools import cache

from greenroom.runtime.errors import SandboxUnavailable

DENIED = """
acct add_key adjtimex bpf chroot clock_adjtime clock_settime delete_module fanotify_init finit_module fsconfig fsmount
fsopen fspick init_module ioperm iopl kcmp kexec_file_load kexec_load keyctl lookup_dcookie mount mount_setattr
move_mount move_pages name_to_handle_at nfsservctl open_by_handle_at open_tree perf_event_open personality pidfd_getfd
pivot_root process_madvise process_vm_readv process_vm_writev ptrace quotactl quotactl_fd reboot request_key
setdomainname sethostname setns settimeofday swapoff swapon syslog umount umount2 unshare userfaultfd vhangup
"""
"""No program that does its work in a workspace needs them; most have been a way out of one somewhere."""

ABSENT = ("clone3", "io_uring_setup", "io_uring_enter", "io_uring_register", "memfd_create", "memfd_secret")
"""memfd: its memory belongs to no process, and no bound of ours would see it."""

OF_OTHERS = (("sched_setscheduler", 0), ("sched_setparam", 0), ("sched_setattr", 0), ("sched_setaffinity", 0))
"""Calls that may change the caller alone, and the argument that names another process; so may setpriority, ioprio_set
and prlimit. Else a command could starve the process that keeps it."""

SOCKET_FAMILIES = (1, 2, 10, 16)
"""AF_UNIX, AF_INET, AF_INET6, AF_NETLINK; not AF_VSOCK and AF_ALG, which know nothing of namespaces."""

AF_UNIX = 1
LAST_FAMILY = 64
NEW_NAMESPACES = 0x7E020080
"""CLONE_NEWTIME, NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET."""

TERMINAL_COMMANDS = (0x5412, 0x541C)
"""TIOCSTI and TIOCLINUX: they type into the terminal of whoever started us."""

ALLOW = 0x7FFF0000
UNEQUAL, EQUAL, AT_LEAST, MASKED_EQUAL = 1, 4, 5, 7


class _Comparison(ctypes.Structure):
    _fields_ = [
        ("arg", ctypes.c_uint),
        ("op", ctypes.c_int),
        ("a", ctypes.c_uint64),
        ("b", ctypes.c_uint64),
    ]  # ctypes reads it so


@cache
def seccomp_program(*, network: bool) -> bytes:
    """The filter as the BPF program that bubblewrap takes; raises SandboxUnavailable without libseccomp.

    network: whether commands share the host's.
    """
    try:
        lib = ctypes.CDLL("libseccomp.so.2", use_errno=True)
    except OSError as error:
        raise SandboxUnavailable(
            f"libseccomp cannot be loaded: {error}", hint="Install it: apt-get install libseccomp2"
        ) from error
    lib.seccomp_init.restype = ctypes.c_void_p
    context = ctypes.c_void_p(lib.seccomp_init(ctypes.c_uint32(ALLOW)))
    try:
        for name in DENIED.split():
            _deny(lib, context, name, errno.EPERM)
        for name in ABSENT:
            _deny(lib, context, name, errno.ENOSYS)
        allowed = set(SOCKET_FAMILIES) - ({AF_UNIX} if network else set())
        for family in set(range(LAST_FAMILY)) - allowed:
            _deny(lib, context, "socket", errno.EPERM, _Comparison(0, EQUAL, family, 0))
        _deny(lib, context, "socket", errno.EPERM, _Comparison(0, AT_LEAST, LAST_FAMILY, 0))
        for name, position in OF_OTHERS:
            _deny(lib, context, name, errno.EPERM, _Comparison(position, UNEQUAL, 0, 0))
        for name in ("setpriority", "ioprio_set"):
            _deny(lib, context, name, errno.EPERM, _Comparison(1, UNEQUAL, 0, 0))
        _deny(lib, context, "prlimit64", errno.EPERM, _Comparison(0, UNEQUAL, 0, 0), _Comparison(2, UNEQUAL, 0, 0))
        for bit in range(32):
            flag = 1 << bit
            if flag & NEW_NAMESPACES:
                _deny(lib, context, "clone", errno.EPERM, _Comparison(0, MASKED_EQUAL, flag, flag))
        for command in TERMINAL_COMMANDS:
            _deny(lib, context, "ioctl", errno.EPERM, _Comparison(1, MASKED_EQUAL, 0xFFFFFFFF, command))
        with tempfile.TemporaryFile() as file:
            _check(lib.seccomp_export_bpf(context, file.fileno()), "export")
            file.seek(0)
            return file.read()
    finally:
        lib.seccomp_release(context)


def _deny(lib: ctypes.CDLL, context: ctypes.c_void_p, name: str, number: int, *when: _Comparison) -> None:
    """Calls that this machine's architecture, or this libseccomp, does not know need no rule."""
    call = lib.seccomp_syscall_resolve_name(name.encode())
    if call < 0:
        return
    action = ctypes.c_uint32(0x00050000 | number)
    comparisons = (_Comparison * len(when))(*when)
    _check(lib.seccomp_rule_add_array(context, action, call, len(when), comparisons), name)


def _check(result: int, what: str) -> None:
    if result < 0:
        raise SandboxUnavailable(f"libseccomp refused {what}: {os.strerror(-result)}")
