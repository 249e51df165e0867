"""A sandbox for programs that a model wrote, made of bubblewrap and resource limits.

A program sees a read-only file system of `/usr`, the Python installation and its packages: no home, no `/etc`, no
`/proc`, no network, no environment. `/tmp` is a small file system in memory. It runs as a user of its own (started by
root: one that nothing else uses) in namespaces of its own, without capabilities and without the right to make further
user namespaces. Some system calls are refused: shared memory, which no limit counts, the keyrings of the user who
trains, and sockets that no namespace confines. CPU time, address space, file size, open files and the number of
processes are limited, each process of a program by itself; when the wall time is over, or the program has ended,
whatever it started is killed.

Not covered: bugs of the kernel, the load on CPU and memory bandwidth within the limits, and reading what lies in the
Python installation. Processes of one program may use `memory_mb` each, so `PROCESSES` times that together.
"""

from __future__ import annotations

import contextlib
import errno
import importlib.util
import json
import os
import platform
import random
import shutil
import signal
import socket
import struct
import subprocess
import sys
import sysconfig
import tempfile
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import psutil

from ..validation import require_number, require_whole
from .dialogue import read_some

# Processes and threads of one program, the sandbox's own one or two among them.
PROCESSES = 8
# Bytes of one file, and of all files in /tmp together.
FILES = 16 << 20
_CHECKER_MB = 1024

# By machine: its name in a seccomp filter, the number of `socket`, and those of shmget, semget, msgget, add_key,
# request_key, keyctl and io_uring_setup, the last of which would open sockets past the filter.
_SYSTEM_CALLS = {
    "x86_64": (0xC000003E, 41, (29, 64, 68, 248, 249, 250, 425)),
    "aarch64": (0xC00000B7, 198, (194, 190, 186, 217, 218, 219, 425)),
}

_INSIDE = Path(__file__).with_name("inside.py")
_ENVIRONMENT = {
    "HOME": "/tmp",
    "PATH": "/usr/bin:/bin",
    "LANG": "C.UTF-8",
    # a thread per core would count as processes, and take address space
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
}


