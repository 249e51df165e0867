"""Writes the files in `recipes/configs`, so that what several of them share is stated once.

    python recipes/write_configs.py

Each value is marked: `# paper` if the paper gives it, `# ours` if not. The files are plain: to change one for
yourself, copy it, or override its keys on the command line. A test holds them against what this script writes.

Memory is the sum that `trl-softgate env` shows. What the rollout of a recipe without vLLM takes is added: the weights,
and 4 bytes x layers x keys of each token, for all completions of a rollout at a time.
"""

from __future__ import annotations

import argparse
import functools
import re
import tempfile
import textwrap
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trl_softgate.environment import ModelSize, Setup, estimate, model_size

CONFIGS = Path(__file__).parent / "configs"
SAF_PAPER = "arXiv 2607.29209"
GSPO_PAPER = "arXiv 2507.18071"
SAPO_PAPER = "arXiv 2511.20347"
TEACHER = "Qwen/Qwen3-30B-A3B-Instruct-2507"
SMALL_TEACHER = "Qwen/Qwen3-4B-Instruct-2507"
KV_WIDTH = 128  # of a head; all models here
# What their config.json says.
MODELS: dict[str, dict[str, Any]] = {
    "0.6B": dict(hidden_size=1024, intermediate_size=3072, num_hidden_layers=28, num_attention_heads=16),
    "1.7B": dict(hidden_size=2048, intermediate_size=6144, num_hidden_layers=28, num_attention_heads=16),
    "4B": dict(hidden_size=2560, intermediate_size=9728, num_hidden_layers=36, num_attention_heads=32),
    "8B": dict(
        hidden_size=4096,
        intermediate_size=12288,
        num_hidden_layers=36,
        num_attention_heads=32,
        tie_word_embeddings=False,
    ),
    "30B-A3B": dict(
        hidden_size=2048,
        intermediate_size=6144,
        moe_intermediate_size=768,
        num_experts=128,
        num_experts_per_tok=8,
        num_hidden_layers=48,
        num_attention_heads=32,
        num_key_value_heads=4,
        tie_word_embeddings=False,
    ),
}
NOT_RUN = "Status: expected to work on GPUs, not run; the memory is an estimate"
VALUES = tuple[tuple[str, str, str], ...]


@dataclass
class File:
    """A recipe in the making.

    Attributes:
        launch: words between `accelerate launch` and `--config`, one entry for each machine.
        about: lines of the header, below the launch lines.
        blocks: key, value as YAML, and "paper" or "ours", with ": reason" where there is one; a blank line between
            blocks.
    """

    launch: tuple[str, ...]
    about: tuple[str, ...]
    blocks: list[VALUES] = field(default_factory=list)

    def text(self, name: str) -> str:
        lines: list[str] = []
        for words in self.launch:
            line = f"accelerate launch {words} --config recipes/configs/{name}.yaml"
            glued = re.sub(r"(--\w+) ", r"\1=", line)  # an option and its value stay on one line
            parts = textwrap.wrap(glued, 110, break_long_words=False, break_on_hyphens=False)
            lines += re.sub(r"(--\w+)=", r"\1 ", " \\\n    ".join(parts)).splitlines()
        lines = [f"# {line}" for line in lines]
        lines += [f"# {line}" for line in self.about]
        lines.append(
            "# Written by recipes/write_configs.py: copy it to edit it, or override keys on the command line."
        )
        for block in self.blocks:
            lines += ["", *(f"{key}: {value} # {mark}" for key, value, mark in block)]
        return "\n".join(lines) + "\n"


@functools.cache
def sizes() -> dict[str, ModelSize]:
    """Parameters of each of `MODELS`, counted."""
    from transformers import Qwen3Config, Qwen3MoeConfig

    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, options in MODELS.items():
            kind = Qwen3MoeConfig if "num_experts" in options else Qwen3Config
            common = dict(vocab_size=151936, head_dim=KV_WIDTH, num_key_value_heads=8, tie_word_embeddings=True)
            kind(**{**common, **options}).save_pretrained(f"{folder}/{name}")
            found[name] = model_size(f"{folder}/{name}")
    return found


