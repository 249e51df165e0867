"""JSON over HTTP with hard time limits, kept connections, and attempts that are repeated."""

import contextlib
import email.utils
import http.client
import itertools
import json
import math
import os
import random
import re
import socket
import threading
import time
import urllib.parse
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NoReturn, TypeVar

import tenacity
import urllib3
from urllib3.connection import HTTPConnection, HTTPSConnection
from urllib3.connectionpool import HTTPConnectionPool, HTTPSConnectionPool
from urllib3.util import Timeout, make_headers

from ..validation import require_number, require_whole
from .base import TeacherError

T = TypeVar("T")

CONNECT_SECONDS = 10.0
FIRST_WAIT, LONGEST_WAIT = 0.5, 30.0
WATCH_SECONDS = 0.1
THREAD_NAME = "softgate-teacher"
BYTES_PER_ANSWER = 1 << 20

START = "Start it with `vllm serve MODEL --port PORT --max-model-len N`"
NOT_VLLM = "Is this a `vllm serve`, and no proxy before it that answers by itself?"


class Client:
    """Asks one of several servers, which are taken to be alike.

    Time-outs, 408, 429, 5xx, broken connections and answers that are none are tried again, with exponential back-off,
    at the next URL.

    Args:
        urls, api_key_env, concurrency, timeout, max_retries: see `ServerTeacher`.

    Raises:
        ValueError: an option is out of range, a URL is none, or the variable of `api_key_env` is not set.
    """

    def __init__(
        self,
        urls: str | Sequence[str],
        *,
        api_key_env: str | None,
        concurrency: int,
        timeout: float,
        max_retries: int,
    ) -> None:
        require_number("timeout", timeout, above=0)
        require_whole("concurrency", concurrency, minimum=1)
        require_whole("max_retries", max_retries, minimum=0)
        parsed = [_parse_url(url) for url in ([urls] if isinstance(urls, str) else urls)]
        if not parsed:
            raise ValueError('`teacher_server_url` is empty: give the server\'s, e.g. "http://127.0.0.1:8000".')
        self.urls = [url for url, _ in parsed]
        self.concurrency = concurrency
        self.timeout = float(timeout)
        self.max_retries = max_retries
        self._headers, self._secrets = _headers(parsed, api_key_env)
        self._pools = urllib3.PoolManager(num_pools=len(parsed), maxsize=concurrency)
        self._pools.pool_classes_by_scheme = {"http": _Pool, "https": _SecurePool}
        self._slots = threading.Semaphore(concurrency)
        self._turn = itertools.count()
        # of its own: waits must not move the global random numbers, and must differ between ranks of one seed
        self._random = random.Random()

    def batch(self, tasks: "Sequence[Callable[[Batch], Any]]") -> "Batch":
        """Begin `tasks` in threads of their own, `concurrency` at once."""
        return Batch(tasks, self.concurrency)

    def urls_in_turn(self) -> list[str]:
        """All of them, each time beginning with the next one."""
        first = next(self._turn) % len(self.urls)
        return self.urls[first:] + self.urls[:first]

    def ask(
        self,
        batch: "Batch",
        urls: Sequence[str],
        path: str,
        read: Callable[[str, Any], T],
        body: dict[str, Any] | None = None,
        *,
        hint: str = "",
        max_bytes: int = BYTES_PER_ANSWER,
    ) -> T:
        """What `read(url, parsed JSON)` makes of the answer; a `Retry`, of it or of the way there, is tried again."""
        attempts = tenacity.Retrying(
            retry=tenacity.retry_if_exception_type(Retry),
            stop=tenacity.stop_after_attempt(self.max_retries + 1),
            wait=self._seconds_to_wait,
            sleep=tenacity.sleep_using_event(batch.stopped),
            reraise=True,
        )
        url = urls[0]
        try:
            for attempt in attempts:
                with attempt:
                    url = urls[(attempt.retry_state.attempt_number - 1) % len(urls)]
                    return read(url, self._attempt(batch, url, path, body, hint, max_bytes))
        except Retry as error:
            count = self.max_retries + 1
            raise TeacherError(
                f"The teacher at {url}{path} failed in {count} attempt{'s' * (count > 1)}, the last time because "
                f"{self._without_secrets(error.what)}. {error.advice}"
            ) from None
        raise AssertionError("tenacity either returns or raises")

    def _seconds_to_wait(self, state: tenacity.RetryCallState) -> float:
        # the exponent is held: 2.0 ** 1024 overflows
        backoff = min(LONGEST_WAIT, FIRST_WAIT * 2.0 ** min(state.attempt_number - 1, 30))
        error = state.outcome.exception() if state.outcome is not None else None
        asked = min(error.retry_after, self.timeout) if isinstance(error, Retry) else 0.0
        return max(backoff * self._random.uniform(0.5, 1.5), asked)

    def _attempt(
        self, batch: "Batch", url: str, path: str, body: dict[str, Any] | None, hint: str, max_bytes: int
    ) -> Any:
        """The parsed JSON of one request."""
        # batches that overlap share the slots
        with self._slots, batch.attempt(self.timeout) as attempt:
            try:
                status, headers, answer = self._exchange(url + path, body, max_bytes)
            except (urllib3.exceptions.HTTPError, http.client.HTTPException, OSError) as error:
                if attempt.expired or isinstance(error, urllib3.exceptions.ReadTimeoutError):
                    raise Retry(
                        f"there was no complete answer within {self.timeout:g} s",
                        "Look at the server's log; raise `teacher_server_timeout` or lower "
                        "`teacher_server_concurrency` if it is only slow.",
                    ) from None
                raise _broken(error) from None
            if attempt.expired:
                # a shut socket looks like the end of an answer that has no length
                raise Retry(f"there was no complete answer within {self.timeout:g} s", "Look at the server's log.")
        if len(answer) > max_bytes:
            raise Retry(f"the answer has more than {max_bytes} bytes", NOT_VLLM)
        if status in (408, 429) or status >= 500:
            raise Retry(
                f"the status was {status} ({_message(answer)})",
                "Look at the server's log; lower `teacher_server_concurrency` if it is overloaded.",
                _retry_after(headers.get("Retry-After")),
            )
        if status != 200:
            self._refuse(url + path, status, _message(answer), hint)
        try:
            return json.loads(answer)
        except (ValueError, RecursionError):
            raise Retry(f"the answer is no JSON ({_message(answer)})", NOT_VLLM) from None

    def _exchange(self, url: str, body: dict[str, Any] | None, max_bytes: int) -> tuple[int, Any, bytes]:
        response = self._pools.request(
            "GET" if body is None else "POST",
            url,
            body=None if body is None else json.dumps(body).encode(),
            headers=self._headers,
            preload_content=False,
            # tenacity tries again, and a key must not follow a redirect to another host
            retries=False,
            redirect=False,
            timeout=Timeout(connect=min(CONNECT_SECONDS, self.timeout), read=self.timeout),
        )
        try:
            answer = response.read(max_bytes + 1)
            if len(answer) > max_bytes:
                response.close()
            return response.status, response.headers, answer
        except BaseException:
            response.close()
            raise
        finally:
            response.release_conn()

    def _refuse(self, url: str, status: int, answer: str, hint: str) -> NoReturn:
        key = "Name the environment variable of the API key by `teacher_server_api_key_env`, and check its value."
        advice = {
            400: hint,
            401: key,
            403: key,
            404: f"Give a `teacher_server_model` that the server lists at /v1/models. {NOT_VLLM}",
        }.get(status, "Check the URL." if 300 <= status < 400 else "")
        answer = self._without_secrets(answer)
        text = f"The teacher at {url} refused the request with status {status}: {answer}. {advice}"
        raise Unfit(text.strip(), status, answer)

    def _without_secrets(self, text: str) -> str:
        for secret in self._secrets:
            text = text.replace(secret, "***")
        return text