@dataclass(frozen=True)
class Sandbox:
    """Starts programs within limits.

    Args:
        seconds: CPU time of a program, and the wall time of one run, above 0.
        memory_mb: address space of each of its processes in MiB, at least 128.
        allow_unsandboxed: where bubblewrap is missing or does not work, run programs without it: as the user who
            trains, with the files and the network of that user. The limits still hold, but for the number of
            processes.

    Raises:
        ValueError: a value out of range, or no bubblewrap and `allow_unsandboxed` is False.
    """

    seconds: float = 10.0
    memory_mb: int = 1024
    allow_unsandboxed: bool = False

    def __post_init__(self) -> None:
        require_number("seconds", self.seconds, above=0)
        require_whole("memory_mb", self.memory_mb, minimum=128)
        problem = self._problem
        if problem is None:
            return
        if not self.allow_unsandboxed:
            raise ValueError(
                f"Programs that a model wrote are run in a sandbox only, and {problem}: install bubblewrap "
                "(apt install bubblewrap), or set allow_unsandboxed_code=True to run them as you."
            )
        warnings.warn(
            f"Programs that the model wrote run without a sandbox, since {problem}: they can read, change and send "
            "what you can.",
            stacklevel=3,
        )

    def run(self, program: str, text: str, output_limit: int) -> str | None:
        """What `program` prints when `text` is its standard input.

        Returns:
            The output, or None if the program failed, took too long or printed more than `output_limit` bytes.
        """
        with tempfile.TemporaryFile() as stdin:
            stdin.write(text.encode("utf-8", "replace"))
            stdin.seek(0)
            process = self.start("run", program, stdin=stdin.fileno())
        try:
            output = read_all(process, time.monotonic() + self.seconds, output_limit)
            # Standard output may end before the program does.
            ended = output is not None and _wait(process, 1.0)
        finally:
            self.kill(process)
        if output is None or not ended or process.returncode != 0:
            return None
        return output.decode("utf-8", "replace")

    def start(
        self, do: str, text: str, *, stdin: int, stdout: int = subprocess.PIPE, request_fd: int | None = None
    ) -> subprocess.Popen[bytes]:
        """Start one of the jobs of `inside.py`: "run" or "serve" the program `text`, or "check" the test suite `text`.

        `request_fd` is inherited by the process. The caller reads the output and calls `kill`.
        """
        job: dict[str, Any] = {
            "do": do,
            "text": text,
            "request_fd": request_fd,
            "limits": [
                self.seconds,
                # a test suite brings numpy, whatever the program may use
                max(self.memory_mb, _CHECKER_MB if do == "check" else 0) << 20,
                FILES,
                # without the sandbox, all processes of the user would count
                PROCESSES if self.sandboxed else None,
            ],
            "paths": _package_folders(),
        }
        # The interpreter reads the job from an unlinked file: neither its size nor a program that dies early blocks.
        with (
            _file(json.dumps(job).encode("ascii")) as job_fd,
            _file(_filter() if self.sandboxed else b"") as filter_fd,
        ):
            command = [_interpreter(), "-I", "-S", "-X", "utf8", "-c", self._source, str(job_fd)]
            return subprocess.Popen(
                [*(_wrapper(filter_fd) if self.sandboxed else []), *command],
                stdin=stdin,
                stdout=stdout,
                stderr=subprocess.DEVNULL,
                env=_ENVIRONMENT,
                cwd="/" if self.sandboxed else tempfile.gettempdir(),
                start_new_session=True,
                pass_fds=[
                    job_fd,
                    *([filter_fd] if self.sandboxed else []),
                    *([] if request_fd is None else [request_fd]),
                ],
            )

    def kill(self, process: subprocess.Popen[bytes]) -> None:
        """End a process of `start` and all that it started.

        In the sandbox they share a PID namespace, which ends as a whole. Without it, a process that has left both the
        session and its parent escapes.
        """
        # Before the process is reaped: until then nothing else can have its number.
        if process.returncode is None:
            # Stopped, it starts nothing more. Early on, bubblewrap's child does not end with bubblewrap yet.
            os.kill(process.pid, signal.SIGSTOP)
            parent = psutil.Process(process.pid)
            while parent.status() not in (psutil.STATUS_STOPPED, psutil.STATUS_ZOMBIE):
                time.sleep(0.001)
            children = parent.children(recursive=True)
            os.killpg(process.pid, signal.SIGKILL)
            for child in children:
                with contextlib.suppress(psutil.Error):
                    child.kill()
            process.wait()
        if process.stdout is not None:
            process.stdout.close()

    @property
    def sandboxed(self) -> bool:
        """Whether programs run under bubblewrap."""
        return self._problem is None

    @cached_property
    def _source(self) -> str:
        return _INSIDE.read_text(encoding="utf-8")

    @cached_property
    def _problem(self) -> str | None:
        """Why the sandbox does not work here, or None."""
        missing = [name for name in ("bwrap", *(["setpriv"] if os.geteuid() == 0 else [])) if not shutil.which(name)]
        if missing:
            return f"{' and '.join(missing)} cannot be found"
        if platform.machine() not in _SYSTEM_CALLS:
            return f"it knows the system calls of {' and '.join(_SYSTEM_CALLS)} alone, not of {platform.machine()}"
        script = f"import sys; sys.path += {_package_folders()}; import numpy; print('works')"
        try:
            with _file(_filter()) as filter_fd:
                done = subprocess.run(
                    [*_wrapper(filter_fd), _interpreter(), "-I", "-S", "-c", script],
                    stdin=subprocess.DEVNULL,
                    capture_output=True,
                    text=True,
                    timeout=60,
                    env=_ENVIRONMENT,
                    pass_fds=[filter_fd],
                )
        except subprocess.TimeoutExpired:
            return "bwrap does not answer"
        if done.stdout != "works\n":
            return f"bwrap does not work here ({' '.join(done.stderr.split()) or f'exit code {done.returncode}'})"
        return None


def _wait(process: subprocess.Popen[bytes], seconds: float) -> bool:
    """Whether the process ends within `seconds`; it is not reaped."""
    deadline = time.monotonic() + seconds
    while psutil.Process(process.pid).status() != psutil.STATUS_ZOMBIE:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.002)
    return True


def read_all(process: subprocess.Popen[bytes], deadline: float, limit: int) -> bytes | None:
    """What the process writes to its standard output, or None past the deadline (monotonic) or the limit (bytes)."""
    assert process.stdout is not None
    output = bytearray()
    while True:
        chunk = read_some(process.stdout.fileno(), deadline)
        if chunk is None:
            return None
        if not chunk:
            return bytes(output)
        output += chunk
        if len(output) > limit:
            return None


@contextlib.contextmanager
def _file(content: bytes) -> Iterator[int]:
    """The descriptor of an unlinked file with `content`, at its start."""
    with tempfile.TemporaryFile() as file:
        file.write(content)
        file.seek(0)
        yield file.fileno()


