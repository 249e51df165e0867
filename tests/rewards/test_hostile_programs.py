"""Programs that attack the machine or the verdict: each scores 0, and nothing of it is left."""

import errno
import os
import socket
import subprocess
import sys
import threading
import time
import uuid
from pathlib import Path

import psutil
import pytest
from rewards.programs import answer, needs_sandbox, processes, shown_in_tmp, wait_until_gone

from trl_softgate.rewards import code as code_module
from trl_softgate.rewards import sandbox as sandbox_module
from trl_softgate.rewards.code import code_reward, pack_tests, passes
from trl_softgate.rewards.sandbox import FILES, PROCESSES, Sandbox

pytestmark = needs_sandbox

SECONDS = 1.0
ECHO = {"kind": "stdin", "inputs": ["7\n"], "outputs": ["49\n"]}
RIGHT = "print(int(input()) ** 2)"

SUITE = """
import numpy as np

def assertion(out, exp, atol):
    if out != exp and atol != 0:
        assert np.allclose(out, exp, rtol=1e-07, atol=atol)
    else:
        assert out == exp

def check(candidate):
    for inp, exp in zip([[2.0], [3.0]], [4.0, 9.0]):
        assertion(candidate(*inp), exp, 1e-6)

check(square)
"""
ASSERTS = {"kind": "asserts", "test": SUITE}
CALLS = {"kind": "calls", "function": "square", "inputs": [[2], [3]], "outputs": [4, 9]}


@pytest.fixture(scope="module")
def sandbox():
    return Sandbox(seconds=SECONDS, memory_mb=512)


@pytest.fixture(autouse=True)
def nothing_is_left(monkeypatch):
    mark = uuid.uuid4().hex
    monkeypatch.setitem(sandbox_module._ENVIRONMENT, "MARK", mark)
    yield mark
    wait_until_gone(mark)


ATTACKS = {
    "fork bomb": """
import os
while True:
    try: os.fork()
    except OSError: pass
""",
    "fork bomb of daemons": """
import os
while True:
    try:
        if os.fork(): os.setsid()
    except OSError: pass
""",
    "threads": """
import threading, time
while True: threading.Thread(target=time.sleep, args=(99,)).start()
""",
    "memory bomb": "x = bytearray(1 << 28)\nwhile True: x += x",
    "memory in files": "import os\nfor i in range(99): open(f'/tmp/{i}', 'wb').write(b'x' * (1 << 22))",
    "huge file": "open('/tmp/x', 'wb').write(b'x' * (1 << 30))",
    "endless output": "while True: print('49' * 10000)",
    "endless loop": "while True: pass",
    "sleep": "import time; time.sleep(999)",
    "deep recursion": """
import sys
sys.setrecursionlimit(10**9)
def f(n): return f(n + 1) + 1
print(f(0))
""",
    "deep recursion in C": "x = []\nfor _ in range(10**6): x = [x]\nprint(repr(x))",
    "closed output": "import os, time\nos.close(1); os.close(2); time.sleep(999)",
    "background process": "import os, time\nif os.fork() == 0:\n    os.setsid(); time.sleep(999)",
    "killing the parent": """
import os, signal
os.kill(os.getppid(), 9); os.kill(1, 9); os.kill(-1, 9); print(49)
""",
    "killing all": """
import os, signal
for i in range(1, 70000):
    try: os.kill(i, 9)
    except OSError: pass
""",
    "many open files": "f = []\nwhile True: f.append(open('/dev/null'))",
    "no program": "def",
    "not text": "print('\\ud800')",
    "null byte": "print(49)\0",
}


@pytest.mark.parametrize("program", ATTACKS.values(), ids=ATTACKS.keys())
def test_attack_fails_and_leaves_the_machine_sound(sandbox, program):
    before = psutil.virtual_memory().available
    start = time.monotonic()
    assert not passes(sandbox, program, ECHO)
    assert time.monotonic() - start < SECONDS + 15
    assert psutil.virtual_memory().available > before - (4 << 30)