class Retry(Exception):
    """An attempt failed in a way that may pass."""

    def __init__(self, what: str, advice: str, retry_after: float = 0.0) -> None:
        super().__init__(what)
        self.what = what
        self.advice = advice
        self.retry_after = retry_after


class Unfit(TeacherError):
    """An answer that another attempt would not change."""

    def __init__(self, text: str, status: int = 200, answer: str = "") -> None:
        super().__init__(text)
        self.status = status
        self.answer = answer


class Stopped(Exception):
    """Another request of the batch has failed."""


def _broken(error: Exception) -> Retry:
    if isinstance(error, (urllib3.exceptions.NewConnectionError, urllib3.exceptions.ConnectTimeoutError)):
        return Retry(
            f"there was no connection ({str(error).rpartition(': ')[2]})",
            f"Check host and port, and that the server is up. {START}.",
        )
    cause = error.args[-1] if error.args else error
    return Retry(f"the connection broke ({cause})", f"Look at the server's log: it may have died. {START}.")


def _message(answer: bytes) -> str:
    """What the server says in its error object, or the begin of what it sent."""
    try:
        error = json.loads(answer)["error"]
        text = error["message"] if isinstance(error, dict) else error
    except (ValueError, RecursionError, KeyError, TypeError):
        text = answer[:2000].decode(errors="replace")
    text = " ".join(str(text).split())
    return (text if len(text) <= 400 else text[:400] + " ...").rstrip(".") or "empty body"


