"""What only a GPU can show, in a few minutes: does each way of training work there, how fast, in how much memory.

    make gpu-check

Needs a CUDA device; without one it says so and does nothing. Every case trains a randomly initialized model for a few
steps on fixed rollouts, in a process of its own; what is not installed is left out and said. The teachers' benchmark
follows, on the same model. Prints tables and writes `benchmarks/out/gpu_check.json`. `--cpu` runs the same cases with
a tiny model on the CPU, to test this script.
"""

import argparse
import dataclasses
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
STEPS = 4
LIMIT = 90.0  # seconds for one case
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "TRL_EXPERIMENTAL_SILENCE": "1"}


@dataclasses.dataclass(frozen=True)
class Case:
    """One way of training.

    Attributes:
        trainer: name in `trl_softgate`, or "GRPOTrainer" for stock TRL.
        needs: modules that must be installed.
        options: further options of the trainer's config.
        lora, quantized: the student.
        teacher: a second model.
        backend: file of `recipes/accelerate`.
    """

    trainer: str = "SAPOTrainer"
    needs: tuple[str, ...] = ()
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    lora: bool = False
    quantized: bool = False
    teacher: bool = False
    backend: str | None = None
    attention: str = "sdpa"


HEAD = "log-probs, fused LM head"
TEACHERS = "benchmarks/teachers.py"
CASES: dict[str, Case] = {
    "stock GRPO, bf16": Case("GRPOTrainer"),
    "GSPO, bf16": Case("GSPOTrainer"),
    "SAPO, bf16": Case(),
    "SAF over GRPO, bf16": Case("SAFDistillTrainer", teacher=True),
    "SAF over SAPO, bf16": Case("SAFDistillTrainer", options={"policy_objective": "sapo"}, teacher=True),
    "SAPO, float32": Case(options={"bf16": False}),
    "SAPO, flash attention": Case(needs=("flash_attn",), attention="flash_attention_2"),
    "SAPO, LoRA": Case(lora=True),
    "SAPO, QLoRA": Case(needs=("bitsandbytes",), lora=True, quantized=True),
    "SAF, LoRA, base teaches": Case("SAFDistillTrainer", options={"teacher_adapter": "base"}, lora=True),
    HEAD: Case(),
    "SAF, ZeRO-3": Case("SAFDistillTrainer", needs=("deepspeed",), teacher=True, backend="zero3"),
}


def make_model(folder: Path, tiny: bool) -> None:
    """A Qwen3 of about 0.4 billion random parameters, or a tiny one, with the byte tokenizer of the demo's kind."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from trl_softgate.tasks.addition import build_tokenizer

    size: dict[str, Any] = dict(hidden_size=1024, intermediate_size=3072, num_hidden_layers=16, num_attention_heads=16)
    if tiny:
        size = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2)
    torch.manual_seed(0)
    tokenizer: Any = build_tokenizer()
    config = Qwen3Config(
        vocab_size=512 if tiny else 65536,
        num_key_value_heads=size["num_attention_heads"] // 2,
        head_dim=size["hidden_size"] // size["num_attention_heads"],
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
        **size,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def rollouts(length: int) -> Callable[..., dict[str, Any]]:
    """Completions of exponential length over the tokenizer's own ids."""

    def rollout(prompts: list[str], trainer: Any) -> dict[str, Any]:
        import torch

        generator = torch.Generator().manual_seed(trainer.state.global_step)
        lengths = torch.empty(len(prompts)).exponential_(4 / length, generator=generator).long().clamp(1, length)
        ids = [torch.randint(3, 13, (int(n),), generator=generator).tolist() for n in lengths]
        return {"prompt_ids": trainer.processing_class(prompts)["input_ids"], "completion_ids": ids, "logprobs": None}

    return rollout