def gigabytes(size: float) -> str:
    return f"{size / 1e9:.0f}" if size >= 9.5e9 else f"{size / 1e9:.1f}"


def running(name: str, save_steps: int) -> VALUES:
    return (
        ("output_dir", f"runs/{name}", "ours"),
        ("logging_steps", "1", "ours"),
        ("save_steps", str(save_steps), "ours"),
        ("save_total_limit", "2", "ours"),
        ("report_to", "none", "ours: or wandb, trackio, tensorboard"),
        ("seed", "0", "ours"),
    )


# SAF and what it is compared with: full fine-tuning on 8 GPUs of 80 GB

VARIANTS = {
    "grpo": "GRPO alone, a baseline of the paper",
    "opd_only": "Distillation alone, a baseline of the paper",
    "fixed": "GRPO plus distillation with all stages off, a baseline of the paper",
    "saf": "SAF distillation, as in the paper",
    "saf_no_top_k": "Ablation of SAF distillation: without the top-k filter",
    "saf_no_tanh": "Ablation of SAF distillation: without the compression",
    "saf_no_warmup": "Ablation of SAF distillation: without the warm-up",
    "saf_no_anneal": "Ablation of SAF distillation: without the decay",
}
STAGES = {
    "top_k": ("opd_top_k_percent", "20.0", "null"),
    "tanh": ("opd_tanh_coef", "0.1", "null"),
    "warmup": ("opd_warmup_steps", "100", "0"),
    "anneal": ("opd_anneal", "true", "false"),
}
ROLLOUT = {"math": 16384, "code": 8192}
# Rows of a forward on each GPU, and accelerate's file.
ROWS = {"1.7B": {"math": 2, "code": 4}, "4B": {"math": 2, "code": 4}, "8B": {"math": 1, "code": 2}}
BACKENDS = {"1.7B": "zero2", "4B": "zero2", "8B": "fsdp2"}


def saf(size: str, data: str, variant: str, models: dict[str, ModelSize]) -> tuple[str, File]:
    name = f"qwen3_{size.lower()}_{data}_{variant}"
    opd_only, taught = variant == "opd_only", variant != "grpo"
    completion = ROLLOUT[data]
    rows = ROWS[size][data]
    accumulation = 1024 // (8 * rows)
    steps = {"math": (300, 100), "code": (200, 50)}[data][opd_only]
    backend = BACKENDS[size]
    setup = estimate(
        models[size],
        "full",
        "server" if taught else "none",
        "FSDP2/ZeRO-3" if backend == "fsdp2" else "ZeRO-2",
        tokens=rows * (2048 + completion),
        gpus=8,
    )
    assert setup is not None
    prompts = "1,024 prompts x 1" if opd_only else "128 prompts x 8"
    corpus = {"math": "DeepMath", "code": "Eurus-RL-Code"}[data]
    about = [
        f"{VARIANTS[variant]} ({SAF_PAPER}): Qwen3-{size} on {corpus}.",
        f"Hardware: 8 x H100 80 GB{', 2 more for the teacher' if taught else ''}",
        f"Memory: {gigabytes(setup.total)} GB a GPU, vLLM 40 %",
        NOT_RUN,
        f"Batch: 8 GPUs x {rows} x {accumulation} = 1,024 completions = {prompts}, one update per rollout (paper)",
    ]
    if taught:
        about.append(f"Teacher: vllm serve {TEACHER} --tensor-parallel-size 2 --max-model-len {2048 + completion + 1}")
    if data == "code":
        about.append("Programs run under bubblewrap (apt install bubblewrap).")
    method: list[tuple[str, str, str]] = [("policy_objective", "grpo", "paper")]
    if variant == "grpo":
        method.append(("opd_coef", "0.0", "paper: no teacher"))
    if opd_only:
        method.append(("grpo_coef", "0.0", "paper: the reward is only logged"))
    if taught:
        off = {"opd_only": set(STAGES), "fixed": set(STAGES)}.get(variant, {variant.removeprefix("saf_no_")})
        method += [(key, value, "paper") for stage, (key, value, _) in STAGES.items() if stage not in off]
        method += [(key, value, "paper: off") for stage, (key, _, value) in STAGES.items() if stage in off]
        if "warmup" not in off:
            method.append(("opd_kl_drop_threshold", "0.2", "paper"))
        if "anneal" not in off:
            method.append(("opd_anneal_min", "0.0", "paper"))
        method += [
            ("teacher_server_url", "http://teacher:8000", "ours: the machine that serves it"),
            ("teacher_server_model", TEACHER, "paper"),
            ("teacher_server_timeout", "600.0", "ours: long completions"),
        ]
    method += [("aggregation", "token_mean", "paper: as in its code"), ("beta", "0.0", "paper")]
    dataset: VALUES = {
        "math": (("dataset_name", "deepmath", "paper"), ("min_difficulty", "6.0", "paper")),
        "code": (("dataset_name", "eurus_rl_code", "paper"),),
    }[data]
    file = File(
        (f"--config_file recipes/accelerate/{backend}.yaml recipes/saf_distill.py",),
        tuple(about),
        [
            (
                ("model_name_or_path", f"Qwen/Qwen3-{size}", "paper"),
                ("dtype", "float32", "ours: of the weights that are updated; forwards are in bfloat16"),
            ),
            (*dataset, ("max_prompt_tokens", "2048", "paper")),
            tuple(method),
            (
                ("max_steps", str(steps), "paper"),
                ("learning_rate", "1.0e-6", "paper"),
                ("lr_scheduler_type", "constant", "ours"),
                ("num_generations", "1" if opd_only else "8", "paper"),
                ("max_completion_length", str(completion), "paper"),
                ("temperature", "1.0", "paper"),
                ("top_p", "1.0", "paper"),
                ("per_device_train_batch_size", str(rows), "ours: completions in a forward on each GPU"),
                ("gradient_accumulation_steps", str(accumulation), f"ours: {prompts} (paper) on 8 GPUs"),
            ),
            vllm(2048 + completion, share=0.4),
            running(name, save_steps=25),
        ],
    )
    return name, file


