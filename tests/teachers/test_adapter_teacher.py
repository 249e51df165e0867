"""The teacher on the student's own base model: the numbers of a merged copy, and a student that is none the wiser."""

import importlib.util
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from peft import (
    IA3Config,
    LoraConfig,
    PeftModel,
    PromptTuningConfig,
    get_peft_model,
    get_peft_model_state_dict,
    load_peft_weights,
)
from safetensors.torch import load_file, save_file
from teachers.scoring import local_teacher, reference, request
from torch import nn
from trl.trainer.utils import add_fused_lm_head, use_adapter

from trl_softgate import SAFDistillConfig, SAFDistillTrainer
from trl_softgate.teachers import AdapterTeacher, TeacherRequest

VOCAB = 300


def lora(**kwargs: Any) -> LoraConfig:
    defaults: dict[str, Any] = dict(r=4, target_modules=["q_proj", "v_proj", "down_proj"], task_type="CAUSAL_LM")
    return LoraConfig(**{**defaults, **kwargs})


def student(config: Any, base: Any = None, temperature: float = 1.0, seed: int = 1) -> Any:
    """As `GRPOTrainer` makes it, in train mode."""
    base = base or tiny.model(layers=2)
    add_fused_lm_head(base, temperature=temperature, outputs=("log_probs", "entropy"))
    torch.manual_seed(seed)
    return get_peft_model(base, config).train()


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base")
    tiny.model(layers=2).save_pretrained(folder)
    return folder


def adapter(folder: Path, base: Path, name: str = "adapter", seed: int = 5, **kwargs: Any) -> str:
    """Folder of an adapter that does something, made on the model at `base`."""
    torch.manual_seed(seed)
    made = get_peft_model(tiny.model().from_pretrained(base), lora(**{"init_lora_weights": False, **kwargs}))
    with torch.no_grad():
        for key, parameter in made.named_parameters():
            if "lora_magnitude_vector" in key:
                parameter.mul_(1 + 0.3 * torch.rand_like(parameter))
    path = folder / name
    made.save_pretrained(str(path))
    return str(path)


def teacher(student: Any, path: str | None, temperature: float = 1.0, max_tokens: int = 24) -> AdapterTeacher:
    return AdapterTeacher(student, path, temperature=temperature, max_tokens_per_batch=max_tokens)


def merged(path: str, asked: TeacherRequest) -> torch.Tensor:
    """The answer of a copy of its own, with the adapter merged into it."""
    return local_teacher(path, temperature=asked.temperature, max_tokens_per_batch=24)(asked)


def state(model: Any) -> dict[str, Any]:
    """All that scoring could leave behind."""
    return {
        "training": {name: module.training for name, module in model.named_modules()},
        "flags": {name: parameter.requires_grad for name, parameter in model.named_parameters()},
        "active": (model.active_adapter, model.base_model.active_adapter),
        "adapters": {
            name: (module.active_adapters, module.disable_adapters)
            for name, module in model.named_modules()
            if hasattr(module, "disable_adapters")
        },
        "table": dict(model.peft_config),
        "names": sorted(model.state_dict()),
    }


STUDENTS: dict[str, dict[str, Any]] = {
    "new": dict(),
    "trained": dict(init_lora_weights=False),
    "other-rank": dict(r=2, lora_alpha=3, init_lora_weights=False),
    "other-layers": dict(target_modules=["k_proj", "up_proj"], init_lora_weights=False),
    "all-linear": dict(target_modules="all-linear", init_lora_weights=False),
    "dora": dict(use_dora=True, init_lora_weights=False),
    "modules-to-save": dict(modules_to_save=["norm", "embed_tokens"], init_lora_weights=False),
    "lm-head-to-save": dict(modules_to_save=["lm_head"], init_lora_weights=False),
    "new-tokens": dict(trainable_token_indices=[5, 6], init_lora_weights=False),
    "dropout": dict(lora_dropout=0.5, init_lora_weights=False),
}


def changed_student(name: str) -> Any:
    """One whose own adapter would be seen if it took part."""
    made = student(lora(**STUDENTS[name]))
    with torch.no_grad():
        for key, parameter in made.named_parameters():
            if "modules_to_save" in key or "trainable_tokens_delta" in key:
                parameter.add_(0.3 * torch.randn_like(parameter))
    return made


