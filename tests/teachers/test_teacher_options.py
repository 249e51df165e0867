"""Every option of a teacher is honored or refused, wherever it was written."""

import dataclasses
import inspect
import json
import sys
import types
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
import yaml
from peft import LoraConfig, get_peft_model
from teachers.scoring import request
from transformers import TrainerCallback
from trl import TrlParser
from trl.trainer.utils import add_fused_lm_head

from trl_softgate import SAFDistillConfig, SAFDistillTrainer
from trl_softgate.teachers import (
    AdapterTeacher,
    LocalTeacher,
    PromptedTeacher,
    SelfTestedTeacher,
    Student,
    TeacherError,
    TeacherOptions,
    TeacherRequest,
    build_teacher,
)
from trl_softgate.teachers import options as options_module
from trl_softgate.teachers.options import option_names

DEFAULTS: dict[str, Any] = {
    name: next(f.default for f in dataclasses.fields(SAFDistillConfig) if f.name == f"teacher_{name}")
    for name in option_names()
}
SOURCES = {"model_name_or_path": "m", "adapter": "a", "server_url": ["http://localhost:1"], "callable": "math:fsum"}
# an option, another value than its default, and where it matters
OF_A_SOURCE: dict[str, tuple[Any, tuple[str, ...]]] = {
    "model_init_kwargs": ({"dtype": "bfloat16"}, ("model_name_or_path",)),
    "device": ("cpu", ("model_name_or_path",)),
    "max_tokens_per_batch": (7, ("model_name_or_path", "adapter")),
    "server_model": ("name", ("server_url",)),
    "server_api_key_env": ("KEY", ("server_url",)),
    "server_concurrency": (3, ("server_url",)),
    "server_timeout": (3.0, ("server_url",)),
    "server_max_retries": (3, ("server_url",)),
    "temperature": (1, ("server_url",)),
}
OF_THE_PROMPT = {"prompt_column": "hinted", "chat_template_kwargs": {"a": 1}, "tokenizer_name_or_path": "t"}


def options(**kwargs: Any) -> TeacherOptions:
    return TeacherOptions(**{**DEFAULTS, **kwargs})


def config(**kwargs: Any) -> SAFDistillConfig:
    return tiny.config(SAFDistillConfig, "unused", opd_warmup_steps=0, **kwargs)


def trainer(teacher_model: Any = None, callbacks: Any = None, **kwargs: Any) -> SAFDistillTrainer:
    return SAFDistillTrainer(
        tiny.model(),
        tiny.reward,
        config(**kwargs),
        tiny.dataset(),
        processing_class=tiny.tokenizer(),
        teacher_model=teacher_model,
        callbacks=callbacks,
    )


def asked_of(made: SAFDistillTrainer) -> Any:
    (teacher,) = [c.teacher for c in made.callback_handler.callbacks if hasattr(c, "on_rollout")]  # type: ignore[attr-defined]
    return teacher


def student(model: Any = None, temperature: float = 1.0) -> Student:
    model = model or tiny.model()
    return Student(model, tiny.tokenizer(), temperature, torch.device("cpu"), False, lambda ids, column: 20)


def score(asked: TeacherRequest) -> torch.Tensor:
    return torch.zeros(asked.completion_ids.shape)


@pytest.fixture
def folder(tmp_path: Path) -> str:
    tiny.model(7).save_pretrained(tmp_path / "model")
    tiny.tokenizer().save_pretrained(tmp_path / "model")
    return str(tmp_path / "model")


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Any:
    made: Any = types.ModuleType("my_teachers")
    made.score, made.text, made.Kind = score, "text", type("Kind", (), {})
    monkeypatch.setitem(sys.modules, "my_teachers", made)
    return made


