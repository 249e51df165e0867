"""A teacher that runs elsewhere: a plain `vllm serve`, which scores the tokens of a prompt."""

import contextlib
import email.utils
import functools
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

import numpy as np
import tenacity
import torch
import urllib3
from urllib3.connection import HTTPConnection, HTTPSConnection
from urllib3.connectionpool import HTTPConnectionPool, HTTPSConnectionPool
from urllib3.util import Timeout, make_headers

from ..validation import require_number
from .base import TeacherError, TeacherRequest

T = TypeVar("T")

_CONNECT_SECONDS = 10.0
_FIRST_WAIT, _LONGEST_WAIT = 0.5, 30.0
_WATCH_SECONDS = 0.1
_THREAD_NAME = "softgate-teacher"
# a token's entry takes about 70 bytes, and more where its text is long
_BYTES_PER_ENTRY = 4096
_BYTES_PER_ANSWER = 1 << 20
_DETOKENIZE_CHUNK = 4096
_PROBE_TEXT = "The quick brown fox jumps over the lazy dog, 12 times."
_TOP = 20
# vLLM writes this in place of -inf, which JSON does not have
_MINUS_INFINITY = -9999.0
_ROUNDING = 1e-4

_START = "Start it with `vllm serve MODEL --port PORT --max-model-len N`"
_NOT_VLLM = "Is this a `vllm serve`, and no proxy before it that answers by itself?"