def vllm(length: int, share: float, parallel: int = 1) -> VALUES:
    return (
        ("use_vllm", "true", "ours"),
        ("vllm_mode", "colocate", "ours: or server, with `trl vllm-serve` on other GPUs"),
        ("vllm_tensor_parallel_size", str(parallel), "ours"),
        ("vllm_gpu_memory_utilization", str(share), "ours"),
        ("vllm_max_model_length", str(length), "ours: prompt and completion"),
        ("vllm_enable_sleep_mode", "true", "ours: frees its memory during updates"),
    )


# GSPO and SAPO: a mixture of experts on two machines

MOE_METHODS: dict[str, tuple[str, str, VALUES]] = {
    "gspo": (
        "GSPO",
        GSPO_PAPER,
        (("epsilon", "3.0e-4", "paper"), ("epsilon_high", "4.0e-4", "paper")),
    ),
    "sapo": (
        "SAPO",
        SAPO_PAPER,
        (("sapo_temperature_pos", "1.0", "paper"), ("sapo_temperature_neg", "1.05", "paper")),
    ),
}


def moe(method: str, models: dict[str, ModelSize]) -> tuple[str, File]:
    title, paper, values = MOE_METHODS[method]
    name = f"qwen3_30b_a3b_{method}"
    setup = estimate(models["30B-A3B"], "full", "none", "FSDP2/ZeRO-3", tokens=2048 + 16384, gpus=16)
    assert setup is not None
    backend = "--config_file recipes/accelerate/multi_node_fsdp2.yaml"
    steps, mark = ("1750", "paper: about as many") if method == "sapo" else ("1000", "ours")
    file = File(
        tuple(f"{backend} --machine_rank {rank} --main_process_ip 10.0.0.1 recipes/{method}.py" for rank in range(2)),
        (
            f"{title} of Qwen3-30B-A3B with four mini-batches per rollout, as in the paper ({paper}).",
            "Run the first line on one machine (10.0.0.1 here) and the second on the other.",
            "Hardware: 2 machines with 8 x H100 80 GB",
            f"Memory: {gigabytes(setup.total)} GB a GPU, vLLM 35 %",
            NOT_RUN,
            "Batch: 16 GPUs x 1 x 64 = 1,024 completions = 128 prompts x 8 per rollout, four updates (paper)",
        ),
        [
            (
                (
                    "model_name_or_path",
                    "Qwen/Qwen3-30B-A3B",
                    "ours: the paper's cold-start model of it is not published",
                ),
                ("dtype", "float32", "ours: of the weights that are updated; forwards are in bfloat16"),
            ),
            (
                ("dataset_name", "deepmath", "ours"),
                ("max_prompt_tokens", "2048", "ours"),
            ),
            (*values, ("aggregation", "seq_mean_token_mean", "paper")),
            (
                ("max_steps", steps, mark),
                ("learning_rate", "1.0e-6", "ours"),
                ("lr_scheduler_type", "constant", "ours"),
                ("num_generations", "8", "ours"),
                ("max_completion_length", "16384", "ours"),
                ("temperature", "1.0", "ours"),
                ("top_p", "1.0", "ours"),
                ("per_device_train_batch_size", "1", "ours: completions in a forward on each GPU"),
                ("gradient_accumulation_steps", "16", "ours: 256 completions in an update on 16 GPUs"),
                ("steps_per_generation", "64", "paper: 4 mini-batches per rollout, 4 x 16"),
            ),
            vllm(2048 + 16384, share=0.35, parallel=4),
            running(name, save_steps=25),
        ],
    )
    return name, file