class FakeServer:
    """Takes what `ServerTeacher` takes, and asks nobody."""

    def __init__(self, urls: Any, **kwargs: Any) -> None:
        self.urls, self.kwargs, self.probed = urls, kwargs, []
        self.requests: list[TeacherRequest] = []

    def probe(self, min_context: int) -> None:
        self.probed.append(min_context)

    def start(self, asked: TeacherRequest) -> Callable[[], torch.Tensor]:
        self.requests.append(asked)
        return lambda: score(asked)

    def __call__(self, asked: TeacherRequest) -> torch.Tensor:
        return self.start(asked)()


class Fills(TrainerCallback):
    def on_rollout(self, *args: Any, rollout: dict[str, Any], **kwargs: Any) -> None:
        rollout["teacher_per_token_logps"] = torch.zeros(rollout["completion_ids"].shape)


class TestSources:
    @pytest.mark.parametrize("one", SOURCES)
    @pytest.mark.parametrize("other", SOURCES)
    def test_two_are_refused(self, one: str, other: str) -> None:
        if one == other:
            assert config(**{f"teacher_{one}": SOURCES[one]})._teacher_options().source == one
            return
        with pytest.raises(ValueError, match=f"named twice, by `teacher_({one}|{other})` and `teacher_.*: keep one"):
            config(**{f"teacher_{name}": SOURCES[name] for name in (one, other)})

    @pytest.mark.parametrize("one", SOURCES)
    def test_one_beside_several_or_beside_an_object_is_refused(self, one: str) -> None:
        with pytest.raises(ValueError, match=f"named by `teachers` and by `teacher_{one}`: keep one"):
            config(**{f"teacher_{one}": SOURCES[one]}, teachers={"a": {"callable": "math:fsum"}})
        with pytest.raises(ValueError, match=f"by `teacher_model` and by `args.teacher_{one}`: keep one"):
            trainer(score, **{f"teacher_{one}": SOURCES[one]})

    @pytest.mark.parametrize("model", [score, {"a": score}, {"a": None}])
    def test_one_object_beside_several_is_refused(self, model: Any) -> None:
        with pytest.raises(ValueError, match="by `teacher_model` and by `args.teachers`: keep one"):
            trainer(model, teachers={"a": {"callable": "math:fsum"}})


class TestEffect:
    def test_this_file_knows_all_options(self) -> None:
        assert {*SOURCES, *OF_A_SOURCE, *OF_THE_PROMPT, "self_test"} == set(option_names())
        assert {f.name for f in dataclasses.fields(SAFDistillConfig)} >= {f"teacher_{n}" for n in option_names()}

    @pytest.mark.parametrize("source", [*SOURCES, None])
    @pytest.mark.parametrize("name", OF_A_SOURCE)
    def test_an_option_without_its_source_is_refused(self, name: str, source: str | None) -> None:
        value, places = OF_A_SOURCE[name]
        assert value != DEFAULTS[name]
        made = options(**{name: value}, **({} if source is None else {source: SOURCES[source]}))
        if source in places:
            made.check_unused(options(), *([] if source is None else [source]))
            return
        with pytest.raises(ValueError, match=f"`teacher_{name}` has no effect without `teacher_({'|'.join(places)})`"):
            made.check_unused(options(), *([] if source is None else [source]))

    @pytest.mark.parametrize("name", OF_A_SOURCE)
    def test_and_so_it_is_by_the_trainer(self, name: str) -> None:
        value, places = OF_A_SOURCE[name]
        with pytest.raises(ValueError, match=f"`teacher_{name}` has no effect without"):
            trainer(score, **{f"teacher_{name}": value})
        with pytest.raises(ValueError, match=f"`teacher_{name}` has no effect without"):
            trainer(callbacks=[Fills()], **{f"teacher_{name}": value})
        if "model_name_or_path" not in places:
            with pytest.raises(ValueError, match=f"`teacher_{name}` has no effect without"):
                trainer("some/path", **{f"teacher_{name}": value})

    @pytest.mark.parametrize("name", OF_THE_PROMPT)
    def test_a_prompt_without_a_teacher_is_refused(self, name: str) -> None:
        with pytest.raises(ValueError, match=f"`teacher_{name}` has no effect without a teacher"):
            trainer(callbacks=[Fills()], **{f"teacher_{name}": OF_THE_PROMPT[name]})

    def test_chat_template_kwargs_need_a_prompt_of_the_teachers_own(self) -> None:
        made = options(chat_template_kwargs={"mood": "!"})
        with pytest.raises(
            ValueError, match="`teacher_chat_template_kwargs` has no effect on a teacher that sees the"
        ):
            build_teacher(made, student(), model=score)
        build_teacher(replace(made, prompt_column="hinted"), student(), model=score)
        build_teacher(made, student(), model=score, prompt=lambda row: "hint")

    def test_a_tokenizer_that_nobody_uses_is_refused(self, folder: str) -> None:
        made = options(tokenizer_name_or_path=folder)
        with pytest.raises(ValueError, match="`teacher_tokenizer_name_or_path` has no effect on a teacher that sees"):
            build_teacher(made, student(), model=score)
        build_teacher(replace(made, prompt_column="hinted"), student(), model=score)
        build_teacher(made, student(), model=tiny.model(7))

    def test_what_is_said_to_several_may_be_meant_for_others(self, folder: str) -> None:
        for said in ({"tokenizer_name_or_path": folder}, {"chat_template_kwargs": {"mood": "!"}}):
            build_teacher(options(self_test=False, **said), student(), model=score, name="math")

    def test_two_prompts_are_refused(self) -> None:
        with pytest.raises(ValueError, match="given by a function and by `teacher_prompt_column`: keep one"):
            build_teacher(options(prompt_column="a"), student(), model=score, prompt=lambda row: "hint")

    def test_a_device_and_a_device_map_are_refused(self) -> None:
        with pytest.raises(ValueError, match="`teacher_device` and the `device_map`"):
            options(model_name_or_path="m", device="cpu", model_init_kwargs={"device_map": "auto"})