def train(case: Case, model: str, folder: str, cpu: bool) -> dict[str, Any]:
    """Median seconds of a step, the first one left out, and the peak memory of the device."""
    import torch
    import trl
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import BitsAndBytesConfig, TrainerCallback

    import trl_softgate

    stock = case.trainer == "GRPOTrainer"
    module: Any = trl if stock else trl_softgate
    length = 16 if cpu else 512
    config = getattr(module, case.trainer.replace("Trainer", "Config"))(
        folder,
        **{
            **dict(
                per_device_train_batch_size=8,
                num_generations=8,
                max_completion_length=length,
                max_steps=STEPS,
                learning_rate=1e-6,
                bf16=not cpu,
                use_cpu=cpu,
                model_init_kwargs={"dtype": "float32", "attn_implementation": case.attention},
                report_to="none",
                save_strategy="no",
                logging_steps=1,
                disable_tqdm=True,
            ),
            **({"loss_type": "grpo"} if stock else {}),
            **({"opd_warmup_steps": 0, "teacher_self_test": False} if case.trainer == "SAFDistillTrainer" else {}),
            **({"teacher_model_name_or_path": model} if case.teacher else {}),
            **case.options,
        },
    )
    seconds: list[float] = []

    class Clock(TrainerCallback):
        def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
            if not cpu:
                torch.cuda.synchronize()
            self.begin = time.perf_counter()

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            if not cpu:
                torch.cuda.synchronize()
            seconds.append(time.perf_counter() - self.begin)

    quantization = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4") if case.quantized else None
    trainer = getattr(module, case.trainer)(
        model,
        lambda completions, **kwargs: [float(i % 3) for i in range(len(completions))],
        config,
        Dataset.from_dict({"prompt": [f"{i}+{i}=" for i in range(64)]}),
        callbacks=[Clock()],
        peft_config=LoraConfig(target_modules="all-linear") if case.lora else None,
        quantization_config=quantization,
        rollout_func=rollouts(length),
    )
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert len(losses) == STEPS and all(abs(loss) < 1e6 for loss in losses), losses
    peak = 0 if cpu else torch.cuda.max_memory_allocated() / 2**20
    return {"seconds": statistics.median(seconds[1:]), "peak_mib": peak}


def head(model: str, cpu: bool) -> dict[str, Any]:
    """Log-probabilities of 8 long rows, with backward, by the fused LM head; and the peak with logits in full."""
    import torch
    from transformers import AutoModelForCausalLM
    from trl.trainer.utils import add_fused_lm_head

    device = torch.device("cpu" if cpu else "cuda")
    loaded: Any = AutoModelForCausalLM.from_pretrained(model, dtype="float32" if cpu else "bfloat16")
    made = loaded.to(device)
    add_fused_lm_head(made)
    ids = torch.randint(3, 13, (8, 32 if cpu else 1024), device=device)
    peaks, values = [], []
    for fused in (True, False):
        if not cpu:
            torch.cuda.reset_peak_memory_stats()
        begin = time.perf_counter()
        if fused:
            logps = made(input_ids=ids, labels=ids, fused_lm_head=True).log_probs
        else:
            logits = made(input_ids=ids).logits[:, :-1].float()
            logps = logits.log_softmax(-1).gather(2, ids[:, 1:, None])[:, :, 0]
        logps.sum().backward()
        values.append(logps.detach())
        if not cpu:
            torch.cuda.synchronize()
            peaks.append(torch.cuda.max_memory_allocated() / 2**20)
        if fused:
            seconds = time.perf_counter() - begin
    difference = (values[0] - values[1]).abs().max().item()
    assert difference < (1e-4 if cpu else 0.2), f"the fused LM head is off by {difference}"
    result = {"seconds": seconds, "peak_mib": peaks[0] if peaks else 0}
    return result if cpu else {**result, "status": f"ok; with logits in full {peaks[1]:.0f} MiB"}


