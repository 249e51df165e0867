"""Where there is no sandbox: refusal, or limits alone."""

import os
import tempfile
import time
import uuid
from pathlib import Path

import pytest
from rewards.programs import needs_sandbox, shown_in_tmp, wait_until_gone

from trl_softgate.rewards import sandbox as sandbox_module
from trl_softgate.rewards.sandbox import Sandbox


@pytest.fixture
def no_bwrap(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))


@pytest.fixture
def unsandboxed(no_bwrap, monkeypatch):
    mark = uuid.uuid4().hex
    monkeypatch.setitem(sandbox_module._ENVIRONMENT, "MARK", mark)
    with pytest.warns(UserWarning, match="without a sandbox, since bwrap .*cannot be found"):
        sandbox = Sandbox(seconds=2.0, memory_mb=512, allow_unsandboxed=True)
    assert not sandbox.sandboxed
    yield sandbox
    wait_until_gone(mark)


def test_refused_without_bubblewrap(no_bwrap):
    with pytest.raises(ValueError, match=r"bwrap .*cannot be found: install bubblewrap .*allow_unsandboxed_code=True"):
        Sandbox()


def test_refused_where_bubblewrap_fails(monkeypatch, tmp_path):
    for name in ("bwrap", "setpriv"):
        (tmp_path / name).write_text("#!/bin/sh\necho 'No permissions to create a new namespace' >&2\nexit 1\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ValueError, match="bwrap does not work here .No permissions to create a new namespace"):
        Sandbox()


@needs_sandbox
def test_permission_to_go_without_changes_nothing_where_bubblewrap_works():
    sandbox = Sandbox(seconds=20, allow_unsandboxed=True)
    assert sandbox.sandboxed
    assert sandbox.run("import os\nprint(sorted(os.listdir('/tmp')))", "", 1000) == f"{shown_in_tmp()}\n"


@pytest.mark.parametrize(("kwargs", "message"), [({"seconds": 0}, "`seconds`"), ({"memory_mb": 1}, "`memory_mb`")])
def test_limits_are_checked(kwargs, message):
    with pytest.raises(ValueError, match=message):
        Sandbox(**kwargs)


def test_unsandboxed_program_runs(unsandboxed):
    assert unsandboxed.run("print(input()[::-1])", "añb", 100) == "bña\n"
    assert unsandboxed.run("print(1)\nexit(1)", "", 100) is None
    assert unsandboxed.run("print('x' * 101)", "", 100) is None
    assert unsandboxed.run("import os\nprint(os.environ.get('HOME'))", "", 100) == "/tmp\n"


@pytest.mark.parametrize(
    "program",
    [
        "while True: pass",
        "x = bytearray(1 << 28)\nwhile True: x += x",
        "while True: print(1)",
        "import os, time\nfor _ in range(3): os.fork()\ntime.sleep(999)",
        "import os, time\nif os.fork() == 0: time.sleep(999)",
        "import os, time\nif os.fork() == 0:\n    os.setsid(); time.sleep(999)\ntime.sleep(999)",
        "import os, time\nif os.fork() == 0:\n    os.close(1); time.sleep(999)\nos._exit(1)",
    ],
)
def test_unsandboxed_limits(unsandboxed, program):
    start = time.monotonic()
    assert unsandboxed.run(program, "", 100) is None
    assert time.monotonic() - start < 5


def test_descriptors_are_closed(unsandboxed):
    before = len(os.listdir("/proc/self/fd"))
    for program in ("print(1)", "exit(1)", "while True: print(1)"):
        unsandboxed.run(program, "", 10)
    assert len(os.listdir("/proc/self/fd")) == before


@needs_sandbox
def test_packages_may_lie_in_tmp(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sandbox has a /tmp of its own, which must not hide an environment that was made there."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        os.chmod(folder, 0o755)
        Path(folder, "marker.py").write_text("VALUE = 42\n")
        folders = sandbox_module._package_folders()
        monkeypatch.setattr(sandbox_module, "_package_folders", lambda: [*folders, folder])
        program = "import marker\nprint(marker.VALUE)\nopen('/tmp/mine', 'w').write('x')\n"
        program += "try:\n    open(marker.__file__, 'w')\nexcept OSError as error:\n    print(error.strerror)\n"
        assert Sandbox(5.0).run(program, "", 100) == "42\nRead-only file system\n"