def _retry_after(value: str | None) -> float:
    """Seconds, from a number or a date; 0 where it is neither."""
    try:
        seconds = float(value or 0)
    except ValueError:
        try:
            seconds = email.utils.parsedate_to_datetime(str(value)).timestamp() - time.time()
        except (ValueError, OverflowError):
            return 0.0
    return max(seconds, 0.0) if not math.isnan(seconds) else 0.0


class _Attempt:
    """One request on its way. `expire` shuts its socket, which ends whatever the thread waits for."""

    def __init__(self, seconds: float) -> None:
        self.deadline = time.monotonic() + seconds
        self.expired = False
        self.connection: HTTPConnection | None = None

    def expire(self) -> None:
        self.expired = True
        sock = self.connection.sock if self.connection is not None else None
        if sock is not None:
            # below TLS, whose own shutdown would take the object away under the thread that reads
            with contextlib.suppress(OSError):
                socket.socket.shutdown(sock, socket.SHUT_RDWR)


_thread = threading.local()


class _Watched:
    """Tells the thread's attempt which connection it uses: time-outs of a socket are per read, and restart."""

    def request(self, *args: Any, **kwargs: Any) -> None:
        attempt: _Attempt = _thread.attempt
        attempt.connection = self  # type: ignore[assignment]
        super().request(*args, **kwargs)  # type: ignore[misc]
        if attempt.expired:
            # in the middle of connecting there was no socket to shut
            raise TimeoutError("expired while connecting")


class _Connection(_Watched, HTTPConnection):
    pass


class _SecureConnection(_Watched, HTTPSConnection):
    pass


class _Pool(HTTPConnectionPool):
    ConnectionCls = _Connection  # type: ignore[assignment]


class _SecurePool(HTTPSConnectionPool):
    ConnectionCls = _SecureConnection  # type: ignore[assignment]


