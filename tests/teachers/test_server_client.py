"""The client of a teacher server against a small stand-in for one: what it refuses, and what it lives through."""

import email.utils
import itertools
import json
import logging
import math
import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from teachers import fault_proxy
from teachers.fault_proxy import FaultProxy

from trl_softgate.teachers import TeacherRequest, http, server
from trl_softgate.teachers.base import TeacherError, start
from trl_softgate.teachers.server import ServerTeacher

ROOT = Path(__file__).parents[2]
KEY = "sk-very-secret"


def score(ids: list[int], t: int) -> float:
    """The stand-in's log-probability of token t: depends on the token, its predecessor and its place."""
    return -0.1 * (1 + (7 * ids[t] + 3 * ids[t - 1] + t) % 50)


class StandIn:
    """Answers as `vllm serve` does. `spoil` gets each scoring answer's list of entries, and returns another."""

    def __init__(self, tokenizer: Any = None, max_model_len: Any = 64, names: tuple[str, ...] = ("teacher",)) -> None:
        self.tokenizer = tiny.tokenizer() if tokenizer is None else tokenizer
        self.cards: list[dict[str, Any]] = [{"id": name, "max_model_len": max_model_len} for name in names]
        self.spoil: Callable[[list[Any]], Any] = lambda entries: entries
        self.others = math.log(1 / 40)

    def __call__(self, method: str, path: str, body: bytes) -> tuple[int, bytes]:
        asked = json.loads(body or b"{}")
        if (method, path) == ("GET", "/v1/models"):
            return 200, json.dumps({"data": self.cards}).encode()
        if (method, path) == ("POST", "/detokenize"):
            return 200, json.dumps({"prompt": self.tokenizer.decode(asked["tokens"])}).encode()
        assert (method, path) == ("POST", "/v1/completions")
        ids, top = asked["prompt"], asked["prompt_logprobs"]
        entries: list[Any] = [None]
        for t in range(1, len(ids)):
            best = {str(300 + i): {"logprob": self.others} for i in range(top)}
            entries.append({str(ids[t]): {"logprob": score(ids, t) - 5 * bool(top)}, **best})
        return 200, json.dumps({"choices": [{"prompt_logprobs": self.spoil(entries)}]}).encode()


