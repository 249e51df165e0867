"""Teachers of every kind behind one trainer, chosen by config: when they are asked, and what their answer does."""

import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file

from trl_softgate import SAFDistillConfig, SAFDistillTrainer, TeacherLogprobsCallback
from trl_softgate.teachers import TeacherError, TeacherRequest

ROWS = 16


def trainer(
    output_dir: Path, teacher_model: Any = None, reward: Any = tiny.reward, **kwargs: Any
) -> SAFDistillTrainer:
    named = {
        name: kwargs.pop(name) for name in ("teacher_prompt_func", "peft_config", "rollout_func") if name in kwargs
    }
    return SAFDistillTrainer(
        kwargs.pop("model", None) or tiny.model(),
        reward,
        tiny.config(SAFDistillConfig, output_dir, **{"opd_warmup_steps": 0, "opd_anneal": False, **kwargs}),
        dataset(),
        processing_class=tiny.tokenizer(),
        teacher_model=teacher_model,
        **named,
    )


def dataset() -> Dataset:
    """`tiny.dataset` with the columns that teachers can read."""
    rows = tiny.dataset(ROWS)
    return rows.add_column("teacher", ["math" if i % 4 == 0 else None for i in range(ROWS)]).add_column(
        "hinted", [f"hint {i} {prompt}" for i, prompt in enumerate(rows["prompt"])]
    )


class Recording:
    """Gives every token the same log-probability, and remembers what it was asked."""

    def __init__(self, value: float = -1.0, fail_at: int | None = None) -> None:
        self.requests: list[TeacherRequest] = []
        self.value = value
        self.fail_at = fail_at

    def __call__(self, request: TeacherRequest) -> torch.Tensor:
        self.requests.append(request)
        if len(self.requests) == self.fail_at:
            raise TeacherError("The teacher has gone home.")
        # depends on the tokens, so that another rollout gives other weights
        return self.value - 0.01 * (request.completion_ids % 7).float()


def weights(made: SAFDistillTrainer) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in made.model.state_dict().items()}


def logged(made: SAFDistillTrainer, name: str) -> list[float]:
    return [entry[name] for entry in made.state.log_history if name in entry]


def adapter_folder(folder: Path) -> str:
    torch.manual_seed(5)
    config = LoraConfig(r=4, target_modules=["q_proj", "o_proj"], init_lora_weights=False)
    get_peft_model(tiny.model(), config).save_pretrained(str(folder / "adapter"))
    return str(folder / "adapter")


class TestRows:
    def test_rows_without_a_name_are_not_asked_for_and_get_no_term(self, tmp_path: Path) -> None:
        math = Recording()
        made = trainer(tmp_path, {"math": math}, grpo_coef=0.0, max_steps=4, skip_zero_signal_rows=False)
        seen: list[dict[str, Any]] = []
        compute_loss = made._compute_loss

        def spy(model: Any, inputs: dict[str, Any]) -> torch.Tensor:
            seen.append(inputs)
            return compute_loss(model, inputs)

        made._compute_loss = spy
        made.train()
        assert math.requests and all(row["teacher"] == "math" for request in math.requests for row in request.inputs)
        taught = torch.cat([inputs["teacher_rows"] for inputs in seen])
        assert 0 < taught.sum() < len(taught)
        assert sum(len(request.inputs) for request in math.requests) == taught.sum()
        for inputs in seen:
            assert torch.isnan(inputs["teacher_per_token_logps"][~inputs["teacher_rows"]]).all()
        assert set(logged(made, "distill/missing_share")) == {0.0}
        shares = logged(made, "distill/taught_share")
        assert len(shares) == 4 and 0 < sum(shares) < 4

    def test_no_row_with_a_teacher_leaves_the_policy_objective(self, tmp_path: Path) -> None:
        def run(**kwargs: Any) -> dict[str, torch.Tensor]:
            made = trainer(tmp_path, **kwargs)
            made.train_dataset = dataset().map(lambda row: {"teacher": ""})
            made.train()
            return weights(made)

        unasked = Recording()
        routed = run(teacher_model={"math": unasked})
        assert not unasked.requests
        alone = run(opd_coef=0.0)
        for name, value in alone.items():
            torch.testing.assert_close(routed[name], value, atol=0, rtol=0)

    def test_an_unknown_name_stops_training(self, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match="names the teacher 'math'; there are \\['code'\\]"):
            trainer(tmp_path, {"code": Recording()}).train()


