"""The command `trl-softgate`. Imports nothing heavy until a subcommand runs."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from . import __version__

_PROGRAM = "trl-softgate"
_MAX_SEED = 2**32 - 1


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are one sentence, without the usage text above it."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code: 0, 1 (the command failed), 2 (bad arguments), 130 (Ctrl-C).

    Args:
        argv: Arguments without the program's name; default `sys.argv[1:]`.
    """
    parser = _Parser(prog=_PROGRAM, description="GSPO, SAPO and SAF distillation trainers on top of TRL.")
    parser.add_argument("--version", action="version", version=f"{_PROGRAM} {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND", title="commands")
    _add_demo(commands)
    _add_report(commands)
    _add_drift(commands)
    _add_env(commands)
    _add_recipes(commands)
    _add_merge(commands)
    try:
        args = parser.parse_args(argv)
    except SystemExit as stop:
        # argparse exits by itself, also after --help; callers of main() get the code instead.
        return int(stop.code or 0)
    try:
        return args.run(args)
    except KeyboardInterrupt:
        print(f"\n{_PROGRAM} {args.command}: stopped", file=sys.stderr)
        return 130


def _fail(parser: _Parser, problem: object, code: int) -> int:
    """Say in one sentence why a command ends, and give its exit code."""
    print(f"{parser.prog}: error: {problem}", file=sys.stderr)
    return code


def _add_demo(commands: argparse._SubParsersAction[_Parser]) -> None:
    from .demo import DEFAULT_STEPS, TRAINERS

    parser = commands.add_parser(
        "demo",
        help="train a tiny student on a generated task, on CPU, in a few minutes",
        description="Build a tiny student and a stronger teacher on 4-digit addition (first use, then cached), train "
        "the student with one of the trainers, and report held-out accuracy before and after. No download, no GPU.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--trainer", default="saf", metavar="{" + ",".join(TRAINERS) + "}", help="which trainer")
    parser.add_argument("--steps", type=int, default=DEFAULT_STEPS, help="optimizer steps, at least 2")
    parser.add_argument("--seed", type=int, default=0, help="seed of the models, the data and the sampling")
    parser.add_argument("--output-dir", type=Path, default=Path("runs/demo"), help="where results go")
    parser.set_defaults(run=_demo, parser=parser)


def _demo(args: argparse.Namespace) -> int:
    from .demo import TRAINERS, DemoError, run_demo

    parser: _Parser = args.parser
    problem = None
    if args.trainer not in TRAINERS:
        problem = f"--trainer must be one of {', '.join(TRAINERS)}, got {args.trainer!r}."
    elif args.steps < 2:
        problem = f"--steps must be at least 2, got {args.steps}."
    elif not 0 <= args.seed <= _MAX_SEED:
        problem = f"--seed must be between 0 and {_MAX_SEED}, got {args.seed}."
    elif any(path.exists() and not path.is_dir() for path in (args.output_dir, *args.output_dir.parents)):
        problem = f"--output-dir must be a folder, but {args.output_dir} is, or lies under, a file."
    if problem is not None:
        return _fail(parser, problem, 2)
    try:
        run_demo(trainer=args.trainer, steps=args.steps, seed=args.seed, output_dir=args.output_dir)
    except (DemoError, OSError) as error:
        return _fail(parser, error, 1)
    return 0


def _add_report(commands: argparse._SubParsersAction[_Parser]) -> None:
    parser = commands.add_parser(
        "report",
        help="write one HTML file about one or several runs",
        description="Write one self-contained HTML file about one or several runs, side by side: figures, health, "
        "tokens, sample completions, settings. Reads what the trainers record, or what TRL leaves in the folder of "
        "any run; a run may still be going on. Needs pip install 'trl-softgate[report]'.",
    )
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN", help="output folder of a run")
    parser.add_argument(
        "-o", "--output", type=Path, default=Path("report.html"), help="the HTML file (default: %(default)s)"
    )
    parser.add_argument(
        "--figures", type=Path, metavar="DIR", help="also write each figure as PNG and SVG into this folder"
    )
    parser.set_defaults(run=_report, parser=parser)