class TestNumbers:
    @pytest.mark.parametrize("name", [name for name in STUDENTS if name != "new-tokens"])
    def test_those_of_a_merged_copy_whatever_the_student(self, name: str, base: Path, tmp_path: Path) -> None:
        path = adapter(tmp_path, base)
        made = changed_student(name)
        asked = request()
        expected = merged(path, asked)
        assert (expected - reference(tiny.model(), asked, VOCAB)).abs().max() > 0.01
        torch.testing.assert_close(teacher(made, path)(asked), expected, atol=1e-6, rtol=1e-6)

    @pytest.mark.parametrize("name", STUDENTS)
    def test_those_of_the_base_model_whatever_the_student(self, name: str) -> None:
        expected = reference(tiny.model(), request(), VOCAB).float()
        torch.testing.assert_close(teacher(changed_student(name), None)(request()), expected, atol=1e-6, rtol=1e-6)

    @pytest.mark.parametrize(
        "options",
        [
            dict(r=8, lora_alpha=4),
            dict(target_modules=["o_proj", "gate_proj"]),
            dict(target_modules="all-linear"),
            dict(use_rslora=True, r=9),
            dict(use_dora=True),
            dict(lora_dropout=0.5),
            dict(rank_pattern={"q_proj": 2}, alpha_pattern={"v_proj": 32}),
            dict(layers_to_transform=[1]),
            dict(target_modules=["embed_tokens"]),
        ],
        ids=lambda options: "-".join(options),
    )
    def test_of_every_kind_of_teacher(self, options: dict[str, Any], base: Path, tmp_path: Path) -> None:
        path = adapter(tmp_path, base, **options)
        asked = request()
        plain = PeftModel.from_pretrained(tiny.model().from_pretrained(base), path)
        expected = reference(plain, asked, VOCAB).float()
        made = teacher(student(lora(init_lora_weights=False)), path)
        torch.testing.assert_close(made(asked), expected, atol=2e-6, rtol=1e-6)
        # and again: the first answer has left it in place
        torch.testing.assert_close(made(asked), expected, atol=2e-6, rtol=1e-6)

    @pytest.mark.parametrize("temperature", [1.0, 0.6])
    @pytest.mark.parametrize("pad", [0, 1])
    @pytest.mark.parametrize("max_tokens", [1, 1000])
    def test_at_any_temperature_padding_and_batch(
        self, temperature: float, pad: int, max_tokens: int, base: Path, tmp_path: Path
    ) -> None:
        path = adapter(tmp_path, base)
        asked = request(temperature, pad=pad)
        made = teacher(student(lora(), temperature=temperature), path, temperature, max_tokens)
        torch.testing.assert_close(made(asked), merged(path, asked), atol=1e-6, rtol=1e-6)

    def test_another_temperature_is_refused(self) -> None:
        with pytest.raises(
            ValueError, match=r"has temperature 1\.0, which the teacher shares; it cannot score at 0\.5"
        ):
            teacher(student(lora()), None)(request(0.5))

    def test_two_teachers_on_one_student(self, base: Path, tmp_path: Path) -> None:
        paths = [
            adapter(tmp_path, base, "one", seed=5, r=2, target_modules=["q_proj", "o_proj"]),
            adapter(tmp_path, base, "two", seed=6, r=3, lora_alpha=2, target_modules=["q_proj", "v_proj"]),
        ]
        made = student(lora(init_lora_weights=False))
        teachers = [teacher(made, path) for path in paths]
        for asked, path in [*zip(teachers, paths, strict=True)] * 2:
            torch.testing.assert_close(asked(request()), merged(path, request()), atol=1e-6, rtol=1e-6)
        torch.testing.assert_close(
            teacher(made, None)(request()), reference(tiny.model(), request(), VOCAB).float(), atol=1e-6, rtol=1e-6
        )

    def test_learning_of_the_student_does_not_reach_the_teacher(self, base: Path, tmp_path: Path) -> None:
        path = adapter(tmp_path, base)
        made = student(lora())
        asked = teacher(made, path)
        before = asked(request())
        optimizer = torch.optim.SGD([p for p in made.parameters() if p.requires_grad], lr=1.0)
        made(input_ids=request().completion_ids, labels=request().completion_ids).loss.backward()
        optimizer.step()
        assert torch.equal(asked(request()), before)

    def test_another_kind_of_adapter(self, base: Path, tmp_path: Path) -> None:
        config: dict[str, Any] = dict(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"])
        torch.manual_seed(3)
        other = get_peft_model(
            tiny.model().from_pretrained(base), IA3Config(task_type="CAUSAL_LM", init_ia3_weights=False, **config)
        )
        other.save_pretrained(str(tmp_path / "ia3"))
        expected = reference(other, request(), VOCAB).float()
        made = teacher(student(IA3Config(task_type="CAUSAL_LM", **config)), str(tmp_path / "ia3"))
        torch.testing.assert_close(made(request()), expected, atol=2e-6, rtol=1e-6)

    @pytest.mark.skipif(importlib.util.find_spec("bitsandbytes") is None, reason="needs bitsandbytes")
    def test_on_a_quantized_student(self, tmp_path: Path) -> None:
        from transformers import BitsAndBytesConfig

        wide = tiny.model(hidden=64)
        wide.save_pretrained(tmp_path / "base")
        path = adapter(tmp_path, tmp_path / "base")
        quantized: Any = type(wide).from_pretrained(
            tmp_path / "base",
            quantization_config=BitsAndBytesConfig(
                load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32
            ),
        )
        made = student(lora(init_lora_weights=False), base=quantized)
        before = state(made)
        shared = teacher(made, path)
        scores = shared(request())
        assert state(made) == before
        # the same base with that adapter and no other
        alone = PeftModel.from_pretrained(
            type(wide).from_pretrained(tmp_path / "base", quantization_config=quantized.config.quantization_config),
            path,
        )
        alone_scores = torch.stack([*_row_by_row(alone, request())])
        torch.testing.assert_close(scores, alone_scores, atol=1e-5, rtol=1e-5)


@torch.no_grad()
def _row_by_row(model: Any, asked: TeacherRequest) -> Iterator[torch.Tensor]:
    """`reference` in the model's own dtype."""
    model.eval()
    for i in range(len(asked.completion_ids)):
        prompt = asked.prompt_ids[i][asked.prompt_mask[i] == 1]
        completion = asked.completion_ids[i][asked.completion_mask[i] == 1]
        logps = model(input_ids=torch.cat([prompt, completion])[None]).logits[0].float().log_softmax(-1)
        row = torch.zeros(asked.completion_ids.shape[1])
        row[: len(completion)] = logps[len(prompt) - 1 : -1].gather(1, completion[:, None])[:, 0]
        yield row


class TestStudentIsAsBefore:
    @pytest.mark.parametrize("shared", ["adapter", "base"])
    @pytest.mark.parametrize("name", ["other-layers", "dora", "modules-to-save", "lm-head-to-save", "dropout"])
    def test_after_loading_and_after_scoring(self, name: str, shared: str, base: Path, tmp_path: Path) -> None:
        made = changed_student(name)
        # some modules in eval mode, one frozen parameter that an adapter would train
        made.get_base_model().model.layers[1].eval()
        next(module for module in made.modules() if isinstance(module, nn.Dropout | nn.Identity)).eval()
        next(p for n, p in made.named_parameters() if "lora_B" in n).requires_grad_(False)
        before, weights = state(made), {n: v.clone() for n, v in made.state_dict().items()}
        asked = teacher(made, adapter(tmp_path, base) if shared == "adapter" else None)
        after = state(made)
        # layers that the teacher alone has are wrapped, with nothing in them
        assert {n.replace(".base_layer", "") for n in after.pop("names")} == {
            n.replace(".base_layer", "") for n in before.pop("names")
        }
        for kind in ("training", "flags"):
            named = {n.replace(".base_layer", ""): v for n, v in after[kind].items()}
            assert {n: named[n.replace(".base_layer", "")] for n in before[kind]} == before[kind]
        for kind in ("active", "table"):
            assert after[kind] == before[kind]
        before = state(made)
        for _ in range(2):
            asked(request())
            assert state(made) == before
        for key, value in made.state_dict().items():
            same = {n.replace(".base_layer", ""): v for n, v in weights.items()}[key.replace(".base_layer", "")]
            assert torch.equal(value, same), key

    @pytest.mark.parametrize("shared", ["adapter", "base"])
    def test_when_scoring_fails(self, shared: str, base: Path, tmp_path: Path) -> None:
        made = changed_student("modules-to-save")
        made.get_base_model().model.layers[0].eval()
        asked = teacher(made, adapter(tmp_path, base) if shared == "adapter" else None)
        before, healthy = state(made), asked(request())

        def fail(*args: Any, **kwargs: Any) -> None:
            raise MemoryError("out of memory")

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(made.get_base_model().model.layers[1], "forward", fail)
            with pytest.raises(MemoryError):
                asked(request())
        assert state(made) == before
        assert torch.equal(asked(request()), healthy)

    def test_the_teacher_is_frozen_and_in_eval_mode_while_it_scores(self, base: Path, tmp_path: Path) -> None:
        made = student(lora(lora_dropout=0.5, init_lora_weights=False))
        asked = teacher(made, adapter(tmp_path, base, lora_dropout=0.5))
        seen: list[str] = []

        def look(module: nn.Module, args: Any) -> None:
            assert not torch.is_grad_enabled()
            assert not any(part.training for part in made.modules())
            for name, parameter in made.named_parameters():
                if "softgate_teacher" in name:
                    assert not parameter.requires_grad
                    seen.append(name)

        with made.get_base_model().model.layers[0].register_forward_pre_hook(look):
            assert not asked(request()).requires_grad
        assert seen
        assert not any("softgate_teacher" in name for name, _ in made.named_parameters())

    def test_the_student_learns_as_without_it(self, base: Path, tmp_path: Path) -> None:
        def learned(with_teacher: bool) -> dict[str, torch.Tensor]:
            made = student(lora(lora_dropout=0.5, modules_to_save=["norm"]))
            asked = teacher(made, adapter(tmp_path, base)) if with_teacher else None
            torch.manual_seed(2)
            optimizer = torch.optim.AdamW([p for p in made.parameters() if p.requires_grad], lr=0.01)
            for _ in range(3):
                if asked is not None:
                    asked(request())
                made(input_ids=request().completion_ids, labels=request().completion_ids).loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            return get_peft_model_state_dict(made)

        alone, beside = learned(False), learned(True)
        assert alone.keys() == beside.keys()
        for name, value in alone.items():
            assert torch.equal(value, beside[name]), name

    def test_it_saves_its_own_adapter_alone(self, base: Path, tmp_path: Path) -> None:
        path = adapter(tmp_path, base, target_modules="all-linear")
        expected = get_peft_model_state_dict(student(lora(init_lora_weights=False)))
        made = student(lora(init_lora_weights=False))
        asked = teacher(made, path)
        asked(request())
        # as transformers' Trainer does it, too
        for folder, kwargs in (("plain", {}), ("trainer", {"state_dict": made.state_dict()})):
            made.save_pretrained(str(tmp_path / folder), **kwargs)
            assert not [entry for entry in (tmp_path / folder).iterdir() if entry.is_dir()]
            saved = load_peft_weights(str(tmp_path / folder), device="cpu")
            assert saved.keys() == expected.keys()
            assert all(torch.equal(saved[name], value) for name, value in expected.items())
        made.load_adapter(str(tmp_path / "plain"), "default", is_trainable=True)
        torch.testing.assert_close(asked(request()), merged(path, request()), atol=1e-6, rtol=1e-6)

    def test_merging_is_of_the_student_alone(self, base: Path, tmp_path: Path) -> None:
        """What TRL sends to vLLM."""

        def sent(model: Any) -> dict[str, torch.Tensor]:
            model.merge_adapter()
            try:
                return {
                    name.removeprefix("base_model.model.").replace(".base_layer", ""): value.clone()
                    for name, value in model.named_parameters()
                    if model.prefix not in name
                }
            finally:
                model.unmerge_adapter()

        expected = sent(student(lora(init_lora_weights=False)))
        made = student(lora(init_lora_weights=False))
        asked = teacher(made, adapter(tmp_path, base, target_modules="all-linear"))
        first = asked(request())
        got = sent(made)
        assert got.keys() == expected.keys()
        assert all(torch.equal(got[name], value) for name, value in expected.items())
        torch.testing.assert_close(asked(request()), first, atol=1e-5, rtol=0)

    def test_a_student_that_is_moved_takes_its_teacher_along(self, base: Path, tmp_path: Path) -> None:
        made = student(lora())
        asked = teacher(made, adapter(tmp_path, base))
        made.to("meta")
        asked._insert()
        assert {p.device.type for n, p in made.named_parameters() if "softgate_teacher" in n} == {"meta"}
        asked._remove()

    def test_other_adapters_of_the_student_still_switch(self, base: Path, tmp_path: Path) -> None:
        made = student(lora(init_lora_weights=False))
        made.add_adapter("ref", lora(init_lora_weights=False))
        plain = {name: _logits(made, name) for name in ("default", "ref", None)}
        asked = teacher(made, adapter(tmp_path, base))
        for _ in range(2):
            for name, value in plain.items():
                asked(request())
                torch.testing.assert_close(_logits(made, name), value, atol=1e-6, rtol=0)
        asked(request())
        assert made.active_adapter == "default"
        trained = {n for n, p in made.named_parameters() if p.requires_grad}
        assert trained and all(".default." in name for name in trained)

    def test_loading_leaves_the_random_numbers_alone(self, base: Path, tmp_path: Path) -> None:
        path = adapter(tmp_path, base)
        made = student(lora())
        torch.manual_seed(5)
        random.seed(5)
        expected = torch.rand(3), random.random()
        torch.manual_seed(5)
        random.seed(5)
        asked = teacher(made, path)
        asked(request())
        assert torch.equal(torch.rand(3), expected[0]) and random.random() == expected[1]


@torch.no_grad()
def _logits(model: Any, name: str | None) -> torch.Tensor:
    model.eval()
    with use_adapter(model, name):
        value = model(input_ids=request().completion_ids).logits
    model.train()
    return value


class TestRefused:
    def test_a_student_without_adapter(self) -> None:
        with pytest.raises(ValueError, match="pass `peft_config` .* or load the teacher with `teacher_model_name"):
            teacher(tiny.model(), None)

    def test_a_student_of_prompt_tuning(self) -> None:
        made = get_peft_model(tiny.model(), PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2))
        with pytest.raises(ValueError, match="PROMPT_TUNING adapter, .*: load the teacher with `teacher_model_name"):
            teacher(made, None)

    @pytest.mark.parametrize("options", [dict(bias="all"), dict(bias="lora_only"), dict(init_lora_weights="pissa")])
    def test_a_student_that_changes_its_base(self, options: dict[str, Any]) -> None:
        (name,) = options
        with pytest.raises(ValueError, match=f"changes its base model .`{name}=.*: leave that option out"):
            teacher(student(lora(**options)), None)

    @pytest.mark.parametrize(
        "other, reason",
        [
            (dict(hidden=64), "size mismatch"),
            (dict(layers=1), "does not fit at"),
            (dict(layers=3), "does not fit at"),
        ],
        ids=["hidden-size", "fewer-layers", "more-layers"],
    )
    def test_an_adapter_of_another_base(self, other: dict[str, Any], reason: str, tmp_path: Path) -> None:
        tiny.model(**other).save_pretrained(tmp_path / "other")
        self._refused(adapter(tmp_path, tmp_path / "other"), reason)

    @pytest.mark.parametrize(
        "options, reason",
        [
            (dict(target_modules=["q_proj", "lm_head"]), "changes the LM head"),
            (dict(modules_to_save=["lm_head"]), "replaces whole layers .`modules_to_save=.'lm_head'.`"),
            (dict(modules_to_save=["norm"]), "replaces whole layers .`modules_to_save=.'norm'.`"),
            (dict(trainable_token_indices=[7]), "replaces whole layers .`trainable_token_indices=.7.`"),
            (dict(init_lora_weights="pissa"), "changes the base model .`init_lora_weights='pissa'`"),
            (dict(init_lora_weights="olora"), "changes the base model .`init_lora_weights='olora'`"),
            (dict(bias="all"), "changes the base model .`bias='all'`"),
        ],
        ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
    )
    def test_an_adapter_that_does_more_than_add(
        self, options: dict[str, Any], reason: str, base: Path, tmp_path: Path
    ) -> None:
        self._refused(adapter(tmp_path, base, **options), reason)

    def test_an_adapter_of_another_kind(self, base: Path, tmp_path: Path) -> None:
        other = get_peft_model(tiny.model().from_pretrained(base), IA3Config(task_type="CAUSAL_LM"))
        other.save_pretrained(str(tmp_path / "ia3"))
        self._refused(str(tmp_path / "ia3"), "it is of the kind IA3, the student's LORA")

    def test_an_adapter_beside_trainable_tokens(self, base: Path, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match="PEFT loads none .* `trainable_token_indices`"):
            teacher(changed_student("new-tokens"), adapter(tmp_path, base))

    def test_no_adapter_there(self, base: Path) -> None:
        self._refused("runs/nowhere", "")
        self._refused(str(base), "")

    def test_a_file_with_other_embeddings(self, base: Path, tmp_path: Path) -> None:
        """Loaded, they would replace the student's own."""
        path = adapter(tmp_path, base)
        file = f"{path}/adapter_model.safetensors"
        other: Any = tiny.model(8).get_input_embeddings().weight
        embeddings = {"base_model.model.model.embed_tokens.weight": other.data}
        save_file(load_file(file) | embeddings, file, metadata={"format": "pt"})
        self._refused(path, "holds a weight of another base model, 'base_model.model.model.embed_tokens.weight'")

    def _refused(self, path: str, reason: str) -> None:
        made = student(lora(init_lora_weights=False))
        before = state(made)
        weights = {name: value.clone() for name, value in made.state_dict().items()}
        with pytest.raises(
            ValueError, match=f"cannot be put on the student's base model: .*(?s:.)*{reason}.*(?s:.)*Use an adapter of"
        ) as caught:
            teacher(made, path)
        assert "`teacher_model_name_or_path`" in str(caught.value)
        after = state(made)
        for kind in ("active", "table"):
            assert after[kind] == before[kind]
        for name, value in made.state_dict().items():
            # a layer may be left wrapped
            same = {n.replace(".base_layer", ""): v for n, v in weights.items()}[name.replace(".base_layer", "")]
            assert torch.equal(value, same), name
        trained = {n for n, p in made.named_parameters() if p.requires_grad}
        assert trained == {n for n, flag in before["flags"].items() if flag}