# LoRA and QLoRA on one small GPU


@dataclass(frozen=True)
class Small:
    """`completions` of a rollout, `rows` in a forward, `gpu` in GB."""

    size: str
    method: str
    training: str
    teacher: str
    gpu: int
    rows: int
    completions: int = 32

    @property
    def name(self) -> str:
        teacher = f"_{self.teacher}" if self.teacher != "none" else ""
        return f"qwen3_{self.size.lower()}_{self.method}_{self.training.lower()}{teacher}_{self.gpu}gb"


SMALL = (
    Small("0.6B", "saf", "LoRA", "adapter", 8, rows=4),
    Small("0.6B", "gspo", "LoRA", "none", 8, rows=4),
    Small("1.7B", "saf", "QLoRA", "adapter", 8, rows=2, completions=16),
    Small("1.7B", "saf", "LoRA", "adapter", 12, rows=4),
    Small("1.7B", "saf", "LoRA", "server", 12, rows=4),
    Small("1.7B", "gspo", "LoRA", "none", 12, rows=4),
    Small("1.7B", "sapo", "LoRA", "none", 12, rows=4),
    Small("4B", "saf", "QLoRA", "server", 12, rows=2, completions=16),
    Small("4B", "saf", "LoRA", "adapter", 16, rows=2, completions=16),
    Small("4B", "saf", "QLoRA", "adapter", 16, rows=4),
    Small("4B", "saf", "LoRA", "server", 24, rows=4),
    Small("4B", "gspo", "QLoRA", "none", 16, rows=4),
    Small("4B", "sapo", "QLoRA", "none", 16, rows=4),
)
SMALL_PROMPT, SMALL_COMPLETION = 512, 1024
LORA: VALUES = (
    ("lora_r", "16", "ours"),
    ("lora_alpha", "32", "ours"),
    ("lora_dropout", "0.0", "ours: a dropped-out student would differ from the policy that sampled"),
    ("lora_target_modules", "[all-linear]", "ours"),
)


def small_memory(recipe: Small, models: dict[str, ModelSize]) -> tuple[Setup, float]:
    """What training takes, and bytes of the weights and of the rollout's cache."""
    setup = estimate(
        models[recipe.size],
        recipe.training,  # pyright: ignore[reportArgumentType]
        recipe.teacher,  # pyright: ignore[reportArgumentType]
        "DDP",
        tokens=recipe.rows * (SMALL_PROMPT + SMALL_COMPLETION),
    )
    assert setup is not None
    shape = MODELS[recipe.size]
    token = 4 * shape["num_hidden_layers"] * shape.get("num_key_value_heads", 8) * KV_WIDTH
    cache = token * recipe.completions * (SMALL_PROMPT + SMALL_COMPLETION)
    held = sum(term.size for term in setup.terms if term.name in ("weights", "AdamW", "teacher"))
    return setup, held + cache


