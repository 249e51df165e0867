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
        print(f"{parser.prog}: error: {problem}", file=sys.stderr)
        return 2
    try:
        run_demo(trainer=args.trainer, steps=args.steps, seed=args.seed, output_dir=args.output_dir)
    except (DemoError, OSError) as error:
        print(f"{parser.prog}: error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