class TestValues:
    @pytest.mark.parametrize(
        "name, value",
        [
            *[
                (name, value)
                for name in ("max_tokens_per_batch", "server_concurrency")
                for value in (0, -1, 1.5, "8", True)
            ],
            *[("server_max_retries", value) for value in (-1, 0.5, None)],
            *[("server_timeout", value) for value in (0, -1, float("inf"), float("nan"), None, "1")],
            *[
                (name, value)
                for name in ("model_name_or_path", "adapter", "callable", "server_model", "prompt_column")
                for value in ("", 5, ["a"])
            ],
            *[("server_url", value) for value in ("", [], 5, [5], [""], {"a": 1})],
            *[("server_api_key_env", value) for value in ("", 5)],
            *[("tokenizer_name_or_path", value) for value in ("", 5)],
            *[(name, value) for name in ("model_init_kwargs", "chat_template_kwargs") for value in ("text", [1], 5)],
            *[("self_test", value) for value in ("no", None, 2)],
            *[("device", value) for value in ("", 5, "gpu?")],
            *[("temperature", value) for value in (0.7, 2, 0)],
        ],
    )
    def test_others_are_refused(self, name: str, value: Any) -> None:
        with pytest.raises(ValueError, match=f"`teacher_{name}"):
            options(**{name: value})

    def test_and_so_they_are_by_the_config(self) -> None:
        with pytest.raises(
            ValueError, match="`teacher_max_tokens_per_batch` must be a finite number at least 1, got 0"
        ):
            config(teacher_max_tokens_per_batch=0)
        with pytest.raises(ValueError, match="`teacher_chat_template_kwargs` must be a dict, got 'text'"):
            config(teacher_chat_template_kwargs="text")

    def test_another_temperature_is_told_what_1_is_for(self) -> None:
        with pytest.raises(ValueError, match="`teacher_temperature=0.5`: 1 is the only value, with which a server"):
            config(teacher_server_url="http://localhost:1", teacher_temperature=0.5)