def small(recipe: Small, models: dict[str, ModelSize]) -> tuple[str, File]:
    setup, sampling = small_memory(recipe, models)
    # GSPO and SAPO have something to bound only from the second update of a rollout on.
    updates = 1 if recipe.method == "saf" else 2
    accumulation = recipe.completions // (recipe.rows * updates)
    title = {"saf": "SAF distillation", "gspo": "GSPO", "sapo": "SAPO"}[recipe.method]
    script = "saf_distill" if recipe.method == "saf" else recipe.method
    teacher = {
        "adapter": ", its teacher another adapter",
        "server": f", its teacher {SMALL_TEACHER} on a server",
    }
    about = [
        f"{title} of a {recipe.training} student of Qwen3-{recipe.size}{teacher.get(recipe.teacher, '')}, on GSM8K.",
        f"Hardware: {recipe.gpu} GB{', another GPU for the teacher' if recipe.teacher == 'server' else ''}",
        f"Memory: {gigabytes(setup.total)} GB, sampling {gigabytes(sampling)} GB",
        NOT_RUN,
        f"Batch: {recipe.rows} x {recipe.completions // recipe.rows} = {recipe.completions} completions = "
        f"{recipe.completions // 8} prompts x 8 per rollout, {'one update' if updates == 1 else 'two updates'}",
    ]
    if recipe.teacher == "server":
        length = SMALL_PROMPT + SMALL_COMPLETION + 1
        about.append(f"Teacher: vllm serve {SMALL_TEACHER} --max-model-len {length}")
    elif recipe.teacher == "adapter":
        about.append("Teacher: any LoRA adapter of this model, for example of `trl sft ... --use_peft`")
    model: list[tuple[str, str, str]] = [
        ("model_name_or_path", f"Qwen/Qwen3-{recipe.size}", "ours"),
        ("dtype", "bfloat16", "ours: of the frozen weights"),
        ("use_peft", "true", "ours"),
    ]
    if recipe.training == "QLoRA":
        model.append(("load_in_4bit", "true", "ours"))
    model += LORA
    method: list[tuple[str, str, str]] = []
    if recipe.method == "saf":
        method += [("policy_objective", "grpo", "paper")]
        method += [(key, value, "paper") for key, value, _ in STAGES.values()]
        method += [("opd_kl_drop_threshold", "0.2", "paper"), ("opd_anneal_min", "0.0", "paper")]
        if recipe.teacher == "adapter":
            method.append(("teacher_adapter", "runs/teacher", "ours"))
        else:
            method.append(("teacher_server_url", "http://localhost:8000", "ours"))
            method.append(("teacher_server_model", SMALL_TEACHER, "ours"))
    else:
        method += MOE_METHODS[recipe.method][2]
    batch: list[tuple[str, str, str]] = [
        ("max_steps", "300", "ours: as the paper's, of other runs" if recipe.method == "saf" else "ours"),
        ("learning_rate", "1.0e-5", "ours: LoRA takes more than full fine-tuning"),
        ("lr_scheduler_type", "constant", "ours"),
        ("num_generations", "8", "paper" if recipe.method == "saf" else "ours"),
        ("max_completion_length", str(SMALL_COMPLETION), "ours"),
        ("temperature", "1.0", "paper" if recipe.method == "saf" else "ours"),
        ("per_device_train_batch_size", str(recipe.rows), "ours: completions in a forward"),
        ("gradient_accumulation_steps", str(accumulation), "ours"),
    ]
    if updates > 1:
        steps = updates * accumulation
        batch.append(("steps_per_generation", str(steps), f"ours: {updates} mini-batches per rollout"))
    file = File(
        (f"--config_file recipes/accelerate/single_gpu.yaml recipes/{script}.py",),
        tuple(about),
        [
            tuple(model),
            (
                ("dataset_name", "gsm8k", "ours"),
                ("dataset_split", "train", "ours"),
                ("max_prompt_tokens", str(SMALL_PROMPT), "ours"),
                ("chat_template_kwargs", "{enable_thinking: false}", "ours: short answers"),
            ),
            tuple(method),
            tuple(batch),
            running(recipe.name, save_steps=50),
        ],
    )
    return recipe.name, file