def request(rows: int = 4, temperature: float = 1.0, seed: int = 0) -> TeacherRequest:
    """Ragged; row 1 is left out of the loss, row 2 has a completion of one token, row 0 of the maximum."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(4, 260, (rows, 11), generator=generator)
    prompts = torch.tensor([1 + i % 5 for i in range(rows)])
    completions = torch.tensor([[6, 0, 1, 4][i % 4] for i in range(rows)])
    prompt_mask = (torch.arange(5) >= 5 - prompts[:, None]).long()
    completion_mask = (torch.arange(6) < completions[:, None]).long()
    return TeacherRequest(ids[:, :5], prompt_mask, ids[:, 5:], completion_mask, temperature)


def expected(request: TeacherRequest) -> torch.Tensor:
    scores = torch.zeros(request.completion_ids.shape)
    for i in range(scores.shape[0]):
        prompt = request.prompt_ids[i][request.prompt_mask[i] == 1].tolist()
        completion = request.completion_ids[i][request.completion_mask[i] == 1].tolist()
        for t in range(len(completion)):
            scores[i, t] = score(prompt + completion, len(prompt) + t)
    return scores


def teacher(urls: Any, **kwargs: Any) -> ServerTeacher:
    return ServerTeacher(urls, **{"tokenizer": tiny.tokenizer(), "timeout": 10.0, **kwargs})


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "FIRST_WAIT", 0.01)


@pytest.fixture
def stand_in() -> StandIn:
    return StandIn()


@pytest.fixture
def proxy(stand_in: StandIn) -> Iterator[FaultProxy]:
    with FaultProxy(stand_in) as running:
        yield running


class TestOptions:
    @pytest.mark.parametrize("temperature", [0.7, 0, float("nan")])
    def test_only_temperature_1(self, temperature: float) -> None:
        with pytest.raises(ValueError, match="`temperature=1`, or state `teacher_temperature=1`"):
            teacher("http://localhost:1", temperature=temperature)

    @pytest.mark.parametrize(
        "url",
        ["localhost:8000", "http://", "http://:8000", "ftp://host", "http://host:port", "http://[::1", "host", ""]
        + ["http://host:99999", "http://host/?a=b", "http://host/#a", "http://a b/", "//host:8000"],
    )
    def test_no_url(self, url: str) -> None:
        with pytest.raises(ValueError, match="is no URL of a server: give scheme, host and port"):
            teacher(url)

    @pytest.mark.parametrize("end", ["", "/", "/v1", "/v1/"])
    def test_ends_that_do_not_matter(self, end: str) -> None:
        assert teacher(f"http://localhost:8000{end}").urls == ["http://localhost:8000"]
        assert teacher(f"https://[::1]:8000/a/b{end}").urls == ["https://[::1]:8000/a/b"]

    def test_no_urls(self) -> None:
        with pytest.raises(ValueError, match="`teacher_server_url` is empty"):
            teacher([])
        with pytest.raises(ValueError, match="must be a text"):
            teacher([8000])

    @pytest.mark.parametrize(
        "option",
        [{"concurrency": 0}, {"concurrency": 1.5}, {"timeout": 0}, {"max_retries": -1}, {"max_retries": True}],
    )
    def test_out_of_range(self, option: dict[str, Any]) -> None:
        with pytest.raises(ValueError, match=next(iter(option))):
            teacher("http://localhost:1", **option)

    def test_key_that_is_missing_or_cannot_be_sent(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("TEACHER_KEY", raising=False)
        with pytest.raises(ValueError, match="'TEACHER_KEY', which is not set"):
            teacher("http://localhost:1", api_key_env="TEACHER_KEY")
        monkeypatch.setenv("TEACHER_KEY", f"{KEY}\n")
        with pytest.raises(ValueError, match="'TEACHER_KEY' has a space, a line break") as caught:
            teacher("http://localhost:1", api_key_env="TEACHER_KEY")
        assert KEY not in str(caught.value)

    def test_two_ways_to_authenticate(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("TEACHER_KEY", KEY)
        with pytest.raises(ValueError, match="Both `teacher_server_api_key_env` and `user:password@`"):
            teacher("http://me:word@localhost:1", api_key_env="TEACHER_KEY")
        with pytest.raises(ValueError, match="different credentials"):
            teacher(["http://me:word@localhost:1", "http://localhost:2"])


class TestSecrets:
    def test_are_sent_and_not_shown(
        self, proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        caplog.set_level(logging.DEBUG)
        monkeypatch.setenv("TEACHER_KEY", KEY)
        made = teacher(proxy.url, api_key_env="TEACHER_KEY", max_retries=0)
        made(request())
        assert {headers["Authorization"] for *_, headers in proxy.requests} == {f"Bearer {KEY}"}
        shown = [repr(made)]
        for fault in (401, 500):
            proxy.faults = itertools.repeat(fault_proxy.status(fault, f"your key {KEY} is wrong".encode()))
            with pytest.raises(TeacherError, match=r"your key \*\*\* is wrong") as caught:
                made(request())
            shown.append(str(caught.value))
        assert KEY not in " ".join(shown) + caplog.text

    def test_of_the_url(self, proxy: FaultProxy, caplog: pytest.LogCaptureFixture) -> None:
        caplog.set_level(logging.DEBUG)
        made = teacher(proxy.url.replace("//", "//me:pass%20word@"), max_retries=0)
        made(request())
        # base64 of "me:pass word"
        assert proxy.requests[0][3]["Authorization"] == "Basic bWU6cGFzcyB3b3Jk"
        proxy.faults = iter([fault_proxy.status(500)])
        with pytest.raises(TeacherError) as caught:
            made(request())
        with pytest.raises(ValueError) as refused:
            teacher("me:pass word@localhost:8000")
        shown = " ".join([repr(made), str(caught.value), str(refused.value), caplog.text])
        assert "pass" not in shown and "bWU6" not in shown


class TestScores:
    def test_in_their_places(self, proxy: FaultProxy) -> None:
        asked = request(rows=9)
        scores = start(teacher(proxy.url), asked)()
        assert scores.dtype == torch.float32
        torch.testing.assert_close(scores, expected(asked))
        # row 1 and 5 have no completion
        assert proxy.scored == 7
        sent = json.loads(proxy.requests[0][2])
        assert {**sent, "prompt": None} == {
            "prompt": None,
            "max_tokens": 1,
            "temperature": 1,
            "prompt_logprobs": 0,
        }

    def test_nothing_to_score(self, proxy: FaultProxy) -> None:
        asked = request()
        nothing = TeacherRequest(
            asked.prompt_ids, asked.prompt_mask, asked.completion_ids, torch.zeros_like(asked.completion_mask), 1.0
        )
        assert torch.equal(teacher(proxy.url)(nothing), torch.zeros(4, 6))
        assert not proxy.requests

    def test_start_does_not_wait(self, proxy: FaultProxy) -> None:
        proxy.faults = itertools.repeat(fault_proxy.delay(0.5))
        begin = time.monotonic()
        result = teacher(proxy.url).start(request())
        assert time.monotonic() - begin < 0.3
        torch.testing.assert_close(result(), expected(request()))
        torch.testing.assert_close(result(), expected(request()))

    def test_the_model_is_named(self, proxy: FaultProxy) -> None:
        teacher(proxy.url, model="this")(request())
        assert json.loads(proxy.requests[0][2])["model"] == "this"

    def test_connections_are_kept(self, proxy: FaultProxy) -> None:
        made = teacher(proxy.url, concurrency=3)
        for seed in range(3):
            torch.testing.assert_close(made(request(24, seed=seed)), expected(request(24, seed=seed)))
        assert proxy.scored == 54
        assert 1 <= proxy.connections <= 3

    def test_no_more_at_once_than_concurrency(self, proxy: FaultProxy) -> None:
        """Over all batches that are on their way: 12 requests, 2 at once, 0.1 s each."""
        proxy.faults = itertools.repeat(fault_proxy.delay(0.1))
        made = teacher(proxy.url, concurrency=2)
        begin = time.monotonic()
        for result in [made.start(request(8)), made.start(request(8))]:
            result()
        assert 0.6 <= time.monotonic() - begin < 4

    @pytest.mark.parametrize("value", [float("nan"), float("-inf"), float("inf"), None, -9999.0])
    def test_a_token_without_a_value_is_nan(self, proxy: FaultProxy, stand_in: StandIn, value: Any) -> None:
        stand_in.spoil = lambda entries: [*entries[:-1], {i: {"logprob": value} for i in entries[-1]}]
        scores = teacher(proxy.url)(request())
        assert scores.isnan().nonzero().tolist() == [[0, 5], [2, 0], [3, 3]]

    @pytest.mark.parametrize(
        "spoil, message",
        [
            (lambda entries: None, "has no `prompt_logprobs`"),
            (lambda entries: {}, "has no `prompt_logprobs`"),
            (lambda entries: entries[:-1], r"has \d+ `prompt_logprobs` for \d+ tokens"),
            (lambda entries: [*entries, None], r"has \d+ `prompt_logprobs` for \d+ tokens"),
            (lambda entries: [*entries[:-1], None], "without a value after the first token"),
            (lambda entries: [None, None, *entries[2:]], "without a value after the first token"),
            (lambda entries: [*entries[:-1], {"3": {"logprob": -1.0}}], "lacks a token that was sent"),
            (lambda entries: [*entries[:-1], {i: {} for i in entries[-1]}], "lacks a token that was sent"),
            (lambda entries: [*entries[:-1], dict.fromkeys(entries[-1], -1.0)], "lacks a token that was sent"),
            (lambda entries: [*entries[:-1], {i: {"logprob": "-1"} for i in entries[-1]}], "no number"),
            (lambda entries: [*entries[:-1], {i: {"logprob": True} for i in entries[-1]}], "no number"),
            (lambda entries: [*entries[:-1], {i: {"logprob": -(10**400)} for i in entries[-1]}], "beyond float64"),
            (
                lambda entries: [*entries[:-1], {i: {"logprob": 0.5} for i in entries[-1]}],
                "logprobs-mode raw_logprobs",
            ),
        ],
    )
    def test_answers_that_cannot_be_used(
        self, proxy: FaultProxy, stand_in: StandIn, spoil: Callable[[list[Any]], Any], message: str
    ) -> None:
        stand_in.spoil = spoil
        with pytest.raises(TeacherError, match=message):
            teacher(proxy.url, concurrency=1)(request())
        assert proxy.scored == 1

    def test_an_answer_without_the_field(self, proxy: FaultProxy) -> None:
        proxy.faults = itertools.repeat(fault_proxy.status(200, b'{"choices": [{"text": "a"}]}'))
        with pytest.raises(TeacherError, match="has no `prompt_logprobs`"):
            teacher(proxy.url)(request())

    def test_other_temperature(self) -> None:
        with pytest.raises(ValueError, match="was sampled at 0.5"):
            teacher("http://localhost:1")(request(temperature=0.5))

    def test_rows_that_no_server_can_score(self, proxy: FaultProxy, stand_in: StandIn) -> None:
        asked = request()
        empty = TeacherRequest(
            asked.prompt_ids, 0 * asked.prompt_mask, asked.completion_ids, asked.completion_mask, 1.0
        )
        with pytest.raises(TeacherError, match="Row 0 has an empty prompt"):
            teacher(proxy.url).start(empty)
        stand_in.cards[0]["max_model_len"] = 7
        made = teacher(proxy.url)
        made.probe(6)
        before = len(proxy.requests)
        with pytest.raises(TeacherError, match=r"Row 0 has 1 prompt and 6 completion tokens.*--max-model-len 8`"):
            made.start(asked)
        assert len(proxy.requests) == before


class TestFaults:
    @pytest.mark.parametrize(
        "faults",
        [
            [fault_proxy.delay(3)],
            [fault_proxy.drop],
            [fault_proxy.truncate],
            [fault_proxy.drip],
            [fault_proxy.drip_headers],
            [fault_proxy.flood],
            [fault_proxy.status(429)],
            [fault_proxy.status(500), fault_proxy.status(503)],
            [fault_proxy.status(408)],
            [fault_proxy.garbage],
            [fault_proxy.wrong_shape],
            [fault_proxy.status(200, b""), fault_proxy.status(200, b"[" * 100_000)],
            [fault_proxy.status(200, b"\xff\xfe"), fault_proxy.status(200, b'{"choices": []}')],
        ],
    )
    @pytest.mark.timeout(20)
    def test_pass(self, proxy: FaultProxy, faults: list[Any]) -> None:
        proxy.faults = iter(faults)
        begin = time.monotonic()
        scores = teacher(proxy.url, timeout=0.5, max_retries=len(faults))(request())
        torch.testing.assert_close(scores, expected(request()))
        assert proxy.scored == 3 + len(faults)
        assert time.monotonic() - begin < 2.5

    @pytest.mark.parametrize(
        "fault, message",
        [
            (fault_proxy.delay(20), "no complete answer within 0.5 s.*raise `teacher_server_timeout`"),
            (fault_proxy.drop, "the connection broke .*Remote end closed.*server's log"),
            (fault_proxy.truncate, "the connection broke .*bytes read.*server's log"),
            (fault_proxy.drip, "no complete answer within 0.5 s"),
            (fault_proxy.drip_headers, "no complete answer within 0.5 s"),
            (fault_proxy.flood, "more than .* bytes.*Is this a `vllm serve`"),
            (fault_proxy.status(429), r"the status was 429 \(no luck\).*lower `teacher_server_concurrency`"),
            (fault_proxy.status(500, b'{"error": "flat"}'), r"the status was 500 \(flat\).*server's log"),
            (fault_proxy.status(500, b""), r"the status was 500 \(empty body\)"),
            (fault_proxy.garbage, r"the answer is no JSON \(<html>502 Bad Gateway</html>\).*Is this a `vllm serve`"),
            (fault_proxy.wrong_shape, "the answer is no completion.*Is this a `vllm serve`"),
        ],
    )
    @pytest.mark.timeout(20)
    def test_that_last_are_an_error(self, proxy: FaultProxy, fault: Any, message: str) -> None:
        proxy.faults = itertools.repeat(fault)
        begin = time.monotonic()
        with pytest.raises(TeacherError, match=message) as caught:
            teacher(proxy.url, timeout=0.5, max_retries=1)(request())
        assert f"The teacher at {proxy.url}/v1/completions failed in 2 attempts" in str(caught.value)
        assert time.monotonic() - begin < 3

    def test_no_server(self) -> None:
        with pytest.raises(TeacherError, match=r"failed in 3 attempts.*Connection refused.*`vllm serve MODEL"):
            teacher("http://127.0.0.1:9", max_retries=2)(request())

    @pytest.mark.parametrize(
        "code, message",
        [
            (400, r"with status 400: no luck\. The row has 1 prompt and 6 completion .*`--max-model-len 8`"),
            (401, "`teacher_server_api_key_env`"),
            (404, "a `teacher_server_model` that the server lists"),
            (422, "status 422: no luck"),
            (307, "Check the URL"),
        ],
    )
    def test_refusals_are_not_tried_again(self, proxy: FaultProxy, code: int, message: str) -> None:
        proxy.faults = itertools.repeat(fault_proxy.status(code, Location="/elsewhere"))
        with pytest.raises(TeacherError, match=message):
            teacher(proxy.url, concurrency=1)(request())
        assert proxy.scored == 1

    @pytest.mark.timeout(20)
    def test_one_failure_ends_the_others(self, proxy: FaultProxy) -> None:
        """Those that wait for an answer as well as those that wait for their turn."""
        proxy.faults = itertools.chain([fault_proxy.delay(8)], [fault_proxy.status(400)], [fault_proxy.delay(8)] * 20)
        made = teacher(proxy.url, concurrency=2)
        begin = time.monotonic()
        with pytest.raises(TeacherError, match="status 400"):
            made(request(12))
        assert time.monotonic() - begin < 2
        while any(thread.name == http.THREAD_NAME for thread in threading.enumerate()):
            assert time.monotonic() - begin < 2
            time.sleep(0.01)
        assert proxy.scored <= 4

    @pytest.mark.parametrize("form", ["seconds", "date"])
    def test_retry_after(self, proxy: FaultProxy, form: str) -> None:
        # a date has whole seconds
        asked = "1" if form == "seconds" else email.utils.formatdate(time.time() + 2, usegmt=True)
        proxy.faults = iter([fault_proxy.status(503, Retry_After=asked)])
        begin = time.monotonic()
        torch.testing.assert_close(teacher(proxy.url)(request()), expected(request()))
        assert 0.95 <= time.monotonic() - begin < 4

    @pytest.mark.parametrize("asked", ["100000", "1e400", "nan", "-5", "soon", "Fri, 31 Dec 9999 23:59:59 GMT"])
    @pytest.mark.timeout(20)
    def test_retry_after_has_bounds(self, proxy: FaultProxy, asked: str) -> None:
        proxy.faults = iter([fault_proxy.status(429, Retry_After=asked)])
        begin = time.monotonic()
        torch.testing.assert_close(teacher(proxy.url, timeout=0.5)(request()), expected(request()))
        assert time.monotonic() - begin < 2

    def test_waits_grow_and_leave_the_random_numbers_alone(
        self, proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(http, "FIRST_WAIT", 0.1)
        monkeypatch.setattr(http, "LONGEST_WAIT", 0.4)
        proxy.faults = itertools.repeat(fault_proxy.status(500))
        state = random.getstate()
        begin = time.monotonic()
        with pytest.raises(TeacherError, match="failed in 5 attempts"):
            teacher(proxy.url, max_retries=4, concurrency=1)(request())
        # 0.1, 0.2, 0.4, 0.4, each between half and one and a half
        assert 0.55 <= time.monotonic() - begin < 3
        assert random.getstate() == state

    @pytest.mark.timeout(60)
    def test_the_program_ends(self, proxy: FaultProxy) -> None:
        """After an error elsewhere, while rows are on their way and others wait for their turn."""
        proxy.faults = itertools.repeat(fault_proxy.delay(40))
        program = (
            "import sys, time, types, torch\n"
            # the package without the imports of the local teacher, which take ten times as long as the test
            "sys.modules['trl_softgate.teachers'] = package = types.ModuleType('trl_softgate.teachers')\n"
            "package.__path__ = ['trl_softgate/teachers']\n"
            "from trl_softgate.teachers.base import TeacherRequest\n"
            "from trl_softgate.teachers.server import ServerTeacher\n"
            "ones = torch.ones(12, 3, dtype=torch.long)\n"
            f"teacher = ServerTeacher({proxy.url!r}, tokenizer=None, timeout=40.0, concurrency=2)\n"
            "result = teacher.start(TeacherRequest(ones, ones, ones, ones, 1.0))\n"
            "time.sleep(0.5)\n"
            "print('started', flush=True)\n"
            "raise SystemError('elsewhere')\n"
        )
        process = subprocess.Popen(
            [sys.executable, "-c", program],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == "started\n"
            begin = time.monotonic()
            _, errors = process.communicate(timeout=20)
            assert time.monotonic() - begin < 5
            assert "SystemError: elsewhere" in errors
            assert proxy.scored == 2
        finally:
            process.kill()


class TestSeveral:
    def test_share_the_rows(self, stand_in: StandIn) -> None:
        with FaultProxy(stand_in) as first, FaultProxy(stand_in) as second:
            torch.testing.assert_close(teacher([first.url, second.url])(request(16)), expected(request(16)))
            assert first.scored == second.scored == 6

    def test_a_dead_one_is_passed_over(self, proxy: FaultProxy) -> None:
        made = teacher(["http://127.0.0.1:9", proxy.url], max_retries=1)
        torch.testing.assert_close(made(request(16)), expected(request(16)))

    def test_a_failing_one_is_passed_over(self, stand_in: StandIn) -> None:
        with FaultProxy(stand_in, itertools.repeat(fault_proxy.status(500))) as first, FaultProxy(stand_in) as second:
            made = teacher([first.url, second.url], max_retries=1)
            torch.testing.assert_close(made(request(16)), expected(request(16)))
            assert first.scored == 6 and second.scored == 12

    def test_of_different_models(self, stand_in: StandIn) -> None:
        with FaultProxy(stand_in) as first, FaultProxy(StandIn(names=("other",))) as second:
            with pytest.raises(ValueError, match="have different models: 'teacher' at .*, 'other' at"):
                teacher([first.url, second.url]).probe(8)
            with pytest.raises(ValueError, match=f"{second.url} does not have the model 'teacher', but 'other'"):
                teacher([first.url, second.url], model="teacher").probe(8)

    def test_the_shortest_context_counts(self, stand_in: StandIn) -> None:
        with FaultProxy(stand_in) as first, FaultProxy(StandIn(max_model_len=20)) as second:
            with pytest.raises(ValueError, match=f"{second.url} takes 19 tokens.*--max-model-len 41`"):
                teacher([first.url, second.url]).probe(40)
            made = teacher([first.url, second.url])
            made.probe(19)
            with pytest.raises(TeacherError, match="the server takes 19 together"):
                made._check_row(0, 10, 10)


class TestProbe:
    def test_fits(self, proxy: FaultProxy) -> None:
        made = teacher(proxy.url)
        made.probe(63)
        assert made.model == "teacher"
        torch.testing.assert_close(made(request()), expected(request()))

    def test_no_server(self) -> None:
        with pytest.raises(TeacherError, match=r"failed in 2 attempts.*Start it with `vllm serve"):
            teacher("http://127.0.0.1:9", max_retries=1).probe(8)

    def test_several_models(self, proxy: FaultProxy, stand_in: StandIn) -> None:
        stand_in.cards.append({"id": "adapter", "max_model_len": None, "parent": "teacher"})
        with pytest.raises(
            ValueError, match="has 2 models .'teacher', 'adapter'.: say which .*`teacher_server_model`"
        ):
            teacher(proxy.url).probe(8)
        teacher(proxy.url, model="adapter").probe(8)

    def test_not_served(self, proxy: FaultProxy) -> None:
        with pytest.raises(
            ValueError, match="does not have the model 'other', but 'teacher'.*--served-model-name other"
        ):
            teacher(proxy.url, model="other").probe(8)

    def test_no_length(self, proxy: FaultProxy, stand_in: StandIn) -> None:
        stand_in.cards = [{"id": "teacher"}]
        with pytest.raises(ValueError, match="does not say `max_model_len`"):
            teacher(proxy.url).probe(8)

    def test_no_list_of_models(self, proxy: FaultProxy, stand_in: StandIn) -> None:
        stand_in.cards = [{"name": "teacher"}]
        with pytest.raises(TeacherError, match="failed in 2 attempts.*no list of models"):
            teacher(proxy.url, max_retries=1).probe(8)

    def test_too_short(self, proxy: FaultProxy) -> None:
        with pytest.raises(ValueError, match="takes 63 tokens.*may have 64 together.*`--max-model-len 65`"):
            teacher(proxy.url).probe(64)

    @pytest.mark.parametrize("swap", [(50, 60), (0, 100), (2, 3), (90, 97)])
    def test_other_vocabulary(self, proxy: FaultProxy, stand_in: StandIn, swap: tuple[int, int]) -> None:
        stand_in.tokenizer = tiny.tokenizer(swap=swap)
        here, there = tiny.tokenizer().decode([swap[0]]), stand_in.tokenizer.decode([swap[0]])
        with pytest.raises(ValueError, match=f"id {swap[0]} is") as caught:
            teacher(proxy.url).probe(8)
        assert f"{here!r} for the student and {there!r} for the server" in str(caught.value)

    def test_parts_of_characters(self, proxy: FaultProxy, stand_in: StandIn) -> None:
        """Bytes 0x80 and 0x81 are the same replacement character by themselves."""
        names = ["\u0122", "\u0123"]
        swap = tuple(tiny.tokenizer().get_vocab()[name] for name in names)
        stand_in.tokenizer = tiny.tokenizer(swap=swap)  # type: ignore[arg-type]
        assert tiny.tokenizer().decode([swap[0]]) == stand_in.tokenizer.decode([swap[0]])
        with pytest.raises(ValueError, match=rf"the ids \[\d+, {swap[0]}\] are '.*' for the student and '.*'"):
            teacher(proxy.url).probe(8)

    def test_all_bytes_of_text_are_held_against_each_other(self) -> None:
        vocabulary = tiny.tokenizer().get_vocab()
        items = server._characters_of_bytes(vocabulary)
        # 0x80 to 0xBF continue a character, 0xC2 to 0xF4 begin one
        assert len(items) == 64 + 51
        assert all("\ufffd" not in tiny.tokenizer().decode(item) for item in items)

    def test_clean_up_between_tokens_is_no_difference(self, proxy: FaultProxy, stand_in: StandIn) -> None:
        class CleanUp:
            def decode(self, ids: list[int]) -> str:
                return str(tiny.tokenizer().decode(ids)).replace(",-", ",  -")

        stand_in.tokenizer = CleanUp()
        teacher(proxy.url).probe(8)

    def test_a_space_at_the_begin_counts(self, proxy: FaultProxy, stand_in: StandIn) -> None:
        """Tokenizers that drop it would hide that "a" and " a" are exchanged."""
        words = ["<pad>", "a", " a", "b"]

        class Words:
            def __init__(self, words: list[str]) -> None:
                self.words = words

            def __len__(self) -> int:
                return 300

            def get_vocab(self) -> dict[str, int]:
                return {word: i for i, word in enumerate(self.words)}

            def encode(self, text: str, add_special_tokens: bool) -> list[int]:
                return [3] * len(text)

            def decode(self, ids: list[int], skip_special_tokens: bool = False) -> str:
                return "".join(self.words[i] for i in ids).removeprefix(" ")

        stand_in.tokenizer = Words(["<pad>", " a", "a", "b"])
        with pytest.raises(ValueError, match="id 1 is 'ba' for the student and 'b a' for the server"):
            teacher(proxy.url, tokenizer=Words(words)).probe(8)

    @pytest.mark.parametrize(
        "others, message",
        [
            (0.5, "value 0.5, above 0.*`--logprobs-mode raw_logprobs`"),
            (math.log(1 / 19), "best 20 .* probability 1.05.* together.*`--logprobs-mode raw_logprobs`"),
            (-9.0, "best 20 .* probability 0.00.* together.*`--logprobs-mode raw_logprobs`"),
            (float("nan"), "not finite.*`--dtype float32`"),
            (float("-inf"), "not finite.*`--dtype float32`"),
            ("a", "no number"),
        ],
    )
    def test_no_log_probabilities(self, proxy: FaultProxy, stand_in: StandIn, others: Any, message: str) -> None:
        stand_in.others = others
        with pytest.raises(ValueError, match=message):
            teacher(proxy.url).probe(8)

    @pytest.mark.parametrize(
        "spoil, message",
        [
            (lambda entries: None, "has no `prompt_logprobs`"),
            (lambda entries: [None, *({} for _ in entries[1:])], "lacks a token"),
            (lambda entries: [None, *(dict(list(e.items())[:9]) for e in entries[1:])], "gave 9 values where 20"),
            (lambda entries: [None, *({i: {"logprob": None} for i in e} for e in entries[1:])], "not finite"),
        ],
    )
    def test_no_answers(
        self, proxy: FaultProxy, stand_in: StandIn, spoil: Callable[[list[Any]], Any], message: str
    ) -> None:
        stand_in.spoil = spoil
        with pytest.raises(ValueError, match=message):
            teacher(proxy.url).probe(8)

    def test_refused(self, proxy: FaultProxy) -> None:
        proxy.faults = iter([fault_proxy.status(400, b'{"error": {"message": "prompt logprobs of 20 > 5"}}')])
        with pytest.raises(ValueError, match="prompt logprobs of 20 > 5.*start it with `--max-logprobs 20`"):
            teacher(proxy.url).probe(8)
        proxy.faults = iter([fault_proxy.status(401, b'{"error": "Unauthorized"}')])
        with pytest.raises(ValueError, match="status 401: Unauthorized.*`teacher_server_api_key_env`"):
            teacher(proxy.url).probe(8)