class TestSeveral:
    def test_own_options_stand_in_for_the_common_ones(self) -> None:
        made = config(
            teacher_max_tokens_per_batch=50,
            teacher_self_test=True,
            teacher_prompt_column="hinted",
            teachers={
                "a": {"model_name_or_path": "m", "max_tokens_per_batch": 7, "self_test": False},
                "b": {"server_url": "http://localhost:1", "temperature": 1, "prompt_column": None},
            },
        )
        a, b = made._teacher_options("a"), made._teacher_options("b")
        assert (a.source, a.max_tokens_per_batch, a.self_test, a.prompt_column) == (
            "model_name_or_path",
            7,
            False,
            "hinted",
        )
        assert (b.source, b.max_tokens_per_batch, b.self_test, b.prompt_column) == ("server_url", 50, True, None)

    @pytest.mark.parametrize(
        "teachers, sentence",
        [
            ("words", "`teachers` must be a dict of teachers by name, not empty; got 'words'"),
            ({}, "must be a dict of teachers by name, not empty"),
            ("{}", "must be a dict of teachers by name, not empty"),
            (["a"], "must be a dict of teachers by name, not empty"),
            ({"a": "path"}, r"`teachers\['a'\]` must be a dict of options .* got 'path'"),
            (
                {"a": {"server": "x"}},
                r"`teachers\['a'\]` has no option 'server'; there are model_name_or_path, adapter",
            ),
            ({"a": {"teacher_adapter": "x"}}, "has no option 'teacher_adapter'"),
            ({"a": {}}, r"`teachers\['a'\]`: It does not say where the teacher is"),
            ({"a": {"self_test": False}}, "does not say where the teacher is"),
            ({"a": {"adapter": "x", "callable": "m:f"}}, "named twice, by `teacher_adapter` and `teacher_callable`"),
            ({"a": {"adapter": "x", "device": "cpu"}}, r"`teachers\['a'\]`: `teacher_device` has no effect without"),
            ({"a": {"adapter": "x", "max_tokens_per_batch": 0}}, "`teacher_max_tokens_per_batch` must be"),
            (
                {"a": {"model_name_or_path": "x", "model_init_kwargs": "{}"}},
                "`teacher_model_init_kwargs` must be a dict",
            ),
            ({"a": {"server_url": "http://x", "temperature": 2}}, "1 is the only value"),
        ],
    )
    def test_what_is_wrong_is_told_by_name(self, teachers: Any, sentence: str) -> None:
        with pytest.raises(ValueError, match=sentence):
            config(teachers=teachers)

    def test_what_fails_to_build_is_told_by_name(self) -> None:
        with pytest.raises(ValueError, match="^Teacher 'math': The teacher 'nowhere/at/all' is neither a folder"):
            build_teacher(options(model_name_or_path="nowhere/at/all"), student(), name="math")
        with pytest.raises(ValueError, match="^The teacher 'nowhere/at/all' is neither a folder"):
            build_teacher(options(model_name_or_path="nowhere/at/all"), student())

    @pytest.mark.parametrize("name", ["math", "qwen2.5", "a b", "lora_", "default"])
    def test_adapters_under_any_name(self, name: str, tmp_path: Path) -> None:
        made = tiny.model()
        add_fused_lm_head(made)
        get_peft_model(tiny.model(), LoraConfig(r=2)).save_pretrained(str(tmp_path))
        model = get_peft_model(made, LoraConfig(r=2))
        teachers = [
            build_teacher(options(adapter=str(tmp_path), self_test=False), student(model), name=each)
            for each in (name, name + "2", name)
        ]
        for teacher in teachers:
            assert isinstance(teacher, AdapterTeacher) and torch.isfinite(teacher(request())).all()