class ServerTeacher:
    """A plain `vllm serve`, spoken to over its OpenAI-compatible HTTP API: token ids in, `prompt_logprobs` out.

    One request per row that has a completion, `concurrency` at once. Time-outs, 429, 5xx, broken connections and
    answers that are none are tried again, with exponential back-off, at the next URL.

    Args:
        urls: of one server, or of several with the same model that share the rows, e.g. "http://127.0.0.1:8000"; with
            or without `/v1` at the end. `user:password@` is sent as basic authentication.
        tokenizer: the student's; `probe` holds the server's against it.
        temperature: must be 1, the only one a server scores at.
        model: name under which the server has the model; default: the only one there.
        api_key_env: name of the environment variable that holds the API key.
        concurrency: requests at once over all URLs, >= 1.
        timeout: seconds, > 0, from the begin of a request to the last byte of its answer.
        max_retries: further attempts after the first, >= 0.

    Raises:
        ValueError: an option is out of range, a URL is none, or the variable of `api_key_env` is not set.
    """

    def __init__(
        self,
        urls: str | Sequence[str],
        *,
        tokenizer: Any,
        temperature: float = 1.0,
        model: str | None = None,
        api_key_env: str | None = None,
        concurrency: int = 16,
        timeout: float = 120.0,
        max_retries: int = 5,
    ) -> None:
        if temperature != 1:
            raise ValueError(
                f"A server scores at temperature 1 alone, got {temperature!r}: sample with `temperature=1`, or state "
                "`teacher_temperature=1`."
            )
        require_number("timeout", timeout, above=0)
        for name, value, minimum in (("concurrency", concurrency, 1), ("max_retries", max_retries, 0)):
            require_number(name, value, minimum=minimum)
            if not isinstance(value, int):
                raise ValueError(f"`{name}` must be a whole number, got {value!r}.")
        parsed = [_parse_url(url) for url in ([urls] if isinstance(urls, str) else urls)]
        if not parsed:
            raise ValueError('`urls` is empty: give the server\'s, e.g. "http://127.0.0.1:8000".')
        self.urls = [url for url, _ in parsed]
        self.model = model
        self.temperature = 1.0
        self.concurrency = concurrency
        self.timeout = float(timeout)
        self.max_retries = max_retries
        self._tokenizer = tokenizer
        self._limit: int | None = None
        self._headers, self._secrets = _headers(parsed, api_key_env)
        self._pools = urllib3.PoolManager(num_pools=len(parsed), maxsize=concurrency)
        self._pools.pool_classes_by_scheme = {"http": _Pool, "https": _SecurePool}
        self._slots = threading.Semaphore(concurrency)
        self._turn = itertools.count()
        # of its own: waits must not move the global random numbers, and must differ between ranks of one seed
        self._random = random.Random()

    def __repr__(self) -> str:
        return f"ServerTeacher(urls={self.urls!r}, model={self.model!r})"

    def __call__(self, request: TeacherRequest) -> torch.Tensor:
        """(B, T) float32 log-probabilities at temperature 1, see `start`."""
        return self.start(request)()

    def start(self, request: TeacherRequest) -> Callable[[], torch.Tensor]:
        """Send the rows in the background. Rows without a completion are not sent.

        Returns:
            A function that waits for the answers: (B, T) float32 on the request's device, 0 on padding, NaN where the
            server has no finite value. It raises `TeacherError`, and the other requests end, when a row has failed.

        Raises:
            ValueError: the request has another temperature than 1.
            TeacherError: a row has no prompt, or is longer than what the server said it takes (see `probe`).
        """
        if request.temperature != self.temperature:
            raise ValueError(
                f"A server scores at temperature 1 alone, the rollout was sampled at {request.temperature}: sample "
                "with `temperature=1`, or state `teacher_temperature=1`."
            )
        rows = _unpad(request)
        for i, prompt, completion in rows:
            self._check_row(i, len(prompt), len(completion))
        tasks = [
            functools.partial(self._score_row, self._urls_in_turn(), prompt, completion)
            for _, prompt, completion in rows
        ]
        batch = _Batch(tasks, self.concurrency)

        def result() -> torch.Tensor:
            mask = request.completion_mask.bool().cpu()
            scores = torch.zeros(mask.shape, dtype=torch.float32)
            for (i, _, _), values in zip(rows, batch.results(), strict=True):
                scores[i, mask[i]] = torch.from_numpy(values)
            return scores.to(request.completion_ids.device)

        return result

    def probe(self, min_context: int) -> None:
        """Ask every server, before anything depends on it, whether it can be this student's teacher.

        Args:
            min_context: tokens of the longest prompt and completion together.

        Raises:
            ValueError: the model is not served, the context is too short, the vocabulary differs, or the numbers are
                no log-probabilities. Says with which option to start the server.
            TeacherError: a server does not answer.
        """
        tasks = [functools.partial(self._probe_url, url, min_context) for url in self.urls]
        try:
            found = _Batch(tasks, self.concurrency).results()
        except _Unfit as error:
            raise ValueError(str(error)) from None
        names = [name for name, _ in found]
        if len(set(names)) > 1:
            served = ", ".join(f"{name!r} at {url}" for url, name in zip(self.urls, names, strict=True))
            raise ValueError(
                f"The servers have different models: {served}. Start them with the same `--served-model-name`, or "
                "give `urls` of one model."
            )
        self.model = names[0]
        self._limit = min(limit for _, limit in found) - 1

    # ------------------------------------------------------------------------------------------------ one row

    def _check_row(self, i: int, prompt: int, completion: int) -> None:
        if prompt == 0:
            raise TeacherError(
                f"Row {i} has an empty prompt: a server scores each token from those before it, so the first has no "
                "value. Give every row a prompt of at least one token."
            )
        if self._limit is not None and prompt + completion > self._limit:
            raise TeacherError(
                f"Row {i} has {prompt} prompt and {completion} completion tokens, the server takes {self._limit} "
                f"together: start it with `--max-model-len {prompt + completion + 1}`, or shorten the prompts."
            )

    def _urls_in_turn(self) -> list[str]:
        """All of them, each row beginning with the next one."""
        first = next(self._turn) % len(self.urls)
        return self.urls[first:] + self.urls[:first]

    def _score_row(self, urls: list[str], prompt: list[int], completion: list[int], batch: "_Batch") -> np.ndarray:
        ids = prompt + completion
        hint = (
            f"The row has {len(prompt)} prompt and {len(completion)} completion tokens; if that is too long, start "
            f"the server with `--max-model-len {len(ids) + 1}` or more."
        )
        return self._score(batch, urls, ids, 0, hint, functools.partial(_completion_values, ids, len(prompt)))

    def _score(
        self,
        batch: "_Batch",
        urls: Sequence[str],
        ids: list[int],
        top: int,
        hint: str,
        read: Callable[[str, list[Any]], T],
    ) -> T:
        # no `max_tokens: 0`: vLLM refuses it
        body: dict[str, Any] = {"prompt": ids, "max_tokens": 1, "temperature": 1, "prompt_logprobs": top}
        if self.model is not None:
            body["model"] = self.model
        return self._ask(
            batch,
            urls,
            "/v1/completions",
            lambda url, answer: read(url, _prompt_logprobs(url, answer, len(ids))),
            body,
            hint=hint,
            max_bytes=_BYTES_PER_ANSWER + _BYTES_PER_ENTRY * len(ids) * (top + 1),
        )

    # ------------------------------------------------------------------------------------------------ the probe

    def _probe_url(self, url: str, min_context: int, batch: "_Batch") -> tuple[str, int]:
        served = self._ask(batch, [url], "/v1/models", _served_models)
        name = self.model
        if name is None:
            if len(served) != 1:
                raise ValueError(
                    f"The server at {url} has {len(served)} models ({', '.join(map(repr, served))}): say which one is "
                    "the teacher with `model`."
                )
            name = next(iter(served))
        elif name not in served:
            raise ValueError(
                f"The server at {url} does not have the model {name!r}, but {', '.join(map(repr, served))}: give one "
                f"of these as `model`, or start it with `--served-model-name {name}`."
            )
        limit = served[name]
        if limit is None:
            raise ValueError(f"The server at {url} does not say `max_model_len` at /v1/models. {_NOT_VLLM}")
        if limit - 1 < min_context:
            raise ValueError(
                f"The server at {url} takes {limit - 1} tokens, and prompt and completion may have {min_context} "
                f"together: start it with `--max-model-len {min_context + 1}`."
            )
        self._probe_vocabulary(batch, url, name)
        self._probe_numbers(batch, url, limit)
        return name, limit

    def _probe_vocabulary(self, batch: "_Batch", url: str, name: str) -> None:
        def there(ids: list[int]) -> str:
            body = {"model": name, "tokens": ids}
            max_bytes = _BYTES_PER_ANSWER + _BYTES_PER_ENTRY * len(ids)
            return self._ask(batch, [url], "/detokenize", _detokenized, body, max_bytes=max_bytes)

        def here(ids: list[int]) -> str:
            # vLLM decodes with special tokens
            return self._tokenizer.decode(ids, skip_special_tokens=False)

        vocabulary = self._tokenizer.get_vocab()
        # some tokenizers drop a space at the begin of a text; behind another token they keep it
        anchor = self._tokenizer.encode("a", add_special_tokens=False)[-1:]
        found = _first_difference(there, here, [anchor], [])
        for items in ([[i] for i in sorted(set(vocabulary.values()))], _characters_of_bytes(vocabulary)):
            for begin in range(0, len(items), _DETOKENIZE_CHUNK):
                found = found or _first_difference(there, here, items[begin : begin + _DETOKENIZE_CHUNK], anchor)
        if found:
            context = [] if here(found) != there(found) else anchor
            what = f"id {found[0]} is" if len(found) == 1 else f"the ids {found} are"
            raise ValueError(
                f"The vocabulary of the server at {url} differs from the student's: {what} "
                f"{here(context + found)!r} for the student and {there(context + found)!r} for the server. Serve a "
                "model of the same tokenizer family."
            )

    def _probe_numbers(self, batch: "_Batch", url: str, limit: int) -> None:
        ids = self._tokenizer.encode(_PROBE_TEXT, add_special_tokens=False)[: limit - 1]
        rows = 2 * len(self._tokenizer)
        try:
            self._score(batch, [url], ids, _TOP, "", lambda url, answer: _check_numbers(url, answer, ids, rows))
        except _Unfit as error:
            if error.status == 400 and "logprobs" in error.answer:
                raise ValueError(
                    f"The server at {url} does not give {_TOP} log-probabilities per token, which the check of its "
                    f"numbers needs ({error.answer}): start it with `--max-logprobs {_TOP}`."
                ) from None
            raise

    # ------------------------------------------------------------------------------------------------ HTTP

    def _ask(
        self,
        batch: "_Batch",
        urls: Sequence[str],
        path: str,
        read: Callable[[str, Any], T],
        body: dict[str, Any] | None = None,
        *,
        hint: str = "",
        max_bytes: int = _BYTES_PER_ANSWER,
    ) -> T:
        """What `read(url, parsed JSON)` makes of the answer; a `_Retry`, of it or of the way there, is tried again."""
        attempts = tenacity.Retrying(
            retry=tenacity.retry_if_exception_type(_Retry),
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
        except _Retry as error:
            count = self.max_retries + 1
            raise TeacherError(
                f"The teacher at {url}{path} failed in {count} attempt{'s' * (count > 1)}, the last time because "
                f"{self._without_secrets(error.what)}. {error.advice}"
            ) from None
        raise AssertionError("tenacity either returns or raises")

    def _seconds_to_wait(self, state: tenacity.RetryCallState) -> float:
        # the exponent is held: 2.0 ** 1024 overflows
        backoff = min(_LONGEST_WAIT, _FIRST_WAIT * 2.0 ** min(state.attempt_number - 1, 30))
        error = state.outcome.exception() if state.outcome is not None else None
        asked = min(error.retry_after, self.timeout) if isinstance(error, _Retry) else 0.0
        return max(backoff * self._random.uniform(0.5, 1.5), asked)

    def _attempt(
        self, batch: "_Batch", url: str, path: str, body: dict[str, Any] | None, hint: str, max_bytes: int
    ) -> Any:
        """The parsed JSON of one request."""
        # batches that overlap share the slots
        with self._slots, batch.attempt(self.timeout) as attempt:
            try:
                status, headers, answer = self._exchange(url + path, body, max_bytes)
            except (urllib3.exceptions.HTTPError, http.client.HTTPException, OSError) as error:
                if attempt.expired or isinstance(error, urllib3.exceptions.ReadTimeoutError):
                    raise _Retry(
                        f"there was no complete answer within {self.timeout:g} s",
                        "Look at the server's log; raise `timeout` or lower `concurrency` if it is only slow.",
                    ) from None
                raise _broken(error) from None
            if attempt.expired:
                # a shut socket looks like the end of an answer that has no length
                raise _Retry(f"there was no complete answer within {self.timeout:g} s", "Look at the server's log.")
        if len(answer) > max_bytes:
            raise _Retry(f"the answer has more than {max_bytes} bytes", _NOT_VLLM)
        if status in (408, 429) or status >= 500:
            raise _Retry(
                f"the status was {status} ({_message(answer)})",
                "Look at the server's log; lower `concurrency` if it is overloaded.",
                _retry_after(headers.get("Retry-After")),
            )
        if status != 200:
            self._refuse(url + path, status, _message(answer), hint)
        try:
            return json.loads(answer)
        except (ValueError, RecursionError):
            raise _Retry(f"the answer is no JSON ({_message(answer)})", _NOT_VLLM) from None

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
            timeout=Timeout(connect=min(_CONNECT_SECONDS, self.timeout), read=self.timeout),
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
        advice = {
            400: hint,
            401: "Name the environment variable that holds the API key with `api_key_env`, and check its value.",
            403: "Name the environment variable that holds the API key with `api_key_env`, and check its value.",
            404: f"Give a `model` that the server lists at /v1/models. {_NOT_VLLM}",
        }.get(status, "Check the URL." if 300 <= status < 400 else "")
        answer = self._without_secrets(answer)
        text = f"The teacher at {url} refused the request with status {status}: {answer}. {advice}"
        raise _Unfit(text.strip(), status, answer)

    def _without_secrets(self, text: str) -> str:
        for secret in self._secrets:
            text = text.replace(secret, "***")
        return text


# ---------------------------------------------------------------------------------------------------- failures


class _Retry(Exception):
    """An attempt failed in a way that may pass."""

    def __init__(self, what: str, advice: str, retry_after: float = 0.0) -> None:
        super().__init__(what)
        self.what = what
        self.advice = advice
        self.retry_after = retry_after


class _Unfit(TeacherError):
    """An answer that another attempt would not change."""

    def __init__(self, text: str, status: int = 200, answer: str = "") -> None:
        super().__init__(text)
        self.status = status
        self.answer = answer


class _Stopped(Exception):
    """Another request of the batch has failed."""


def _broken(error: Exception) -> _Retry:
    if isinstance(error, (urllib3.exceptions.NewConnectionError, urllib3.exceptions.ConnectTimeoutError)):
        return _Retry(
            f"there was no connection ({str(error).rpartition(': ')[2]})",
            f"Check host and port, and that the server is up. {_START}.",
        )
    cause = error.args[-1] if error.args else error
    return _Retry(f"the connection broke ({cause})", f"Look at the server's log: it may have died. {_START}.")


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


# ---------------------------------------------------------------------------------------------------- time limits


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


class _Batch:
    """Tasks that belong together, in threads of their own: when one has failed for good, the others stop.

    The threads are daemons, as an executor's would keep the program alive after an error elsewhere.
    """

    def __init__(self, tasks: "Sequence[Callable[[_Batch], Any]]", threads: int) -> None:
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
            threading.Thread(target=target, name=_THREAD_NAME, daemon=True).start()

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

    def _next(self) -> "tuple[int, Callable[[_Batch], Any]] | None":
        with self._lock:
            return self._todo.pop() if self._todo and not self.stopped.is_set() else None

    def _watch(self) -> None:
        """Hold every attempt to its deadline."""
        while not self._ended.wait(_WATCH_SECONDS):
            now = time.monotonic()
            with self._lock:
                for attempt in self._attempts:
                    if attempt.deadline < now:
                        attempt.expire()

    @contextlib.contextmanager
    def attempt(self, seconds: float) -> Iterator[_Attempt]:
        """The thread's attempt; at its end it is no longer watched, as its connection may serve another.

        Raises:
            _Stopped: the batch has ended.
        """
        attempt = _thread.attempt = _Attempt(seconds)
        with self._lock:
            if self.stopped.is_set():
                raise _Stopped
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


# ---------------------------------------------------------------------------------------------------- what is sent


def _parse_url(url: str) -> tuple[str, str | None]:
    """The URL without credentials, `/v1` and slash at the end, and "user:password" where it has that.

    Raises:
        ValueError: it is no http(s) URL of a host. Shows the URL without credentials.
    """
    if not isinstance(url, str):
        raise ValueError(f'`urls` must be strings, e.g. "http://127.0.0.1:8000", got {type(url).__name__}.')
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
        raise ValueError("The `urls` have different credentials: give all of them the same `user:password@`, or none.")
    user = users.pop() if users else None
    key = None
    if api_key_env is not None:
        if user is not None:
            raise ValueError("Both `api_key_env` and `user:password@` in the URL say how to authenticate: keep one.")
        key = os.environ.get(api_key_env)
        if not key:
            raise ValueError(
                f"`api_key_env` names the environment variable {api_key_env!r}, which is not set: export the server's "
                "API key in it, or leave `api_key_env` out."
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


def _unpad(request: TeacherRequest) -> list[tuple[int, list[int], list[int]]]:
    """(row, prompt ids, completion ids) of each row that has a completion."""
    prompts, prompt_mask = request.prompt_ids.cpu().numpy(), request.prompt_mask.bool().cpu().numpy()
    completions, completion_mask = request.completion_ids.cpu().numpy(), request.completion_mask.bool().cpu().numpy()
    return [
        (i, prompts[i][prompt_mask[i]].tolist(), completions[i][completion_mask[i]].tolist())
        for i in range(len(completions))
        if completion_mask[i].any()
    ]


# ---------------------------------------------------------------------------------------------------- what comes back


def _served_models(url: str, answer: Any) -> dict[str, int | None]:
    """Name -> `max_model_len`; an adapter has that of its base."""
    try:
        cards = {card["id"]: card for card in answer["data"]}
        lengths = {name: card.get("max_model_len") for name, card in cards.items()}
        return {name: lengths[name] or lengths.get(card.get("parent")) for name, card in cards.items()}
    except (KeyError, TypeError, AttributeError):
        raise _Retry("the answer is no list of models", _NOT_VLLM) from None


def _detokenized(url: str, answer: Any) -> str:
    if not isinstance(answer, dict) or not isinstance(answer.get("prompt"), str):
        raise _Retry("the answer has no text in `prompt`", _NOT_VLLM)
    return answer["prompt"]


def _prompt_logprobs(url: str, answer: Any, length: int) -> list[Any]:
    """The `length` entries of `prompt_logprobs`: null, then one object per token.

    Raises:
        _Retry: the answer is no completion.
        _Unfit: it is one, without such a list.
    """
    try:
        (choice,) = answer["choices"]
        entries = choice.get("prompt_logprobs")
    except (KeyError, TypeError, ValueError, AttributeError):
        raise _Retry("the answer is no completion", _NOT_VLLM) from None
    problem = None
    if not isinstance(entries, list):
        problem = "has no `prompt_logprobs`"
    elif len(entries) != length:
        problem = f"has {len(entries)} `prompt_logprobs` for {length} tokens"
    elif not all(isinstance(entry, dict) for entry in entries[1:]):
        problem = "has `prompt_logprobs` without a value after the first token"
    if problem is not None:
        raise _Unfit(
            f"The answer of the teacher at {url} {problem}, so it cannot be used. {_NOT_VLLM} Other servers accept "
            "the request and leave the field out."
        )
    return entries


def _completion_values(ids: list[int], prompt: int, url: str, entries: list[Any]) -> np.ndarray:
    """(len(ids) - prompt,) float32: the value of each completion token, NaN where it is not finite.

    Raises:
        _Unfit: an entry lacks its token, or holds something else than a number, or a number above 0.
    """
    tokens = zip(entries[prompt:], ids[prompt:], strict=True)
    scores = _numbers(url, lambda: [entry[str(i)]["logprob"] for entry, i in tokens])
    scores[~np.isfinite(scores) | (scores == _MINUS_INFINITY)] = np.nan
    if (scores > _ROUNDING).any():
        raise _no_logprobs(url, f"a token has the value {np.nanmax(scores):.4g}, above 0")
    return scores.astype(np.float32)


def _check_numbers(url: str, entries: list[Any], ids: list[int], rows: int) -> None:
    """Refuse values that are no log-probabilities, from the `_TOP` best of each position.

    Logits are told by their sums: the probabilities of the best `_TOP` of V tokens are together at most 1, and at
    least `_TOP` / V. `rows` is an upper bound of V.

    Raises:
        _Unfit: with the option to start the server with.
    """
    finite = np.isfinite(_completion_values(ids, 1, url, entries)).all()
    for entry in entries[1:]:
        values = _numbers(url, lambda entry=entry: [value["logprob"] for value in entry.values()])
        best = np.sort(values)[::-1][:_TOP]
        if len(best) < _TOP:
            raise _Unfit(f"The server at {url} gave {len(best)} values where {_TOP} were asked for. {_NOT_VLLM}")
        if not (finite and np.isfinite(best).all()):
            raise _Unfit(
                f"The server at {url} gives values that are not finite for a plain text: its model overflows. Start "
                "it with `--dtype float32` or `--dtype bfloat16`."
            )
        if best[0] > _ROUNDING:
            raise _no_logprobs(url, f"a token has the value {best[0]:.4g}, above 0")
        total = float(np.exp(best).sum())
        if total > 1 + 10 * _ROUNDING or total < _TOP / rows:
            raise _no_logprobs(url, f"the best {_TOP} tokens of a position have probability {total:.4g} together")


def _numbers(url: str, collect: Callable[[], list[Any]]) -> np.ndarray:
    """The collected `logprob`s as float64; null is NaN."""
    try:
        values = collect()
    except (KeyError, TypeError):
        raise _Unfit(
            f"The answer of the teacher at {url} lacks a token that was sent: `prompt_logprobs` must hold each "
            f"token's id with its `logprob`. {_NOT_VLLM}"
        ) from None
    if not set(map(type, values)) <= {float, int, type(None)}:
        raise _Unfit(f"The teacher at {url} gave a `logprob` that is no number. {_NOT_VLLM}")
    try:
        return np.array(values, dtype=np.float64)
    except OverflowError:
        raise _Unfit(f"The teacher at {url} gave a `logprob` beyond float64. {_NOT_VLLM}") from None


def _no_logprobs(url: str, what: str) -> _Unfit:
    return _Unfit(
        f"The numbers of the server at {url} are no log-probabilities: {what}. Start it with `--logprobs-mode "
        "raw_logprobs`, vLLM's default."
    )


# ---------------------------------------------------------------------------------------------------- vocabulary


def _first_difference(
    there: Callable[[list[int]], str], here: Callable[[list[int]], str], items: list[list[int]], anchor: list[int]
) -> list[int] | None:
    """The first of the id lists that both sides decode to different texts, behind `anchor`.

    None where only the joins differ: that is a matter of clean-up between tokens.
    """
    ids = [*anchor, *itertools.chain.from_iterable(items)]
    if there(ids) == here(ids):
        return None
    if len(items) == 1:
        return items[0]
    half = len(items) // 2
    return _first_difference(there, here, items[:half], anchor) or _first_difference(there, here, items[half:], anchor)


def _characters_of_bytes(vocabulary: dict[str, int]) -> list[list[int]]:
    """For each token that is a part of a character: ids that make it whole, since by itself it decodes to U+FFFD.

    A token of bytes that no text has is left out.
    """
    table = _byte_table(vocabulary)
    single = {byte: vocabulary[token] for token, byte in table.items() if token in vocabulary}
    items = []
    for token, i in sorted(vocabulary.items(), key=lambda item: item[1]):
        if token in table:
            part = bytes([table[token]])
        elif all(character in table for character in token):
            part = bytes(table[character] for character in token)
        else:
            continue
        if _is_text(part):
            continue
        for before, after in itertools.product(_BEFORE, _AFTER):
            if _is_text(before + part + after) and all(byte in single for byte in before + after):
                items.append([*(single[byte] for byte in before), i, *(single[byte] for byte in after)])
                break
    return items


# what may stand before 0 to 3 bytes that continue a character, and after its first byte or bytes
_BEFORE = [b"", b"\xc3", b"\xe1", b"\xf1"]
_AFTER = [b"", *(first + b"\x80" * more for more in range(3) for first in (b"\x80", b"\x90", b"\xa0"))]


def _is_text(part: bytes) -> bool:
    try:
        part.decode()
    except UnicodeDecodeError:
        return False
    return True


def _byte_table(vocabulary: dict[str, int]) -> dict[str, int]:
    """How the vocabulary spells bytes: "<0xC3>" with byte fallback, else the printable stand-ins of byte-level BPE."""
    fallback = {f"<0x{byte:02X}>": byte for byte in range(256)}
    if fallback.keys() <= vocabulary.keys():
        return fallback
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}
