"""What each kind of teacher costs: rows per second when scoring, and peak memory of a LoRA run around it.

    python benchmarks/teachers.py --model runs/smollm2/base
    python benchmarks/teachers.py --model runs/smollm2/base --server_url http://localhost:8000

Every case runs in a process of its own, one after the other, on the same rows: prompts of 32 tokens and completions of
exponential length. Needs a model folder; without `--adapter`, an untrained adapter of it is used. 8 and 4 bit need the
extra `quantization`, and are left out without it. Prints a table and writes `benchmarks/out/teachers.json`.
"""

import argparse
import importlib.util
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

SCORING = ("local", "local-one-row", "local-bf16", "local-8bit", "local-4bit", "adapter", "server")
TRAINING = ("lora-grpo", "lora-saf-adapter", "lora-saf-local")
PROMPT, SEED = 32, 0


def request_of(args: argparse.Namespace, tokens: int) -> Any:
    """The rows that every teacher scores."""
    import torch

    from trl_softgate.teachers import TeacherRequest

    generator = torch.Generator().manual_seed(SEED)
    lengths = torch.empty(args.rows).exponential_(4 / args.max_tokens, generator=generator).long()
    lengths = lengths.clamp(1, args.max_tokens)
    low = min(100, tokens // 2)  # special tokens come first
    return TeacherRequest(
        prompt_ids=torch.randint(low, tokens, (args.rows, PROMPT), generator=generator),
        prompt_mask=torch.ones(args.rows, PROMPT, dtype=torch.long),
        completion_ids=torch.randint(low, tokens, (args.rows, args.max_tokens), generator=generator),
        completion_mask=(torch.arange(args.max_tokens)[None] < lengths[:, None]).long(),
        temperature=1.0,
    )


def make_teacher(case: str, args: argparse.Namespace, tokenizer: Any) -> Any:
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM
    from trl.trainer.utils import add_fused_lm_head

    from trl_softgate.teachers import AdapterTeacher, LocalTeacher, ServerTeacher

    if case == "server":
        teacher = ServerTeacher(args.server_url, tokenizer=tokenizer)
        teacher.probe(PROMPT + args.max_tokens)
        return teacher
    if case == "adapter":
        base: Any = AutoModelForCausalLM.from_pretrained(args.model, dtype="float32")
        base.to(args.device)
        add_fused_lm_head(base)
        student = get_peft_model(base, LoraConfig(target_modules="all-linear"))
        return AdapterTeacher(student, args.adapter, temperature=1.0, max_tokens_per_batch=args.budget)
    init: dict[str, Any] = {"dtype": "bfloat16" if case == "local-bf16" else "float32"}
    if case in ("local-8bit", "local-4bit"):
        init["quantization_config"] = {"load_in_8bit": True} if case == "local-8bit" else {"load_in_4bit": True}
    model = AutoModelForCausalLM.from_pretrained(args.model).config
    return LocalTeacher(
        args.model,
        temperature=1.0,
        student_vocabulary=tokenizer.get_vocab(),
        student_vocab_size=model.vocab_size,
        student_eos=tokenizer.eos_token_id,
        max_tokens_per_batch=1 if case == "local-one-row" else args.budget,
        device=torch.device(args.device),
        model_init_kwargs=init,
    )


def score(case: str, args: argparse.Namespace) -> dict[str, Any]:
    """Seconds of each repetition, and the values, which every kind must share up to its precision."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(args.model)
    teacher = make_teacher(case, args, tokenizer)
    request = request_of(args, len(tokenizer))
    teacher(request.rows(range(2)))
    seconds = []
    for _ in range(args.repeat):
        begin = time.perf_counter()
        scores = teacher(request)
        seconds.append(time.perf_counter() - begin)
    return {"seconds": seconds, "mean": scores[request.completion_mask == 1].double().mean().item()}


def train(case: str, args: argparse.Namespace) -> dict[str, Any]:
    """Two optimizer steps of a LoRA student on fixed rollouts."""
    import torch
    from datasets import Dataset
    from peft import LoraConfig

    from trl_softgate import SAFDistillConfig, SAFDistillTrainer

    completions = request_of(args, 1000).completion_ids

    def rollout(prompts: list[str], trainer: Any) -> dict[str, Any]:
        ids = trainer.processing_class(prompts)["input_ids"]
        rows = [completions[i % len(completions)].tolist() for i in range(len(prompts))]
        return {"prompt_ids": ids, "completion_ids": rows, "logprobs": None}

    teacher: dict[str, Any] = {
        "lora-grpo": {"opd_coef": 0.0},
        "lora-saf-adapter": {"teacher_adapter": args.adapter, "teacher_max_tokens_per_batch": args.budget},
        "lora-saf-local": {"teacher_model_name_or_path": args.model, "teacher_max_tokens_per_batch": args.budget},
    }[case]
    with tempfile.TemporaryDirectory() as folder:
        config = SAFDistillConfig(
            folder,
            per_device_train_batch_size=4,
            num_generations=4,
            max_steps=2,
            opd_warmup_steps=0,
            teacher_self_test=False,
            max_completion_length=args.max_tokens,
            use_cpu=args.device == "cpu",
            bf16=False,
            report_to="none",
            save_strategy="no",
            disable_tqdm=True,
            model_init_kwargs={"dtype": "float32"},
            **teacher,
        )
        trainer = SAFDistillTrainer(
            args.model,
            lambda completions, **kwargs: [float(i % 2) for i in range(len(completions))],
            config,
            Dataset.from_dict({"prompt": ["Count to ten: " * 8] * 8}),
            peft_config=LoraConfig(target_modules="all-linear"),
            rollout_func=rollout,
        )
        trainer.train()
    if args.device != "cpu":
        return {"peak_mib": torch.cuda.max_memory_allocated() / 2**20}
    # every page that the process ever held; on Linux in KiB
    return {"peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, "threads": torch.get_num_threads()}


def run_case(case: str, args: argparse.Namespace) -> dict[str, Any]:
    command = [sys.executable, __file__, "--case", case]
    for name in ("model", "adapter", "server_url", "rows", "max_tokens", "budget", "repeat", "device"):
        if getattr(args, name) is not None:
            command += [f"--{name}", str(getattr(args, name))]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if done.returncode != 0:
        sys.exit(f"The case {case} failed; its output is above.")
    return json.loads(done.stdout.strip().splitlines()[-1])


def make_adapter(model: str, folder: str) -> str:
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(model)
    get_peft_model(base, LoraConfig(r=16, target_modules="all-linear")).save_pretrained(folder)
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="folder of the model, both student and teacher")
    parser.add_argument("--adapter", help="folder of an adapter of it")
    parser.add_argument("--server_url", help="`vllm serve` of the same model")
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--max_tokens", type=int, default=256, help="longest completion; the mean is a quarter")
    parser.add_argument("--budget", type=int, default=4096, help="teacher_max_tokens_per_batch")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--device", default="cpu", help="of teacher and student, e.g. cuda")
    parser.add_argument("--cases", nargs="+", choices=[*SCORING, *TRAINING], default=[*SCORING, *TRAINING])
    parser.add_argument("--output", default="benchmarks/out/teachers.json")
    parser.add_argument("--case", choices=[*SCORING, *TRAINING], help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.case:
        print(json.dumps((score if args.case in SCORING else train)(args.case, args)))
        return

    from rich.console import Console
    from rich.table import Table

    results: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as folder:
        args.adapter = args.adapter or make_adapter(args.model, folder)
        quantization = importlib.util.find_spec("bitsandbytes") is not None
        for case in args.cases:
            if case.endswith("bit") and not quantization:
                print(f"{case} is left out: it needs pip install -e '.[quantization]'", file=sys.stderr)
            elif case != "server" or args.server_url:
                print(f"{case} ...", file=sys.stderr)
                results[case] = run_case(case, args)

    table = Table("teacher", "rows/s", "spread", "seconds / local", "mean log-prob", title=f"{args.rows} rows")
    local = statistics.median(results["local"]["seconds"]) if "local" in results else float("nan")
    for case in SCORING:
        if case in results:
            seconds = results[case]["seconds"]
            table.add_row(
                case,
                f"{args.rows / statistics.median(seconds):.2f}",
                f"{args.rows / max(seconds):.2f}-{args.rows / min(seconds):.2f}",
                f"{statistics.median(seconds) / local:.2f}",
                f"{results[case]['mean']:.4f}",
            )
    memory = Table(
        "run", "peak MiB", "over LoRA-GRPO", title="LoRA student, peak memory of the process, or of the device"
    )
    for case in TRAINING:
        if case in results and "lora-grpo" in results:
            peak = results[case]["peak_mib"]
            memory.add_row(case, f"{peak:.0f}", f"{peak - results['lora-grpo']['peak_mib']:+.0f}")
    Console().print(*(made for made in (table, memory) if made.row_count))
    Path(args.output).parent.mkdir(parents=True, exist_ok=True)
    Path(args.output).write_text(json.dumps({"arguments": vars(args), "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