class TestBuilt:
    def test_a_model(self, folder: str) -> None:
        made = trainer(
            teacher_model_name_or_path=folder,
            teacher_model_init_kwargs={"dtype": "bfloat16"},
            teacher_device="cpu",
            teacher_max_tokens_per_batch=33,
            teacher_tokenizer_name_or_path=folder,
            temperature=0.7,
        )
        teacher = asked_of(made)
        assert isinstance(teacher, LocalTeacher)
        assert (teacher.model.dtype, teacher.max_tokens_per_batch, teacher.temperature) == (torch.bfloat16, 33, 0.7)

    def test_a_model_with_a_tokenizer_of_another_vocabulary(self, folder: str, tmp_path: Path) -> None:
        tiny.tokenizer(swap=(50, 60)).save_pretrained(tmp_path / "other")
        with pytest.raises(ValueError, match="id 50 is"):
            trainer(teacher_model_name_or_path=folder, teacher_tokenizer_name_or_path=str(tmp_path / "other"))

    @pytest.mark.parametrize("where", ["base", "folder"])
    def test_an_adapter(self, where: str, tmp_path: Path) -> None:
        made = tiny.model()
        add_fused_lm_head(made, temperature=0.7)
        get_peft_model(tiny.model(), LoraConfig(r=2, init_lora_weights=False)).save_pretrained(str(tmp_path))
        teacher = build_teacher(
            options(adapter="base" if where == "base" else str(tmp_path), max_tokens_per_batch=33, self_test=False),
            student(get_peft_model(made, LoraConfig(r=2)), 0.7),
        )
        assert isinstance(teacher, AdapterTeacher)
        assert (teacher.temperature, teacher.max_tokens_per_batch) == (0.7, 33)
        assert (teacher._entries is None) == (where == "base")

    @pytest.mark.parametrize("urls", ["http://localhost:1", ["http://localhost:1", "http://localhost:2"]])
    def test_a_server(self, urls: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(options_module, "ServerTeacher", FakeServer)
        made = config(
            teacher_server_url=urls,
            teacher_server_model="name",
            teacher_server_api_key_env="KEY",
            teacher_server_concurrency=3,
            teacher_server_timeout=4,
            teacher_server_max_retries=5,
            teacher_prompt_column="hinted",
        )
        assert made.teacher_server_url == ([urls] if isinstance(urls, str) else urls)
        teacher: Any = build_teacher(made._teacher_options(), student())
        assert isinstance(teacher, PromptedTeacher) and isinstance(teacher.teacher, FakeServer)
        server = teacher.teacher
        assert server.urls == made.teacher_server_url and server.probed == [20]
        assert server.kwargs.pop("tokenizer").get_vocab() == tiny.tokenizer().get_vocab()
        assert server.kwargs == dict(
            temperature=1.0, model="name", api_key_env="KEY", concurrency=3, timeout=4, max_retries=5
        )

    def test_a_server_for_a_rollout_of_another_temperature(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(options_module, "ServerTeacher", FakeServer)
        plain: Any = build_teacher(options(server_url="http://x", self_test=False), student(temperature=0.6))
        assert plain.kwargs["temperature"] == 0.6  # which the real one refuses
        teacher: Any = build_teacher(
            options(server_url="http://x", temperature=1, self_test=False), student(temperature=0.6)
        )
        assert teacher.teacher.kwargs["temperature"] == 1
        teacher(request(0.6))
        assert [asked.temperature for asked in teacher.teacher.requests] == [1]
        with pytest.raises(ValueError, match="state `teacher_temperature=1`"):
            monkeypatch.undo()
            build_teacher(options(server_url="http://localhost:1"), student(temperature=0.6))

    def test_a_callable(self, module: Any) -> None:
        assert asked_of(trainer(teacher_callable="my_teachers:score")) is score
        assert asked_of(trainer(score)) is score

    @pytest.mark.parametrize(
        "path, sentence",
        [
            ("no_such_module:score", "cannot be imported .*: give 'module:function'"),
            ("my_teachers:nothing", "cannot be imported .*: give 'module:function'"),
            ("not a name", "cannot be imported .*: give 'module:function'"),
            ("my_teachers", "is module: give 'module:function', a callable"),
            ("my_teachers:text", "is str: give 'module:function', a callable"),
            ("my_teachers:Kind", "is a class: give 'module:function', a callable"),
        ],
    )
    def test_a_callable_that_is_none(self, path: str, sentence: str, module: Any) -> None:
        with pytest.raises(ValueError, match=f"`teacher_callable='{path}'` {sentence}"):
            build_teacher(options(callable=path), student())

    def test_what_is_no_teacher(self) -> None:
        with pytest.raises(TypeError, match=r"a path, a model, or a callable .*; got int"):
            build_teacher(options(), student(), model=5)

    @pytest.mark.parametrize("self_test", [True, False])
    def test_with_and_without_self_test(self, self_test: bool) -> None:
        teacher = build_teacher(options(self_test=self_test), student(), model=score)
        assert isinstance(teacher, SelfTestedTeacher) == self_test
        if self_test:
            with pytest.raises(TeacherError, match="self-test"):
                teacher(request())

    def test_a_prompt_is_rendered_with_the_variables_and_the_right_tokenizer(
        self, folder: str, tmp_path: Path
    ) -> None:
        other = tiny.tokenizer()
        other.chat_template = "{{ messages[0].content }}{{ mood }}"
        other.save_pretrained(tmp_path / "other")
        row = {"hinted": [{"role": "user", "content": "a"}]}
        given: dict[str, Any] = dict(prompt_column="hinted", chat_template_kwargs={"mood": "!"}, self_test=False)
        by_path: Any = build_teacher(
            options(tokenizer_name_or_path=str(tmp_path / "other"), **given), student(), model=score
        )
        by_object: Any = build_teacher(options(**given), student(), model=score, tokenizer=other)
        by_function: Any = build_teacher(
            options(tokenizer_name_or_path=str(tmp_path / "other"), **{**given, "prompt_column": None}),
            student(),
            model=folder,
            prompt=lambda row: row["hinted"],
        )
        for teacher in (by_path, by_object, by_function):
            assert teacher.token_ids(row) == other("a!")["input_ids"]
        students: Any = build_teacher(options(**given), student(), model=score)
        assert (
            students.token_ids(row)
            == tiny.tokenizer()("<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n")["input_ids"]
        )


class TestParsed:
    SEVERAL: dict[str, Any] = {
        "math": {"server_url": ["http://localhost:8000"], "server_timeout": 5.5},
        "code": {"adapter": "path", "self_test": False},
    }

    def parse(self, values: dict[str, Any], words: list[str], tmp_path: Path) -> SAFDistillConfig:
        plain = {"output_dir": str(tmp_path), "use_cpu": True, "bf16": False}
        (tmp_path / "config.yaml").write_text(yaml.safe_dump({**plain, **values}))
        parser = TrlParser((SAFDistillConfig,))  # type: ignore[arg-type]
        (made,) = parser.parse_args_and_config(["--config", str(tmp_path / "config.yaml"), *words])
        return made  # type: ignore[return-value]

    def test_from_yaml(self, tmp_path: Path) -> None:
        values: dict[str, Any] = dict(
            teacher_server_url=["http://a", "http://b"],
            teacher_server_model="name",
            teacher_server_concurrency=3,
            teacher_server_timeout=2.5,
            teacher_temperature=1.0,
            teacher_prompt_column="hinted",
            teacher_chat_template_kwargs={"enable_thinking": False},
            teacher_self_test=False,
            save_on_teacher_failure=True,
        )
        made = self.parse(values, [], tmp_path)
        assert {name: getattr(made, name) for name in values} == values

    def test_one_url_from_yaml(self, tmp_path: Path) -> None:
        assert self.parse({"teacher_server_url": "http://a"}, [], tmp_path).teacher_server_url == ["http://a"]

    def test_several_from_yaml(self, tmp_path: Path) -> None:
        made = self.parse({"teachers": self.SEVERAL, "teacher_column": "kind"}, [], tmp_path)
        assert (made.teachers, made.teacher_column) == (self.SEVERAL, "kind")
        assert made._teacher_options("math").server_timeout == 5.5
        assert made._teacher_options("code").self_test is False

    def test_several_from_the_command_line(self, tmp_path: Path) -> None:
        made = self.parse({}, ["--teachers", json.dumps(self.SEVERAL)], tmp_path)
        assert made._teacher_options("math").server_timeout == 5.5
        assert made._teacher_options("math").server_url == ["http://localhost:8000"]
        assert made._teacher_options("code").self_test is False

    def test_from_the_command_line(self, tmp_path: Path) -> None:
        words = ["--teacher_model_name_or_path", "m", "--teacher_device", "cpu", "--teacher_max_tokens_per_batch", "9"]
        words += [
            "--teacher_model_init_kwargs",
            '{"quantization_config": {"load_in_4bit": true}, "dtype": "bfloat16"}',
        ]
        words += ["--teacher_chat_template_kwargs", '{"mood": "!"}', "--teacher_prompt_column", "hinted"]
        words += ["--teacher_self_test", "false"]
        made = self.parse({"teacher_max_tokens_per_batch": 5}, words, tmp_path)._teacher_options()
        assert made == options(
            model_name_or_path="m",
            device="cpu",
            max_tokens_per_batch=9,
            model_init_kwargs={"quantization_config": {"load_in_4bit": True}, "dtype": "bfloat16"},
            chat_template_kwargs={"mood": "!"},
            prompt_column="hinted",
            self_test=False,
        )

    def test_urls_from_the_command_line(self, tmp_path: Path) -> None:
        assert self.parse({}, ["--teacher_server_url", "http://a"], tmp_path).teacher_server_url == ["http://a"]
        made = self.parse({}, ["--teacher_server_url", "http://a", "http://b", "--teacher_temperature", "1"], tmp_path)
        assert made.teacher_server_url == ["http://a", "http://b"]
        assert made.teacher_temperature == 1

    @pytest.mark.parametrize(
        "words, sentence",
        [
            (["--teachers", "words"], "`teachers` must be a dict"),
            (["--teachers", '{"a": {"server": 1}}'], "has no option 'server'"),
            (["--teacher_adapter", "a", "--teacher_callable", "m:f"], "named twice"),
            (["--teacher_temperature", "0.5"], "1 is the only value"),
            (["--teacher_model_init_kwargs", "text"], "`teacher_model_init_kwargs` must be a dict"),
        ],
    )
    def test_what_is_wrong_is_refused(self, words: list[str], sentence: str, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match=sentence):
            self.parse({}, words, tmp_path)


class TestDescribed:
    """Docstring, help text and default of each option."""

    def entries(self) -> dict[str, str]:
        text = inspect.cleandoc(SAFDistillConfig.__doc__ or "").split("Args:\n")[1].split("\nRaises:")[0]
        entries: dict[str, str] = {}
        name = ""
        for line in text.splitlines():
            if line.startswith("    ") and not line.startswith("     "):
                name, _, rest = line.strip().partition(": ")
                entries[name] = rest
            else:
                entries[name] += " " + line.strip()
        return entries

    def test_every_option_has_a_docstring_and_a_help(self) -> None:
        names = {f"teacher_{name}" for name in option_names()} | {
            "teachers",
            "teacher_column",
            "save_on_teacher_failure",
        }
        assert names <= self.entries().keys()
        own = {f.name: f for f in dataclasses.fields(SAFDistillConfig)}
        for name in names:
            assert own[name].metadata["help"].endswith((".", "...")), name

    def test_what_is_said_of_a_default_is_true(self) -> None:
        own = {f.name: f.default for f in dataclasses.fields(SAFDistillConfig)}
        for name, text in self.entries().items():
            if "; default: the" in text:  # one that the teacher or the student brings along
                assert own[name] is None, name

    def test_values_at_the_stated_bounds_are_taken(self) -> None:
        options(max_tokens_per_batch=1, server_concurrency=1, server_timeout=1e-3, server_max_retries=0, temperature=1)
