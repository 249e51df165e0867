"""Start a `vllm serve` on CPU and stop it again, whatever happens in between."""

import contextlib
import os
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import tiny
import urllib3

EXECUTABLE = "TRL_SOFTGATE_VLLM"
SECONDS_TO_START = 180.0
SECONDS_TO_STOP = 20.0


def save_tiny(folder: Path, swap: tuple[int, int] | None = None, positions: int = 1024) -> Path:
    """A tiny model with log-probabilities that are far apart; vLLM's attention wants a head_dim of 32 at least."""
    made = tiny.model(hidden=64, head_dim=32, max_position_embeddings=positions, initializer_range=0.3)
    made.save_pretrained(folder)
    tiny.tokenizer(swap=swap).save_pretrained(folder)
    return folder


def environment() -> dict[str, str]:
    """Variables under which vLLM runs on a small CPU."""
    return {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        # compiling a few small functions takes longer than the rest of the first request
        "TORCHDYNAMO_DISABLE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_NO_USAGE_STATS": "1",
    }


@contextlib.contextmanager
def serve(
    folder: Path,
    *,
    name: str = "teacher",
    max_model_len: int = 1024,
    options: tuple[str, ...] = (),
) -> Iterator[str]:
    """The URL of a server of the model in `folder`, float32, once it is healthy. Its first answer takes longest.

    Raises:
        AssertionError: the variable TRL_SOFTGATE_VLLM does not name an executable, or the server does not come up in
            time; shows the end of its log.
    """
    executable = os.environ.get(EXECUTABLE, "")
    assert os.access(executable, os.X_OK), (
        f"{EXECUTABLE} must be the path of a `vllm` executable, it is {executable!r}: `make test-server` makes an "
        "environment with one and sets it."
    )
    port = _free_port()
    command = [executable, "serve", str(folder), "--host", "127.0.0.1", "--port", str(port), "--dtype", "float32"]
    command += ["--served-model-name", name, "--max-model-len", str(max_model_len), "--enforce-eager", *options]
    with tempfile.TemporaryFile("w+") as log:
        # a session of its own, as the engine is another process
        server = subprocess.Popen(
            command, env=environment(), stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            url = f"http://127.0.0.1:{port}"
            if not _comes_up(url, server):
                log.seek(0)
                raise AssertionError(f"{' '.join(command)} did not come up:\n{log.read()[-5000:]}")
            yield url
        finally:
            _stop(server)


def _free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


def _comes_up(url: str, server: subprocess.Popen) -> bool:
    pool = urllib3.PoolManager(retries=False)
    end = time.monotonic() + SECONDS_TO_START
    while time.monotonic() < end and server.poll() is None:
        with contextlib.suppress(urllib3.exceptions.HTTPError):
            if pool.request("GET", f"{url}/health", timeout=5).status == 200:
                return True
        time.sleep(0.25)
    return False


def _stop(server: subprocess.Popen) -> None:
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(server.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            server.wait(SECONDS_TO_STOP)
    # the engine may outlive the process that was waited for
    with contextlib.suppress(ProcessLookupError):
        os.killpg(server.pid, signal.SIGKILL)