class TestWhenAsked:
    def test_starts_before_the_rewards_and_is_awaited_after_them(self, tmp_path: Path) -> None:
        order: list[str] = []

        class Remote:
            def start(self, request: TeacherRequest) -> Callable[[], torch.Tensor]:
                order.append("start")

                def finish() -> torch.Tensor:
                    order.append("finish")
                    return torch.full(request.completion_ids.shape, -1.0)

                return finish

            def __call__(self, request: TeacherRequest) -> torch.Tensor:
                return self.start(request)()

        def reward(completions: list[str], **kwargs: Any) -> list[float]:
            order.append("reward")
            return tiny.reward(completions)

        trainer(tmp_path, Remote(), reward=reward, num_iterations=2, max_steps=4).train()
        assert order == ["start", "reward", "finish"] * 2

    def test_a_resume_does_not_ask_again(self, tmp_path: Path) -> None:
        options: dict[str, Any] = dict(num_iterations=4, max_steps=8, save_strategy="steps", save_steps=6)
        whole = Recording()
        made = trainer(tmp_path / "a", whole, **options)
        made.train()
        assert len(whole.requests) == 2
        rest = Recording()
        resumed = trainer(tmp_path / "b", rest, **options)
        resumed.train(resume_from_checkpoint=str(tmp_path / "a" / "checkpoint-6"))
        assert rest.requests == []
        for name, value in weights(made).items():
            assert torch.equal(weights(resumed)[name], value), name

    def test_evaluation_asks_once_per_batch(self, tmp_path: Path) -> None:
        teacher = Recording()
        made = trainer(tmp_path, teacher)
        made.evaluate(tiny.dataset(8))  # pyright: ignore[reportArgumentType]
        assert len(teacher.requests) == 2
        assert logged(made, "eval_distill/kl")

    def test_truncated_rows_that_are_masked_need_no_answer(self, tmp_path: Path) -> None:
        teacher = Recording()
        trainer(tmp_path, teacher, mask_truncated_completions=True, max_steps=1).train()
        (request,) = teacher.requests
        complete = (request.completion_ids == 1).any(1)
        assert torch.equal(request.completion_mask.any(1), complete)
        assert not complete.all()

    @pytest.mark.parametrize("multiple", [None, 8])
    def test_the_request_is_the_rollout(self, multiple: int | None, tmp_path: Path) -> None:
        rollouts: list[dict[str, Any]] = []

        class Both(TeacherLogprobsCallback):
            def on_rollout(self, *args: Any, rollout: dict[str, Any], **kwargs: Any) -> None:
                rollouts.append(dict(rollout))
                super().on_rollout(*args, rollout=rollout, **kwargs)

        teacher = Recording()
        made = SAFDistillTrainer(
            tiny.model(),
            tiny.reward,
            tiny.config(SAFDistillConfig, tmp_path, opd_warmup_steps=0, pad_to_multiple_of=multiple),
            tiny.dataset(),
            processing_class=tiny.tokenizer(),
            callbacks=[Both(teacher)],
            rollout_func=tiny.fixed_rollout,
        )
        made.train()
        for request, rollout in zip(teacher.requests, rollouts, strict=True):
            for name in ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask"):
                assert torch.equal(getattr(request, name), rollout[name]), name