@pytest.mark.parametrize(
    "expression",
    [
        "open('/etc/shadow').read()",
        "open('/etc/passwd').read()",
        "open('/proc/1/environ').read()",
        "open('/proc/self/status').read()",
        "open('/usr/x', 'w')",
        "open('/x', 'w')",
        "open('/dev/shm/x', 'w')",
        "__import__('os').mknod('/dev/x')",
        "__import__('os').setuid(0)",
        "__import__('os').chroot('/tmp')",
        "__import__('os').unlink('/tmp')",
        "__import__('socket').create_connection(('1.1.1.1', 53), 1)",
        "__import__('resource').setrlimit(6, (10**6, 10**6))",
        "{}['SECRET'] if 'SECRET' not in __import__('os').environ else 1",
        "open(__import__('os').readlink('/bin') + '/x', 'w')",
    ],
)
def test_forbidden(sandbox, expression, monkeypatch):
    monkeypatch.setenv("SECRET", "1")
    assert sandbox.run(f"try:\n    {expression}\nexcept Exception: print('refused')", "", 100) == "refused\n"


def test_no_new_namespaces(sandbox):
    program = (
        "import ctypes\nc = ctypes.CDLL(None)\nprint([c.unshare(flag) for flag in (0x10000000, 0x20000, 0x40000000)])"
    )
    assert sandbox.run(program, "", 100) == "[-1, -1, -1]\n"


@pytest.mark.parametrize(
    "call",
    [
        "c.shmget(0, 1 << 20, 0o1600)",
        "c.semget(0, 9, 0o1600)",
        "c.msgget(0, 0o1600)",
        "c.syscall({'x86_64': 250, 'aarch64': 219}[m], 0, ctypes.c_int(-3), 1)",  # the session's keyring
        "c.syscall({'x86_64': 248, 'aarch64': 217}[m], b'user', b'x', b'x', 1, ctypes.c_int(-3))",
        "c.syscall(425, 1, ctypes.create_string_buffer(999))",  # io_uring
        "c.syscall(0x40000000 + 39)",  # getpid of another kind
        "c.socket(40, 1, 0)",  # vsock: to the host of a virtual machine
        "c.socket(16, 3, 0)",
    ],
)
def test_refused_system_calls(sandbox, call):
    program = f"import ctypes, os\nm = os.uname().machine\nc = ctypes.CDLL(None, use_errno=True)\nprint({call}"
    assert sandbox.run(program + ", ctypes.get_errno())", "", 100) == f"-1 {errno.EPERM}\n"