def _filter() -> bytes:
    """The seccomp program of the sandbox: which system calls fail with EPERM."""
    machine, open_socket, refused = _SYSTEM_CALLS[platform.machine()]
    load, equal, at_least, give = 0x20, 0x15, 0x35, 0x06
    allow, refuse = (give, 0, 0, 0x7FFF0000), (give, 0, 0, 0x00050000 | errno.EPERM)
    # (code, instructions to skip if true, if false, operand); calls of another kind than the machine's own are refused
    lines = [(load, 0, 0, 4), (equal, 1, 0, machine), refuse, (load, 0, 0, 0), (at_least, 0, 1, 1 << 30), refuse]
    for number in refused:
        lines += [(equal, 0, 1, number), refuse]
    lines += [(equal, 1, 0, open_socket), allow, (load, 0, 0, 16)]
    for family in (socket.AF_UNIX, socket.AF_INET, socket.AF_INET6):
        lines += [(equal, 0, 1, family), allow]
    return b"".join(struct.pack("=HBBI", *line) for line in [*lines, refuse])


def _interpreter() -> str:
    """The interpreter behind a virtual environment: it starts without looking at one."""
    return os.path.realpath(getattr(sys, "_base_executable", sys.executable))


@cache
def _package_folders() -> list[str]:
    """Where packages are, and where numpy is, should that be elsewhere: assert suites need it."""
    numpy = importlib.util.find_spec("numpy")
    found = {sysconfig.get_path(name) for name in ("purelib", "platlib")}
    found |= {str(Path(numpy.origin).parents[1])} if numpy is not None and numpy.origin else set()
    return sorted(os.path.realpath(folder) for folder in found if os.path.isdir(folder))


def _wrapper(filter_fd: int) -> list[str]:
    """The command before the interpreter's; `filter_fd` holds the result of `_filter`."""
    root = os.geteuid() == 0
    program = shutil.which("bwrap") or "bwrap"
    bwrap = [program, "--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts", "--unshare-cgroup-try"]
    bwrap += ["--die-with-parent", "--new-session", "--clearenv", "--cap-drop", "ALL"]
    for name, value in _ENVIRONMENT.items():
        bwrap += ["--setenv", name, value]
    for folder in ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32"):
        if os.path.islink(folder):
            bwrap += ["--symlink", os.readlink(folder), folder]
        elif os.path.isdir(folder):
            bwrap += ["--ro-bind", folder, folder]
    # before the packages: an environment may lie in /tmp
    bwrap += ["--size", str(FILES), "--perms", "1777", "--tmpfs", "/tmp", "--chdir", "/tmp"]
    made = {Path("/tmp")}
    for folder in (os.path.realpath(sys.base_prefix), *_package_folders()):
        if folder.startswith("/usr/"):
            continue
        # bubblewrap makes missing parents unreadable for others if they are so outside
        for parent in reversed(Path(folder).parents[:-1]):
            if parent not in made:
                bwrap += ["--perms", "0755", "--dir", str(parent)]
                made.add(parent)
        bwrap += ["--ro-bind", folder, folder]
    bwrap += ["--perms", "0755", "--dir", "/etc"]
    for path in ("/etc/ld.so.cache", "/etc/alternatives"):
        bwrap += ["--ro-bind-try", path, path]
    bwrap += ["--dev", "/dev", "--remount-ro", "/dev"]
    seccomp = ["--seccomp", str(filter_fd)]
    if not root:
        user = ("--unshare-user", "--disable-userns", "--uid", "65534", "--gid", "65534")
        return [*bwrap, "--remount-ro", "/", *user, *seccomp, "--"]
    # For root the number of processes is not limited, whatever a user namespace calls it. So the sandbox switches to
    # a user that nothing else runs as, and only then enters a user namespace, which needs /proc until it is hidden.
    users = min(int(Path("/proc/self/uid_map").read_text().split()[2]), 2**31)
    user = str(random.SystemRandom().randrange(users // 2, users - 1))
    return [
        *bwrap,
        *("--proc", "/proc", "--remount-ro", "/", "--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID", "--"),
        *(shutil.which("setpriv") or "setpriv", "--reuid", user, "--regid", user, "--clear-groups", "--"),
        *(program, "--unshare-user", "--disable-userns", "--die-with-parent", "--dev-bind", "/", "/"),
        *("--size", "4096", "--tmpfs", "/proc", "--remount-ro", "/proc", *seccomp, "--"),
    ]