class TestFailure:
    @pytest.mark.parametrize(
        "geometry",
        [
            dict(),
            dict(gradient_accumulation_steps=4, steps_per_generation=2, aggregation="seq_mean_token_mean"),
            dict(steps_per_generation=2),
        ],
        ids=["aligned", "inside-a-step", "reused"],
    )
    def test_resume_from_the_checkpoint_equals_a_run_without_failure(
        self, geometry: dict[str, Any], tmp_path: Path
    ) -> None:
        options: dict[str, Any] = dict(max_steps=4, save_on_teacher_failure=True, logging_steps=1, **geometry)
        whole = trainer(tmp_path / "whole", Recording(), **options)
        whole.train()
        asked = 6 if "gradient_accumulation_steps" in geometry else 2
        broken = trainer(tmp_path / "broken", Recording(fail_at=asked), **options)
        with pytest.raises(TeacherError, match="gone home"):
            broken.train()
        (checkpoint,) = (tmp_path / "broken").glob("checkpoint-*")
        resumed = trainer(tmp_path / "resumed", Recording(), **options)
        resumed.train(resume_from_checkpoint=str(checkpoint))
        for name, value in weights(whole).items():
            assert torch.equal(weights(resumed)[name], value), name
        for name in ("reward", "loss", "completions/mean_length", "distill/kl", "num_tokens"):
            assert logged(resumed, name) == logged(whole, name), name

    def test_no_checkpoint_unless_asked(self, tmp_path: Path) -> None:
        with pytest.raises(TeacherError, match="gone home"):
            trainer(tmp_path, Recording(fail_at=1)).train()
        assert not list(tmp_path.glob("checkpoint-*"))

    def test_a_geometry_that_cannot_be_saved_exactly_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match="a multiple or a divisor of `gradient_accumulation_steps`"):
            trainer(
                tmp_path,
                Recording(),
                save_on_teacher_failure=True,
                aggregation="seq_mean_token_mean",
                gradient_accumulation_steps=3,
                steps_per_generation=2,
            )

    def test_what_goes_wrong_at_the_start_is_raised_after_the_rewards(self, tmp_path: Path) -> None:
        rewarded: list[int] = []

        def reward(completions: list[str], **kwargs: Any) -> list[float]:
            rewarded.append(len(completions))
            return tiny.reward(completions)

        with pytest.raises(ValueError, match="no column 'nowhere'"):
            trainer(tmp_path, Recording(), reward=reward, teacher_prompt_column="nowhere").train()
        assert rewarded == [4]

    def test_the_self_test_is_on_by_default(self, tmp_path: Path) -> None:
        with pytest.raises(TeacherError, match="self-test"):
            trainer(tmp_path, Recording(), teacher_self_test=True).train()
        assert SAFDistillConfig.teacher_self_test is True


class TestRefused:
    @pytest.mark.parametrize(
        ("teacher", "options", "message"),
        [
            (Recording(), dict(teacher_column="subject"), "`teacher_column` has no effect"),
            ({"math": Recording()}, dict(teacher_server_timeout=9.0), "`teacher_server_timeout` has no effect"),
            ({"math": Recording()}, dict(teacher_device="cpu"), "`teacher_device` has no effect"),
            ({"math": Recording()}, dict(teachers={"math": {"adapter": "base"}}), "A teacher is named twice"),
            ("here", dict(teacher_adapter="there"), "named twice, by `teacher_model` and by `args.teacher_adapter`"),
        ],
    )
    def test_an_option_that_no_teacher_has_a_use_for(
        self, teacher: Any, options: dict[str, Any], message: str, tmp_path: Path
    ) -> None:
        with pytest.raises(ValueError, match=message):
            trainer(tmp_path, teacher, **options)

    def test_a_tokenizer_of_no_teacher(self, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match="which is no teacher"):
            SAFDistillTrainer(
                tiny.model(),
                tiny.reward,
                tiny.config(SAFDistillConfig, tmp_path, opd_warmup_steps=0),
                dataset(),
                processing_class=tiny.tokenizer(),
                teacher_model={"math": Recording()},
                teacher_processing_class={"maths": tiny.tokenizer()},
            )