class Batch:
    """Tasks that belong together, in threads of their own: when one has failed for good, the others stop.

    The threads are daemons, as an executor's would keep the program alive after an error elsewhere.
    """

    def __init__(self, tasks: "Sequence[Callable[[Batch], Any]]", threads: int) -> None:
        self.stopped = threading.Event()
        self._ended = threading.Event()
        self._results: list[Any] = [None] * len(tasks)
        self._todo = list(enumerate(tasks))[::-1]
        self._running = min(threads, len(tasks))
        self._error: BaseException | None = None
        self._attempts: set[_Attempt] = set()
        self._lock = threading.Lock()
        if not tasks:
            self._ended.set()
        for target in [self._work] * self._running + [self._watch]:
            threading.Thread(target=target, name=THREAD_NAME, daemon=True).start()

    def _work(self) -> None:
        try:
            while (task := self._next()) is not None:
                self._results[task[0]] = task[1](self)
        except BaseException as error:
            self.stop(error)
        with self._lock:
            self._running -= 1
            if self._running == 0:
                self._ended.set()

    def _next(self) -> "tuple[int, Callable[[Batch], Any]] | None":
        with self._lock:
            return self._todo.pop() if self._todo and not self.stopped.is_set() else None

    def _watch(self) -> None:
        """Hold every attempt to its deadline."""
        while not self._ended.wait(WATCH_SECONDS):
            now = time.monotonic()
            with self._lock:
                for attempt in self._attempts:
                    if attempt.deadline < now:
                        attempt.expire()

    @contextlib.contextmanager
    def attempt(self, seconds: float) -> Iterator[_Attempt]:
        """The thread's attempt; at its end it is no longer watched, as its connection may serve another.

        Raises:
            Stopped: the batch has ended.
        """
        attempt = _thread.attempt = _Attempt(seconds)
        with self._lock:
            if self.stopped.is_set():
                raise Stopped
            self._attempts.add(attempt)
        try:
            yield attempt
        finally:
            with self._lock:
                self._attempts.discard(attempt)

    def stop(self, error: BaseException) -> None:
        """End the requests on their way, and begin no other; the first error counts."""
        with self._lock:
            if self.stopped.is_set():
                return
            self._error = error
            self.stopped.set()
            for attempt in self._attempts:
                attempt.expire()
            self._ended.set()

    def results(self) -> list[Any]:
        """Of all tasks, in order; raises the first error of one of them."""
        try:
            self._ended.wait()
        except BaseException as error:  # Ctrl-C
            self.stop(error)
            raise
        if self._error is not None:
            raise self._error
        return self._results


def _parse_url(url: str) -> tuple[str, str | None]:
    """The URL without credentials, `/v1` and slash at the end, and "user:password" where it has that.

    Raises:
        ValueError: it is no http(s) URL of a host. Shows the URL without credentials.
    """
    if not isinstance(url, str):
        raise ValueError(f'`teacher_server_url` must be a text, e.g. "http://127.0.0.1:8000", got {url!r}.')
    shown = re.split(r"[?#]", url.rpartition("@")[2])[0]
    try:
        parts = urllib.parse.urlsplit(url)
        valid = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        valid = False
        parts = urllib.parse.urlsplit("")
    if not valid or parts.query or parts.fragment or re.search(r"\s", url):
        raise ValueError(
            f'{shown!r} is no URL of a server: give scheme, host and port, without a query, e.g. "http://127.0.0.1:8000".'
        )
    user, _, netloc = parts.netloc.rpartition("@")
    path = parts.path.rstrip("/").removesuffix("/v1").rstrip("/")
    return f"{parts.scheme}://{netloc}{path}", urllib.parse.unquote(user) if user else None


def _headers(urls: Iterable[tuple[str, str | None]], api_key_env: str | None) -> tuple[dict[str, str], list[str]]:
    """The headers of every request, and what of them must not be shown."""
    headers = {"Accept": "application/json", "Content-Type": "application/json"}
    users = {user for _, user in urls}
    if len(users) > 1:
        raise ValueError(
            "The addresses in `teacher_server_url` have different credentials: give all of them the same "
            "`user:password@`, or none."
        )
    user = users.pop() if users else None
    key = None
    if api_key_env is not None:
        if user is not None:
            raise ValueError(
                "Both `teacher_server_api_key_env` and `user:password@` in the URL say how to authenticate: keep one."
            )
        key = os.environ.get(api_key_env)
        if not key:
            raise ValueError(
                f"`teacher_server_api_key_env` names the environment variable {api_key_env!r}, which is not set: "
                "export the server's API key in it, or leave the option out."
            )
        if not re.fullmatch(r"[\x21-\x7e]+", key):
            raise ValueError(
                f"The API key in the environment variable {api_key_env!r} has a space, a line break or another "
                "character that a header cannot hold: export the bare key."
            )
        headers["Authorization"] = f"Bearer {key}"
    if user is not None:
        # urllib3 encodes as latin-1, servers expect UTF-8
        basic = make_headers(basic_auth=user.encode().decode("latin-1"))
        headers["Authorization"] = basic["authorization"]
        _, _, key = user.partition(":")
    return headers, [secret for secret in (key, headers.get("Authorization", "").rpartition(" ")[2]) if secret]