def run(name: str, model: str, cpu: bool) -> dict[str, Any]:
    case = CASES[name]
    if cpu and case.backend is not None:
        return {"status": "left out: DeepSpeed compiles for minutes on a CPU"}
    missing = [module for module in case.needs if importlib.util.find_spec(module) is None]
    if missing:
        return {"status": f"left out: {', '.join(missing)} not installed"}
    words = [__file__, "--case", name, "--model", model, *(["--cpu"] if cpu else [])]
    if case.backend is not None:
        config = ROOT / "recipes" / "accelerate" / f"{case.backend}.yaml"
        words = ["-m", "accelerate.commands.launch", "--config_file", str(config), "--num_processes", "1", *words]
    try:
        done = subprocess.run(
            [sys.executable, *words], capture_output=True, text=True, timeout=LIMIT, env=ENVIRONMENT, cwd=ROOT
        )
    except subprocess.TimeoutExpired:
        return {"status": f"not done after {LIMIT:.0f} s"}
    results = [line.removeprefix("RESULT ") for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if not results:
        print(done.stdout[-1000:], done.stderr[-3000:], file=sys.stderr)
        return {"status": f"failed: {(done.stderr.strip().splitlines() or ['no output'])[-1][:80]}"}
    return {"status": "ok", **json.loads(results[-1])}


def teachers(model: str, cpu: bool, output: str) -> dict[str, Any]:
    """Rows per second of the kinds of teacher; prints a table of its own."""
    cases = ["local", "local-bf16", "adapter"]
    if importlib.util.find_spec("bitsandbytes") is not None and not cpu:
        cases.append("local-4bit")
    size = ["--rows", "3", "--max_tokens", "8", "--repeat", "1"] if cpu else ["--rows", "64", "--max_tokens", "1024"]
    words = [str(ROOT / TEACHERS), "--model", model, "--device", "cpu" if cpu else "cuda", *size]
    words += ["--output", str(Path(output).with_name("gpu_teachers.json")), "--cases", *cases]
    try:
        done = subprocess.run([sys.executable, *words], env=ENVIRONMENT, cwd=ROOT, timeout=1.5 * LIMIT)
    except subprocess.TimeoutExpired:
        return {"status": f"not done after {1.5 * LIMIT:.0f} s"}
    return {"status": "ok" if done.returncode == 0 else "failed, see above"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cpu", action="store_true", help="tiny model on the CPU: tests the script, not a GPU")
    parser.add_argument("--output", default="benchmarks/out/gpu_check.json")
    parser.add_argument("--limit", type=float, default=330.0, help="seconds in all; cases beyond are left out")
    parser.add_argument("--only", nargs="*", choices=[*CASES, TEACHERS], help="these cases alone")
    parser.add_argument("--case", choices=list(CASES), help=argparse.SUPPRESS)
    parser.add_argument("--model", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.case:
        with tempfile.TemporaryDirectory() as folder:
            if args.case == HEAD:
                result = head(args.model, args.cpu)
            else:
                result = train(CASES[args.case], args.model, folder, args.cpu)
            print("RESULT", json.dumps(result), flush=True)
        os._exit(0)  # process groups that are still open have nothing more to say

    import torch

    if not args.cpu and not torch.cuda.is_available():
        print("No CUDA device here: nothing was checked.")
        return
    from rich.console import Console
    from rich.table import Table

    begin = time.monotonic()
    results: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as folder:
        make_model(Path(folder), args.cpu)
        for name in [name for name in args.only or CASES if name != TEACHERS]:
            if time.monotonic() - begin > args.limit:
                results[name] = {"status": "left out: no time"}
                continue
            print(f"{name} ...", file=sys.stderr)
            results[name] = run(name, folder, args.cpu)
        if not args.only or TEACHERS in args.only:
            results[TEACHERS] = teachers(folder, args.cpu, args.output)
    device = "CPU" if args.cpu else torch.cuda.get_device_name()
    table = Table("case", "status", "s/step", "to stock", "peak MiB", title=f"{device}, torch {torch.__version__}")
    stock = results.get("stock GRPO, bf16", {}).get("seconds")
    for name, result in results.items():
        seconds = result.get("seconds")
        table.add_row(
            name,
            result["status"],
            "" if seconds is None else f"{seconds:.3f}",
            "" if seconds is None or stock is None or name == HEAD else f"{seconds / stock:.2f}",
            f"{result['peak_mib']:.0f}" if result.get("peak_mib") else "",
        )
    Console().print(table)
    Path(args.output).parent.mkdir(parents=True, exist_ok=True)
    Path(args.output).write_text(json.dumps({"device": device, "results": results}, indent=1) + "\n")
    if any(not result["status"].startswith(("ok", "left out")) for result in results.values()):
        sys.exit(1)


if __name__ == "__main__":
    main()