class TestKinds:
    def test_adapter_and_its_merged_copy_train_the_same(self, tmp_path: Path) -> None:
        base = tmp_path / "base"
        tiny.model().save_pretrained(base)
        tiny.tokenizer().save_pretrained(base)
        folder = tmp_path / "adapter"
        torch.manual_seed(5)
        config = LoraConfig(r=4, target_modules=["q_proj", "o_proj"], init_lora_weights=False)
        get_peft_model(tiny.model().from_pretrained(base), config).save_pretrained(str(folder))

        def run(**kwargs: Any) -> SAFDistillTrainer:
            made = trainer(
                tmp_path / "out",
                peft_config=LoraConfig(r=2, target_modules=["q_proj", "v_proj"], lora_dropout=0.0),
                rollout_func=tiny.fixed_rollout,
                num_iterations=2,
                max_steps=4,
                **kwargs,
            )
            made.train()
            return made

        merged = run(teacher_model_name_or_path=str(folder))
        shared = run(teacher_adapter=str(folder))
        assert logged(shared, "distill/kl") == pytest.approx(logged(merged, "distill/kl"), rel=1e-4)
        assert max(logged(merged, "distill/kl")) > 1e-4
        trained = {name: value for name, value in weights(merged).items() if ".default." in name}
        assert trained
        for name, value in trained.items():
            torch.testing.assert_close(weights(shared)[name], value, atol=1e-6, rtol=1e-5)

    def test_a_checkpoint_holds_the_students_adapter_alone_and_resumes(self, tmp_path: Path) -> None:
        folder = adapter_folder(tmp_path)

        def make(name: str) -> SAFDistillTrainer:
            return trainer(
                tmp_path / name,
                teacher_adapter=folder,
                peft_config=LoraConfig(r=2, target_modules=["q_proj", "v_proj"], lora_dropout=0.3),
                max_steps=4,
                num_iterations=2,
                save_strategy="steps",
                save_steps=3,
            )

        whole = make("whole")
        whole.train()
        checkpoint = tmp_path / "whole" / "checkpoint-3"
        assert not [path for path in checkpoint.rglob("*") if "softgate_teacher" in path.name]
        saved = load_file(checkpoint / "adapter_model.safetensors")
        assert saved and not any("o_proj" in name for name in saved)
        resumed = make("resumed")
        resumed.train(resume_from_checkpoint=str(checkpoint))
        for name, value in weights(whole).items():
            assert torch.equal(weights(resumed)[name], value), name

    def test_the_base_model_teaches_its_own_adapter(self, tmp_path: Path) -> None:
        made = trainer(tmp_path, teacher_adapter="base", peft_config=LoraConfig(r=2), max_steps=2, learning_rate=0.1)
        made.train()
        first, second = logged(made, "distill/kl")
        # a new adapter is the base model, until it has learned
        assert first == pytest.approx(0, abs=1e-6)
        assert second > 1e-4

    def test_another_prompt_for_the_teacher(self, tmp_path: Path) -> None:
        for kwargs in (
            dict(teacher_prompt_column="hinted"),
            dict(teacher_prompt_func=lambda row: row["hinted"]),
        ):
            teacher = Recording()
            trainer(tmp_path, teacher, **kwargs).train()
            tokenizer = tiny.tokenizer()
            for request in teacher.requests:
                for row, ids, mask in zip(request.inputs, request.prompt_ids, request.prompt_mask, strict=True):
                    assert tokenizer.decode(ids[mask == 1]) == row["hinted"]

    def test_a_callable_by_its_name(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        teacher = Recording()
        module = types.ModuleType("my_teachers")
        module.score = teacher  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "my_teachers", module)
        trainer(tmp_path, teacher_callable="my_teachers:score").train()
        assert len(teacher.requests) == 2

    def test_several_teachers_by_config(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        model = tmp_path / "model"
        tiny.model(7).save_pretrained(model)
        tiny.tokenizer().save_pretrained(model)
        made = trainer(
            tmp_path,
            peft_config=LoraConfig(r=2),
            teachers={
                "math": {"model_name_or_path": str(model), "max_tokens_per_batch": 64},
                "code": {"adapter": adapter_folder(tmp_path)},
            },
        )
        made.train_dataset = dataset().map(lambda row, i: {"teacher": ["math", "code"][i % 2]}, with_indices=True)
        made.train()
        assert logged(made, "distill/taught_share") == [1.0, 1.0]
        assert logged(made, "distill/missing_share") == [0.0, 0.0]
