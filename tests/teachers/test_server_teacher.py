"""The teacher server against a real `vllm serve` on CPU: a tiny model, wrong ones, and SmolLM2-135M.

`make test-server` runs these; they need the path of a `vllm` executable in TRL_SOFTGATE_VLLM.
"""

import itertools
import json
import shlex
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from scripts import execute
from teachers import fault_proxy, vllm_server
from teachers.fault_proxy import FaultProxy
from teachers.vllm_server import save_tiny
from test_readme import shell_lines
from transformers import AutoTokenizer

from trl_softgate import SAFDistillConfig, SAFDistillTrainer
from trl_softgate.teachers import LocalTeacher, ServerTeacher, TeacherError, TeacherRequest, http

ROOT = Path(__file__).parents[2]

pytestmark = [pytest.mark.server, pytest.mark.timeout(400)]


def request(tokenizer: Any, prompts: list[int], completions: list[int], *, pad: int, seed: int = 0) -> TeacherRequest:
    """Random ids, ordinary and special, in rows of the given lengths; padding holds `pad`."""
    generator = torch.Generator().manual_seed(seed)
    width, length = max(prompts), max(completions)
    ids = torch.randint(0, len(tokenizer), (len(prompts), width + length), generator=generator)
    prompt_mask = (torch.arange(width) >= width - torch.tensor(prompts)[:, None]).long()
    completion_mask = (torch.arange(length) < torch.tensor(completions)[:, None]).long()
    return TeacherRequest(
        ids[:, :width].masked_fill(prompt_mask == 0, pad),
        prompt_mask,
        ids[:, width:].masked_fill(completion_mask == 0, pad),
        completion_mask,
        1.0,
    )


def difference(one: torch.Tensor, other: torch.Tensor, asked: TeacherRequest) -> tuple[float, float]:
    """Largest and mean absolute difference over the completion's tokens."""
    mask = asked.completion_mask.bool()
    assert torch.equal(one[~mask], torch.zeros_like(one[~mask]))
    apart = (one - other)[mask].abs()
    return apart.max().item(), apart.mean().item()


def local(folder: Path, vocab_size: int) -> LocalTeacher:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    return LocalTeacher(
        str(folder),
        temperature=1.0,
        student_vocabulary=tokenizer.get_vocab(),
        student_vocab_size=vocab_size,
        student_eos=tokenizer.eos_token_id,
        max_tokens_per_batch=4096,
        device=torch.device("cpu"),
        model_init_kwargs={"dtype": "float32"},
    )


# one server at a time: each class has its own, which ends with the class


class TestWrongServers:
    """Each fault is refused by `probe`, with what to start the server with instead."""

    def test_name_context_vocabulary_and_max_logprobs(self, tmp_path: Path) -> None:
        """One server with all four faults: the client agrees to one after another."""
        folder, options = save_tiny(tmp_path, swap=(50, 60)), ("--max-logprobs", "1")
        with vllm_server.serve(folder, name="other", max_model_len=256, options=options) as url:
            student, swapped = tiny.tokenizer(), tiny.tokenizer(swap=(50, 60))
            with pytest.raises(
                ValueError, match="not have the model 'teacher', but 'other'.*--served-model-name teacher"
            ):
                ServerTeacher(url, tokenizer=student, model="teacher").probe(100)
            with pytest.raises(ValueError, match="takes 255 tokens.*may have 1000 together.*`--max-model-len 1001`"):
                ServerTeacher(url, tokenizer=student).probe(1000)
            with pytest.raises(ValueError, match="id 50 is 'O' for the student and 'Y' for the server"):
                ServerTeacher(url, tokenizer=student).probe(255)
            with pytest.raises(ValueError, match="max allowed: 1.*start it with `--max-logprobs 20`"):
                ServerTeacher(url, tokenizer=swapped).probe(255)

    def test_logits(self, tmp_path: Path) -> None:
        options = ("--logprobs-mode", "raw_logits")
        with vllm_server.serve(save_tiny(tmp_path), options=options) as url:
            made = ServerTeacher(url, tokenizer=tiny.tokenizer())
            with pytest.raises(ValueError, match="are no log-probabilities.*`--logprobs-mode raw_logprobs`"):
                made.probe(100)
            asked = request(tiny.tokenizer(), [3], [9], pad=0)
            with pytest.raises(TeacherError, match="above 0.*`--logprobs-mode raw_logprobs`"):
                made(asked)


@pytest.fixture(scope="class")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="class")
def url(tiny_folder: Path) -> Iterator[str]:
    with vllm_server.serve(tiny_folder, options=("--api-key", "sesame")) as url:
        yield url


@pytest.fixture(scope="class")
def asked() -> TeacherRequest:
    return request(tiny.tokenizer(), [3, 1, 17, 9], [12, 1, 5, 30], pad=0)


@pytest.fixture(scope="class")
def right(tiny_folder: Path, asked: TeacherRequest) -> torch.Tensor:
    return local(tiny_folder, 300)(asked)