def _report(args: argparse.Namespace) -> int:
    from .diagnostics.report import ReportError, write_report

    parser: _Parser = args.parser
    problem = None
    if args.output.is_dir():
        problem = f"--output must be a file, but {args.output} is a folder."
    elif args.figures is not None and args.figures.exists() and not args.figures.is_dir():
        problem = f"--figures must be a folder, but {args.figures} is a file."
    if problem is not None:
        return _fail(parser, problem, 2)
    try:
        warnings = write_report(args.runs, args.output, args.figures)
    except (ReportError, OSError) as error:
        return _fail(parser, error, 1)
    for warning in warnings:
        print(f"{parser.prog}: warning: {warning}", file=sys.stderr)
    print(args.output)
    return 0


def _add_drift(commands: argparse._SubParsersAction[_Parser]) -> None:
    parser = commands.add_parser(
        "drift",
        help="how far, and in which directions, training has moved the weights",
        description="Compare the weights of a checkpoint with those that training began with, by layer: norm of the "
        "update, relative to the weights', its stable rank, and, given another run's checkpoint, how much the "
        "directions of both updates overlap (0 to 1). Reads safetensors: whole models, and LoRA adapters of BASE.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("base", type=Path, metavar="BASE", help="folder of the model that training began with")
    parser.add_argument("checkpoint", type=Path, metavar="CHECKPOINT", help="folder of a model or adapter")
    parser.add_argument("other", type=Path, metavar="OTHER_CHECKPOINT", nargs="?", help="the same of another run")
    parser.add_argument("--top-k", type=int, default=16, help="directions to compare two runs by, at least 1")
    parser.add_argument("--device", default="cpu", help="where to compute, e.g. cuda")
    parser.add_argument("--output", type=Path, metavar="FILE.json", help="also write every matrix to this file")
    parser.set_defaults(run=_drift, parser=parser)


def _drift(args: argparse.Namespace) -> int:
    from rich.console import Console

    from .diagnostics.drift import DriftError, drift_table, weight_drift, write_drift

    parser: _Parser = args.parser
    problem = None
    if args.top_k < 1:
        problem = f"--top-k must be at least 1, got {args.top_k}."
    elif args.output is not None and (args.output.is_dir() or not args.output.parent.is_dir()):
        problem = f"--output must be a file in a folder that exists, got {args.output}."
    if problem is not None:
        return _fail(parser, problem, 2)
    try:
        drift = weight_drift(
            args.base,
            args.checkpoint,
            args.other,
            top_k=args.top_k,
            device=args.device,
            console=Console(stderr=True),
        )
        if args.output is not None:
            write_drift(drift, args.output)
    except (DriftError, OSError) as error:
        return _fail(parser, error, 1)
    console = Console()
    console.print(drift_table(drift))
    if drift.left_out:
        console.print(f"Left out, as only one folder has them: {', '.join(drift.left_out)}.", markup=False)
    return 0


def _add_env(commands: argparse._SubParsersAction[_Parser]) -> None:
    parser = commands.add_parser(
        "env",
        help="what is installed and works here, and what fits on a GPU",
        description="Print versions, devices, and whether vLLM, DeepSpeed, bitsandbytes, flash attention work here; "
        "with --model, instead an estimate of the memory of each way to train it, from its config.json alone.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--model", metavar="NAME_OR_FOLDER", help="the student; its code is not run")
    parser.add_argument(
        "--teacher", metavar="NAME_OR_FOLDER", help="a local teacher; as large as the student if unset"
    )
    parser.add_argument("--gpu-memory", type=float, default=24.0, metavar="GB", help="memory of a GPU, above 0")
    parser.add_argument("--gpus", type=int, default=1, help="number of GPUs, at least 1")
    parser.add_argument("--tokens", type=int, default=8192, help="tokens of a micro-batch on a GPU, at least 1")
    parser.add_argument("--lora-rank", type=int, default=16, help="rank of the adapters, at least 1")
    parser.add_argument("--explain", action="store_true", help="show the arithmetic of every setup")
    parser.set_defaults(run=_env, parser=parser)


def _env(args: argparse.Namespace) -> int:
    parser: _Parser = args.parser
    problem = None
    if args.model is None and (args.teacher is not None or args.explain):
        problem = "--teacher and --explain need --model."
    elif not 0 < args.gpu_memory < float("inf"):
        problem = f"--gpu-memory must be above 0, got {args.gpu_memory}."
    for option in ("gpus", "tokens", "lora_rank"):
        if problem is None and getattr(args, option) < 1:
            problem = f"--{option.replace('_', '-')} must be at least 1, got {getattr(args, option)}."
    if problem is not None:
        return _fail(parser, problem, 2)

    from rich.console import Console

    from .environment import EnvironmentProblem, model_size, print_environment, print_estimates

    console = Console()
    if args.model is None:
        print_environment(console)
        return 0
    try:
        student = model_size(args.model, args.lora_rank)
        teacher = None if args.teacher is None else model_size(args.teacher, args.lora_rank)
    except EnvironmentProblem as error:
        return _fail(parser, error, 1)
    print_estimates(
        console,
        student,
        gpu_memory=args.gpu_memory,
        gpus=args.gpus,
        tokens=args.tokens,
        local_teacher=teacher,
        explain=args.explain,
    )
    return 0


def _add_recipes(commands: argparse._SubParsersAction[_Parser]) -> None:
    parser = commands.add_parser(
        "recipes",
        help="the recipes of the repository, with model, method, hardware and memory",
        description="List the YAML files in recipes/configs with model, method, hardware and estimated memory; the "
        "first line of a file launches it. For a clone of the repository.",
    )
    parser.add_argument(
        "--dir", type=Path, default=Path("recipes/configs"), help="folder of the files (default: %(default)s)"
    )
    parser.add_argument("--model", metavar="NAME", help="only recipes that train this model")
    parser.set_defaults(run=_recipes, parser=parser)


def _recipes(args: argparse.Namespace) -> int:
    from rich.console import Console

    from .recipes import RecipeProblem, read_recipes, recipe_table

    try:
        recipes = read_recipes(args.dir, args.model)
    except (RecipeProblem, OSError) as error:
        return _fail(args.parser, error, 1)
    Console().print(recipe_table(recipes))
    return 0


def _add_merge(commands: argparse._SubParsersAction[_Parser]) -> None:
    parser = commands.add_parser(
        "merge",
        help="make a model of a trained LoRA adapter and its base",
        description="Add a LoRA adapter to its base model, unquantized also for QLoRA, and save the sum as a model "
        "folder: safetensors, tokenizer and card.",
    )
    parser.add_argument("adapter", type=Path, metavar="ADAPTER", help="folder of the adapter")
    parser.add_argument("output", type=Path, metavar="OUTPUT", help="new folder for the model")
    parser.add_argument("--base", metavar="NAME_OR_FOLDER", help="the base model, if it is not where it was")
    parser.add_argument(
        "--dtype",
        default="auto",
        metavar="{auto,bfloat16,float16,float32}",
        help="of the weights (default: the base's)",
    )
    parser.set_defaults(run=_merge, parser=parser)


def _merge(args: argparse.Namespace) -> int:
    from .export import DTYPES, ExportError, merge_adapter

    if args.dtype not in DTYPES:
        return _fail(args.parser, f"--dtype must be one of {', '.join(DTYPES)}, got {args.dtype!r}.", 2)
    try:
        print(merge_adapter(args.adapter, args.output, base=args.base, dtype=args.dtype))
    except (ExportError, OSError) as error:
        return _fail(args.parser, error, 1)
    return 0


if __name__ == "__main__":
    sys.exit(main())