# SmolLM2 on a CPU

SMOLLM2 = {
    "saf_lora": "A LoRA student whose teacher is another adapter of the same base model.",
    "saf_qlora": "As smollm2_saf_lora_cpu.yaml, with the base model in four bits.",
    "gspo_lora": "Sequence-level ratios and clipping.",
    "sapo_lora": "A smooth gate per token.",
}


def smollm2(kind: str) -> tuple[str, File]:
    name = f"smollm2_{kind}_cpu"
    method = kind.partition("_")[0]
    about = [SMOLLM2[kind]]
    if method != "saf":
        about += [
            "The base model earns almost nothing here (mean reward 0.004), so 10 steps show how to launch, not that",
            "it learns: for that, start from a model that answers some of the problems.",
        ]
    about += [
        "Hardware: CPU",
        "Memory: 2.6 GB",
        "Status: run on the CPU; the memory is a measurement",
        f"Batch: 8 completions = 2 prompts x 4{'' if method == 'saf' else ', two updates of 16 per rollout'}",
    ]
    if method != "saf":
        about[-1] = "Batch: 2 x 8 completions = 4 prompts x 4 per rollout, two updates"
    model: list[tuple[str, str, str]] = [
        ("model_name_or_path", "runs/smollm2/base", "ours: examples/smollm2_prepare.py"),
        ("dtype", "float32", "ours"),
        ("use_peft", "true", "ours"),
    ]
    if kind == "saf_qlora":
        model.append(("load_in_4bit", "true", "ours"))
    model += LORA
    if method == "saf":
        values: VALUES = (
            ("teacher_adapter", "runs/smollm2/teacher", "ours: examples/smollm2_teacher_adapter.py"),
            ("policy_objective", "grpo", "paper"),
            ("opd_warmup_steps", "3", "ours: the paper's 100 of 300 steps, in proportion"),
        )
    else:
        values = (("steps_per_generation", "2", "ours: two updates per rollout; with one, every ratio would be 1"),)
    file = File(
        (f"recipes/{'saf_distill' if method == 'saf' else method}.py",),
        tuple(about),
        [
            tuple(model),
            (
                ("task_name", "chain_sum", "ours"),
                ("task_config", "{min_terms: 2, max_terms: 2, min_digits: 1, max_digits: 2}", "ours"),
                ("system_prompt", "Answer with the number only.", "ours"),
                ("train_size", "1000", "ours"),
            ),
            values,
            (
                ("max_steps", "10", "ours"),
                ("learning_rate", "1.0e-4", "ours"),
                ("per_device_train_batch_size", "8", "ours: completions per step, of 2 prompts"),
                ("num_generations", "4", "ours"),
                ("max_completion_length", "12", "ours"),
                ("temperature", "1.0", "ours"),
            ),
            (
                ("output_dir", f"runs/smollm2/{kind.removesuffix('_lora').replace('_', '-')}", "ours"),
                ("use_cpu", "true", "ours"),
                ("bf16", "false", "ours"),
                ("gradient_checkpointing", "false", "ours"),
                ("logging_steps", "1", "ours"),
                ("save_strategy", '"no"', "ours"),
                ("report_to", "none", "ours"),
                ("seed", "0", "ours"),
            ),
        ],
    )
    return name, file


def files() -> dict[str, str]:
    """Name of each recipe -> its text."""
    models = sizes()
    found = [smollm2(kind) for kind in SMOLLM2]
    found += [small(recipe, models) for recipe in SMALL]
    found += [
        saf(size, data, variant, models)
        for size in ("1.7B", "4B", "8B")
        for data in ("math", "code")
        for variant in VARIANTS
        if "_no_" not in variant or (size, data) == ("4B", "math")
    ]
    found += [moe(method, models) for method in MOE_METHODS]
    return {name: file.text(name) for name, file in found}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args()
    for name, text in files().items():
        (CONFIGS / f"{name}.yaml").write_text(text)
        print(CONFIGS / f"{name}.yaml")