class TestTiny:
    @pytest.fixture(autouse=True)
    def key(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("TEACHER_KEY", "sesame")
        monkeypatch.setattr(http, "FIRST_WAIT", 0.05)

    def teacher(self, urls: Any, **kwargs: Any) -> ServerTeacher:
        return ServerTeacher(urls, **{"tokenizer": tiny.tokenizer(), "api_key_env": "TEACHER_KEY", **kwargs})

    def test_is_the_local_teacher(
        self, url: str, tiny_folder: Path, asked: TeacherRequest, right: torch.Tensor, record_property: Any
    ) -> None:
        made = self.teacher(url)
        made.probe(1023)
        largest, mean = difference(made(asked), right, asked)
        record_property("difference", f"{largest:.2e} {mean:.2e}")
        print(f"tiny: largest {largest:.2e}, mean {mean:.2e}, down to {right.min():.1f}")
        assert largest < 5e-4
        # the longest row there is
        longest = request(tiny.tokenizer(), [1, 1022], [1022, 1], pad=1, seed=1)
        assert difference(made(longest), local(tiny_folder, 300)(longest), longest)[0] < 5e-4

    def test_too_long_and_other_refusals(self, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
        too_long = request(tiny.tokenizer(), [500], [524], pad=0)
        with pytest.raises(TeacherError, match=r"maximum context length is 1024.*--max-model-len 1025"):
            self.teacher(url)(too_long)
        with pytest.raises(TeacherError, match="status 404: .*other.* does not exist"):
            self.teacher(url, model="other")(too_long)
        monkeypatch.setenv("TEACHER_KEY", "simsala")
        for refused in (self.teacher(url), self.teacher(url, api_key_env=None)):
            with pytest.raises(TeacherError, match="status 401: .*`teacher_server_api_key_env`"):
                refused(too_long)
            with pytest.raises(ValueError, match="status 401: .*`teacher_server_api_key_env`"):
                refused.probe(8)

    @pytest.fixture
    def proxy(self, url: str) -> Iterator[FaultProxy]:
        headers = {"Authorization": "Bearer sesame"}
        with FaultProxy(fault_proxy.forward(url, headers)) as proxy:
            yield proxy

    def test_load(self, proxy: FaultProxy) -> None:
        """256 rows of 256 tokens over 16 connections that are kept."""
        asked = request(tiny.tokenizer(), [40] * 256, [216] * 256, pad=0)
        begin = time.monotonic()
        scores = self.teacher(proxy.url, concurrency=16)(asked)
        print(f"load: {time.monotonic() - begin:.1f} s, {proxy.connections} connections for {proxy.scored} requests")
        assert scores.isfinite().all() and (scores < 0).all()
        assert proxy.scored == 256
        assert proxy.connections <= 16

    @pytest.mark.timeout(60)
    @pytest.mark.parametrize(
        "fault",
        [
            fault_proxy.delay(10),
            fault_proxy.drop,
            fault_proxy.truncate,
            fault_proxy.drip,
            fault_proxy.status(429),
            fault_proxy.status(503, Retry_After="1"),
            fault_proxy.garbage,
        ],
    )
    def test_a_fault_that_passes(
        self, proxy: FaultProxy, asked: TeacherRequest, right: torch.Tensor, fault: Any
    ) -> None:
        proxy.faults = iter([fault])
        begin = time.monotonic()
        scores = self.teacher(proxy.url, timeout=4.0, max_retries=1)(asked)
        assert time.monotonic() - begin < 9
        assert proxy.scored == 5
        assert difference(scores, right, asked)[0] < 5e-4

    @pytest.mark.timeout(60)
    @pytest.mark.parametrize(
        "fault, message",
        [
            (fault_proxy.delay(30), "no complete answer within 2 s"),
            (fault_proxy.drop, "the connection broke"),
            (fault_proxy.truncate, "the connection broke"),
            (fault_proxy.drip, "no complete answer within 2 s"),
            (fault_proxy.status(500), "the status was 500"),
            (fault_proxy.garbage, "the answer is no JSON"),
        ],
    )
    def test_a_fault_that_lasts(self, proxy: FaultProxy, asked: TeacherRequest, fault: Any, message: str) -> None:
        proxy.faults = itertools.repeat(fault)
        begin = time.monotonic()
        with pytest.raises(TeacherError, match=f"{proxy.url}.* failed in 2 attempts.*{message}"):
            self.teacher(proxy.url, timeout=2.0, max_retries=1)(asked)
        assert time.monotonic() - begin < 6

    def test_one_of_two_is_dead(self, url: str, asked: TeacherRequest, right: torch.Tensor) -> None:
        scores = self.teacher(["http://127.0.0.1:9", url], max_retries=1)(asked)
        assert difference(scores, right, asked)[0] < 5e-4

    def trainer(self, output_dir: Path, **kwargs: Any) -> SAFDistillTrainer:
        options: dict[str, Any] = (
            dict(teacher_server_api_key_env="TEACHER_KEY") if "teacher_server_url" in kwargs else {}
        )
        return SAFDistillTrainer(
            tiny.model(),
            tiny.reward,
            tiny.config(SAFDistillConfig, output_dir, opd_warmup_steps=0, max_steps=4, **options, **kwargs),
            tiny.dataset(),
            processing_class=tiny.tokenizer(),
            rollout_func=tiny.fixed_rollout,
        )

    def test_trains_as_with_the_local_teacher(self, url: str, tiny_folder: Path, tmp_path: Path) -> None:
        def logged(**kwargs: Any) -> list[float]:
            made = self.trainer(tmp_path, num_iterations=2, **kwargs)
            made.train()
            return [entry["distill/kl"] for entry in made.state.log_history if "distill/kl" in entry]

        served = logged(teacher_server_url=[url])
        assert len(served) == 4
        assert served == pytest.approx(logged(teacher_model_name_or_path=str(tiny_folder)), rel=1e-4)

    def test_a_server_that_dies_in_training_leaves_a_checkpoint(self, proxy: FaultProxy, tmp_path: Path) -> None:
        # each step asks for four rows
        proxy.faults = itertools.chain([None] * 9, itertools.repeat(fault_proxy.drop))
        made = self.trainer(
            tmp_path, teacher_server_url=proxy.url, teacher_server_max_retries=1, save_on_teacher_failure=True
        )
        with pytest.raises(TeacherError, match=f"{proxy.url}.*the connection broke"):
            made.train()
        assert [path.name for path in tmp_path.glob("checkpoint-*")] == ["checkpoint-2"]


@pytest.fixture(scope="class")
def smollm2_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("smollm2") / "base"
    execute("examples/smollm2_prepare.py", str(folder))
    return folder


class TestSmolLM2:
    def test_is_the_local_teacher(self, smollm2_folder: Path, record_property: Any) -> None:
        """Ragged prompts and completions, lengths of 1 and the maximum, padding that is the end of sequence."""
        tokenizer = AutoTokenizer.from_pretrained(smollm2_folder)
        text = tokenizer(
            [
                "The capital of France is Paris, and that of Italy is Rome.",
                "<|im_start|>user\nWhat is 12 + 30?<|im_end|>\n<|im_start|>assistant\n12 + 30 = 42.<|im_end|>",
                "日本語のテキスト, ümläuts and emoji 🙂 at the end of a longer text that goes on for a while.",
            ]
        )["input_ids"]
        asked = request(tokenizer, [1, 30, 7, 12, 5, 20], [64, 1, 9, 33, 20, 2], pad=tokenizer.eos_token_id)
        # the last three rows are text, the others random ids
        for row, ids in zip((3, 4, 5), text, strict=True):
            prompt, completion = (int(mask[row].sum()) for mask in (asked.prompt_mask, asked.completion_mask))
            whole = torch.tensor(ids * 5)[: prompt + completion]
            asked.prompt_ids[row, -prompt:], asked.completion_ids[row, :completion] = whole[:prompt], whole[prompt:]
        expected = local(smollm2_folder, 49152)(asked)
        with vllm_server.serve(smollm2_folder) as url:
            made = ServerTeacher(url, tokenizer=tokenizer)
            begin = time.monotonic()
            made.probe(1023)
            print(f"SmolLM2: probe {time.monotonic() - begin:.1f} s")
            largest, mean = difference(made(asked), expected, asked)
        record_property("difference", f"{largest:.2e} {mean:.2e}")
        print(f"SmolLM2: largest {largest:.2e}, mean {mean:.2e}, down to {expected.min():.1f}")
        assert largest < 5e-4


class TestDocumentedServer:
    """The lines of docs/teachers.md, with a tiny model, and one device."""

    def line(self, start: str) -> list[str]:
        (found,) = {line for line in shell_lines() if line.startswith(start)}
        return shlex.split(found, comments=True)[2:]

    def test_both_lines(self, tmp_path: Path) -> None:
        model, *options = self.line("vllm serve ")
        assert not model.startswith("-")
        for name, value in (("--port", None), ("--tensor-parallel-size", "1")):
            at = options.index(name)
            options[at : at + 2] = [] if value is None else [name, value]
        longest = int(options[options.index("--max-model-len") + 1])
        folder, output = save_tiny(tmp_path, positions=longest), tmp_path / "out.json"
        with vllm_server.serve(folder, max_model_len=longest, options=tuple(options)) as url:
            words = self.line("python benchmarks/teachers.py ")
            for name, value in (("--model", str(folder)), ("--server_url", url)):
                words[words.index(name) + 1] = value
            cases = ["--cases", "local", "server"]
            execute("benchmarks/teachers.py", *words, "--repeat", "1", *cases, "--output", str(output))
        results = json.loads(output.read_text())["results"]
        assert results["server"]["mean"] == pytest.approx(results["local"]["mean"], abs=1e-4)