class TestInATrainer:
    @pytest.mark.parametrize("beta", [0.0, 0.1])
    @pytest.mark.parametrize("kind", ["new", "trained"])
    def test_beside_the_reference_of_the_kl_penalty(self, kind: str, beta: float, base: Path, tmp_path: Path) -> None:
        """With `beta` and an adapter that is already trained, TRL adds an adapter of its own, `ref`."""
        path = adapter(tmp_path, base, target_modules=["q_proj", "o_proj"])
        model: Any = tiny.model()
        if kind == "trained":
            torch.manual_seed(4)
            model = get_peft_model(model, lora(init_lora_weights=False, lora_dropout=0.5))
        made = SAFDistillTrainer(
            model,
            tiny.reward,
            tiny.config(
                SAFDistillConfig,
                tmp_path / "out",
                opd_warmup_steps=0,
                teacher_adapter=path,
                beta=beta,
                max_steps=3,
                num_iterations=2,
            ),
            tiny.dataset(),
            processing_class=tiny.tokenizer(),
            peft_config=lora(lora_dropout=0.5) if kind == "new" else None,
        )
        assert ("ref" in made.model.peft_config) == (kind == "trained" and beta > 0)
        before = {name: value.clone() for name, value in made.model.state_dict().items()}
        made.train()
        after = made.model.state_dict()
        changed = {name for name, value in before.items() if not torch.equal(after[name], value)}
        assert changed and all(".default." in name for name in changed)
        optimized = {id(p) for group in made.optimizer.param_groups for p in group["params"]}  # type: ignore[union-attr]
        assert optimized == {id(p) for n, p in made.model.named_parameters() if ".default." in n}
        logs = [row for row in made.state.log_history if "distill/kl" in row]
        assert len(logs) == 3 and all(row["distill/opd_abs_max"] > 0.01 for row in logs)
        if beta > 0:
            assert logs[0]["kl"] >= 0 and logs[2]["kl"] > 0
        (asked,) = [c.teacher for c in made.callback_handler.callbacks if hasattr(c, "on_rollout")]
        torch.testing.assert_close(asked(request()), merged(path, request()), atol=1e-6, rtol=1e-6)
        made.save_model(str(tmp_path / "saved"))
        folders = [entry.name for entry in (tmp_path / "saved").iterdir() if entry.is_dir()]
        assert folders == (["ref"] if "ref" in made.model.peft_config else [])