def test_files_of_the_user_are_not_there(sandbox, tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("secret")
    secret.chmod(0o644)
    for path in (secret, Path(__file__), Path.home() / ".bashrc", Path.cwd() / "pyproject.toml"):
        assert sandbox.run(f"import os\nprint(os.path.lexists({str(path)!r}))", "", 100) == "False\n"
    shown = sandbox.run("import os\nprint(sorted(os.listdir('/tmp')), os.listdir('/etc'))", "", 1000)
    assert shown is not None and shown.startswith(f"{shown_in_tmp()} ") and "passwd" not in shown


def test_another_user_without_capabilities(sandbox):
    program = "import os\nprint(os.getuid(), os.geteuid(), os.getgid(), os.getgroups())"
    user, effective, group, *groups = (sandbox.run(program, "", 1000) or "").split()
    assert user == effective != "0" and group != "0"
    assert int(user) != os.getuid()
    # in the namespace of that user, which is all that `dumpable` files would tell apart
    assert set("".join(groups).strip("[]").split(",")) <= {"", "65534", group}


def test_no_way_to_a_listening_socket(sandbox, tmp_path):
    accepted = []
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket(socket.AF_UNIX) as abstract:
        port = server.getsockname()[1]
        abstract.bind(f"\0softgate-{port}")
        abstract.listen()
        threading.Thread(target=lambda: accepted.append(server.accept()), daemon=True).start()
        program = (
            "import socket\n"
            f"inet, unix = ('127.0.0.1', {port}), '\\0softgate-{port}'\n"
            "for family, address in ((socket.AF_INET, inet), (socket.AF_UNIX, unix)):\n"
            "    try:\n        socket.socket(family).connect(address); print('connected')\n"
            "    except OSError: print('refused')"
        )
        assert sandbox.run(program, "", 100) == "refused\nrefused\n"
        assert not accepted
        socket.create_connection(("127.0.0.1", port)).close()  # the test's own way works


def test_limits_are_those_of_the_sandbox(sandbox):
    program = (
        "import resource as r, shutil\n"
        "limits = [r.getrlimit(k) for k in (r.RLIMIT_AS, r.RLIMIT_NPROC, r.RLIMIT_FSIZE)]\n"
        "print(limits, shutil.disk_usage('/tmp').total)"
    )
    limits = [(512 << 20,) * 2, (PROCESSES,) * 2, (FILES,) * 2]
    assert sandbox.run(program, "", 1000) == f"{limits} {FILES}\n"


FAKES = {
    "leave": "import os; os._exit(0)",
    "leave later": "import os\ndef square(x): os._exit(0)",
    "sys.exit": "import sys\ndef square(x): sys.exit(0)",
    "atexit": """
import atexit, os
atexit.register(lambda: os.write(1, b'passed'))
def square(x): raise SystemExit
""",
    "print the verdict": """
import os
for fd in range(3, 64):
    try: os.write(fd, b'passed')
    except OSError: pass
os._exit(0)
""",
    "return the verdict": "def square(x): return 'passed'",
    "patch builtins": """
import builtins
builtins.AssertionError = type('E', (BaseException,), {})
builtins.compile = None
def square(x): return 0
""",
    "patch numpy": "import numpy\nnumpy.allclose = lambda *a, **k: True\ndef square(x): return 0.0",
    "equal to all": """
class E(float):
    def __eq__(self, o): return True
    def __ne__(self, o): return False
    def __abs__(self): return 0
    def __sub__(self, o): return 0
    __rsub__ = __sub__
    def __float__(self): return 0.0
    def __hash__(self): return 0
def square(x): return E(0)
""",
    "empty": "def square(x): return []",
    "not a number": "def square(x): return float('nan')",
    "infinite": "def square(x): return float('inf')",
    "expected value from frames": """
import sys, gc
def square(x):
    f = sys._getframe()
    while f:
        for v in [*f.f_locals.values(), *f.f_globals.values()]:
            if isinstance(v, dict) and 'exp' in v: return v['exp']
            if isinstance(v, list) and 9.0 in v: return v[0]
        f = f.f_back
    return next((o['outputs'][0] for o in gc.get_objects() if isinstance(o, dict) and 'outputs' in o), 0)
""",
    "kill the checker": """
import os
def square(x):
    for i in range(1, 1000):
        try: os.kill(i, 9)
        except OSError: pass
""",
    "endless reply": """
import os
def square(x):
    while True:
        for fd in range(3, 64):
            try: os.write(fd, b'[' * 65536)
            except OSError: pass
""",
    "strange reply": """
import os
def square(x):
    for fd in range(3, 64):
        try: os.write(fd, b'{"value": {"eval": [1]}}\\n' * 9)
        except OSError: pass
""",
    "nested reply": """
def square(x):
    y = []
    for _ in range(900): y = [y]
    return y
""",
    "no reply": "import time\ndef square(x): time.sleep(999)",
    "not listening": "import time; time.sleep(999)",
    "other code": """
import pickle
class E:
    def __reduce__(self): return (eval, ('4.0',))
def square(x): return pickle.dumps(E())
""",
}


@pytest.mark.parametrize("tests", [ASSERTS, CALLS], ids=["asserts", "calls"])
@pytest.mark.parametrize("program", FAKES.values(), ids=FAKES.keys())
def test_verdict_cannot_be_faked(program, tests, monkeypatch):
    monkeypatch.setattr(code_module, "_START", 1.0)
    start = time.monotonic()
    assert not passes(Sandbox(seconds=1.0), program, tests)
    assert time.monotonic() - start < 20


@pytest.mark.parametrize("compare", ["isclose", "testing.assert_almost_equal", "testing.assert_array_almost_equal"])
def test_an_empty_list_is_not_close_to_a_number(compare):
    test = f"import numpy as np\nassert np.all(np.{compare}(square(3.0), 9.0) != False)"
    for program, right in (("def square(x): return x * x", True), ("def square(x): return []", False)):
        assert passes(Sandbox(seconds=20), program, {"kind": "asserts", "test": test}) is right


def test_verdicts_are_not_always_0():
    for tests in (ASSERTS, CALLS):
        assert passes(Sandbox(seconds=20), "def square(x): return x * x", tests)


def test_reply_in_advance_is_only_a_value():
    program = """
import os
for fd in range(3, 64):
    try: os.write(fd, b'{"value": 4}\\n{"value": 9}\\n')
    except OSError: pass
"""
    # Who guesses all values without being asked has not faked a verdict: it knows them.
    assert passes(Sandbox(seconds=5), program + "def square(x): return 0", CALLS)
    assert not passes(Sandbox(seconds=5), program + "def square(x): return 0", {**CALLS, "outputs": [4, 10]})


def test_hostile_and_honest_programs_at_the_same_time():
    reward = code_reward(timeout=5.0, memory_mb=512, workers=4)
    tests = pack_tests(ECHO)
    programs = [RIGHT, ATTACKS["fork bomb"], RIGHT, ATTACKS["memory bomb"], RIGHT, "print(48)", RIGHT, RIGHT]
    scores = reward(completions=[answer(program) for program in programs], tests=[tests] * len(programs))
    assert scores == [float(program is RIGHT) for program in programs]


def test_leftovers_would_be_seen(sandbox, nothing_is_left):
    with open("/dev/null") as stdin:
        process = sandbox.start("run", "import time; time.sleep(999)", stdin=stdin.fileno())
    deadline = time.monotonic() + 10
    while len(processes(nothing_is_left)) < 2 and time.monotonic() < deadline:
        time.sleep(0.05)
    assert len(processes(nothing_is_left)) >= 2  # bubblewrap and the program
    sandbox.kill(process)


def test_nothing_is_left_of_a_sandbox_that_is_killed_as_it_starts(sandbox):
    with open("/dev/null") as stdin:
        for i in range(60):
            process = sandbox.start("run", "import time; time.sleep(999)", stdin=stdin.fileno())
            while not psutil.Process(process.pid).children():
                pass
            time.sleep(i % 10 * 2e-4)
            sandbox.kill(process)


def test_programs_end_with_the_process_that_started_them(nothing_is_left):
    script = (
        "import os, sys\n"
        "from trl_softgate.rewards import sandbox\n"
        "sandbox._ENVIRONMENT['MARK'] = sys.argv[1]\n"
        "box = sandbox.Sandbox(seconds=99)\n"
        "print('ready', flush=True)\n"
        "box.run('import time; time.sleep(999)', '', 100)"
    )
    owner = subprocess.Popen([sys.executable, "-c", script, nothing_is_left], stdout=subprocess.PIPE)
    assert owner.stdout is not None and owner.stdout.readline() == b"ready\n"
    deadline = time.monotonic() + 20
    # bubblewrap, at least once more inside, and the program
    while len(processes(nothing_is_left)) < 3 and time.monotonic() < deadline:
        time.sleep(0.05)
    assert len(processes(nothing_is_left)) >= 3
    owner.kill()
    owner.communicate()
