"""An HTTP server that answers through a function, or does something worse: what a client must live with.

    with FaultProxy(forward("http://127.0.0.1:8000"), faults=[drop, status(429)]) as proxy:
        ...  # proxy.url; the first scoring request is dropped, the second gets a 429, the others pass

Faults are used up in order, by the requests for `/v1/completions` alone.
"""

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import urllib3

# (method, path, body) -> (status, body)
Answer = Callable[[str, str, bytes], tuple[int, bytes]]


def forward(url: str, headers: Mapping[str, str] | None = None) -> Answer:
    """Pass every request on to the server at `url`, with `headers` in place of the client's."""
    pool = urllib3.PoolManager(maxsize=32, retries=False)

    def answer(method: str, path: str, body: bytes) -> tuple[int, bytes]:
        sent = {"Content-Type": "application/json", **(headers or {})}
        response = pool.request(method, url + path, body=body or None, headers=sent, timeout=100)
        return response.status, response.data

    return answer


class FaultProxy:
    """Counts what passes: `connections` opened, `requests` as (method, path, body, headers)."""

    def __init__(self, answer: Answer, faults: "Iterable[Fault | None]" = ()) -> None:
        self.answer = answer
        self.faults: Iterator[Fault | None] = iter(faults)
        self.connections = 0
        self.requests: list[tuple[str, str, bytes, dict[str, str]]] = []
        self.closing = threading.Event()
        self.lock = threading.Lock()
        handler = type("Handler", (_Handler,), {"proxy": self})
        self._server = _Server(("127.0.0.1", 0), handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> "FaultProxy":
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        return self

    def __exit__(self, *args: object) -> None:
        self.closing.set()
        self._server.shutdown()
        self._server.server_close()

    @property
    def scored(self) -> int:
        """Requests for log-probabilities so far."""
        return sum(path == "/v1/completions" for _, path, _, _ in self.requests)


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 128

    def handle_error(self, request: Any, client_address: Any) -> None:
        pass  # the client went away, which is what it should do


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    # two writes per answer: with Nagle's algorithm the second waits for the first's acknowledgment
    disable_nagle_algorithm = True
    proxy: FaultProxy

    def setup(self) -> None:
        super().setup()
        with self.proxy.lock:
            self.proxy.connections += 1

    def do_GET(self) -> None:
        self._serve()

    def do_POST(self) -> None:
        self._serve()

    def _serve(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        with self.proxy.lock:
            self.proxy.requests.append((self.command, self.path, body, dict(self.headers)))
            fault = next(self.proxy.faults, None) if self.path == "/v1/completions" else None
        if fault is None:
            self.reply(*self.proxy.answer(self.command, self.path, body))
        else:
            fault(self, body)

    def reply(self, status: int, body: bytes, *, length: int | None = None, headers: Any = ()) -> None:
        """An answer with all its headers; `length` other than the body's is a lie."""
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body) if length is None else length))
        for name, value in dict(headers).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: Any) -> None:
        pass


Fault = Callable[[_Handler, bytes], None]


def delay(seconds: float) -> Fault:
    """The right answer, late."""

    def fault(handler: _Handler, body: bytes) -> None:
        handler.proxy.closing.wait(seconds)
        handler.reply(*handler.proxy.answer(handler.command, handler.path, body))

    fault.__name__ = "delay"
    return fault


def status(code: int, body: bytes = b'{"error": {"message": "no luck"}}', **headers: str) -> Fault:
    """Another status than 200, or 200 with a body of one's own; `Retry_After="1"` is a header."""
    named = {name.replace("_", "-"): value for name, value in headers.items()}

    def fault(handler: _Handler, _: bytes) -> None:
        handler.reply(code, body, headers=named)

    fault.__name__ = f"status_{code}"
    return fault


garbage = status(200, b"<html>502 Bad Gateway</html>")
wrong_shape = status(200, b'{"object": "list"}')


def drop(handler: _Handler, body: bytes) -> None:
    """Close the connection without a word."""
    handler.close_connection = True


def truncate(handler: _Handler, body: bytes) -> None:
    """Half of the right answer, then close."""
    code, answer = handler.proxy.answer(handler.command, handler.path, body)
    handler.reply(code, answer[: len(answer) // 2], length=len(answer))
    handler.close_connection = True


def drip(handler: _Handler, body: bytes) -> None:
    """A byte of the body now and then, for ever: no single read ever times out."""
    handler.reply(200, b"{", length=1 << 30)
    while not handler.proxy.closing.wait(0.05):
        handler.wfile.write(b" ")


def drip_headers(handler: _Handler, body: bytes) -> None:
    """The same before the headers have ended."""
    handler.wfile.write(b"HTTP/1.1 200 OK\r\nX-Slow: ")
    while not handler.proxy.closing.wait(0.05):
        handler.wfile.write(b"x")


def flood(handler: _Handler, body: bytes) -> None:
    """More bytes than any answer has, as fast as they go."""
    handler.reply(200, b"{", length=1 << 40)
    while not handler.proxy.closing.is_set():
        handler.wfile.write(b" " * (1 << 20))
