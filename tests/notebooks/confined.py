"""Confines itself, then becomes a command: `unshare ... python confined.py FOLDER CGROUP REFUSED COMMAND ...`.

Standard library only; started by `tests.notebooks.restricted`, whose `Container` says what is there and what is not.
"""

from __future__ import annotations

import ctypes
import errno
import os
import re
import struct
import subprocess
import sys
from pathlib import Path

HOME, WORK = Path("/srv/home"), Path("/srv/home/work")
CORES = 2
SHM_BYTES = 64 << 20
# x86-64's numbers of what may be refused
CALLS = {"ptrace": 101, "process_vm_readv": 310, "process_vm_writev": 311, "memfd_create": 319, "pidfd_open": 434}
_COMPILES = re.compile(
    r"([\w.]+-)*(gcc|g\+\+|cc|c\+\+|c89|c99|cpp|clang|clang\+\+|clang-cl|tcc|nvcc|icp?x|ld(\.(bfd|gold|lld))?|gold|lld|as|make|cmake|"
    r"ninja)(-[\d.]+)?"
)
_PR_CAPBSET_DROP, _PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP, _PR_CAP_AMBIENT = 24, 38, 22, 47
_AMBIENT_CLEAR_ALL = 4
_SECCOMP_FILTER = 2
_X86_64 = 0xC000003E
_LOAD, _JUMP_IF_EQUAL, _RETURN = 0x20, 0x15, 0x06
_ALLOW, _ERRNO, _KILL = 0x7FFF0000, 0x00050000, 0x80000000


def mount(*words: str | Path) -> None:
    subprocess.run(["mount", *words], check=True)


def place(folder: Path) -> None:
    """Puts what `folder` holds where the command looks for it, and a small tmpfs on /dev/shm."""
    mount("-t", "tmpfs", "-o", f"size={SHM_BYTES},mode=1777", "tmpfs", "/dev/shm")
    mount("--bind", folder, "/srv")
    mount("--bind", HOME, HOME)
    mount("-o", "remount,bind,ro", HOME)
    mount("--bind", folder / "home" / "work", WORK)
    mount("--bind", folder / "tmp", "/tmp")


def hide_compilers() -> None:
    """Leaves nothing that compiles on the PATH: a file that nobody may execute lies over each."""
    folders = {*os.environ["PATH"].split(":"), "/bin", "/usr/bin", "/usr/local/bin"}
    found = {path.resolve() for each in folders for path in Path(each).glob("*") if _COMPILES.fullmatch(path.name)}
    for path in found:
        mount("--bind", "/dev/null", path)


def refuse(calls: list[str]) -> None:
    """Answers these system calls with EPERM, here and in all children."""
    numbers = [CALLS[name] for name in calls]
    program = [(_LOAD, 0, 0, 4), (_JUMP_IF_EQUAL, 1, 0, _X86_64), (_RETURN, 0, 0, _KILL), (_LOAD, 0, 0, 0)]
    program += [(_JUMP_IF_EQUAL, len(numbers) - at, 0, number) for at, number in enumerate(numbers)]
    program += [(_RETURN, 0, 0, _ALLOW), (_RETURN, 0, 0, _ERRNO | errno.EPERM)]
    instructions = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *one) for one in program))
    filter_ = ctypes.create_string_buffer(struct.pack("@HP", len(program), ctypes.addressof(instructions)))
    prctl(_PR_SET_NO_NEW_PRIVS, 1)
    prctl(_PR_SET_SECCOMP, _SECCOMP_FILTER, ctypes.addressof(filter_))


def give_up_capabilities() -> None:
    """What is executed next is root by name alone."""
    for number in range(int(Path("/proc/sys/kernel/cap_last_cap").read_text()) + 1):
        prctl(_PR_CAPBSET_DROP, number)
    prctl(_PR_CAP_AMBIENT, _AMBIENT_CLEAR_ALL)


def prctl(option: int, *arguments: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    padded = [ctypes.c_ulong(each) for each in (*arguments, 0, 0, 0, 0)[:4]]
    if libc.prctl(option, *padded) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}): {os.strerror(ctypes.get_errno())}")


if __name__ == "__main__":
    folder, cgroup, refused, *command = sys.argv[1:]
    if cgroup:
        Path(cgroup, "cgroup.procs").write_text("0")
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:CORES])
    place(Path(folder))
    hide_compilers()
    os.chdir(WORK)
    give_up_capabilities()
    refuse(refused.split(","))
    os.environ["PATH"] = "/srv/venv/bin:/usr/local/bin:/usr/bin:/bin"
    os.execvp(command[0], command)
