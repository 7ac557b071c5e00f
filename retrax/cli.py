"""The command line: `retrax train`, `eval`, `predict`, `runs` and so on.

Top of the order: it parses arguments and configurations, calls the library and turns
errors into messages and exit codes. It holds nothing else.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Sequence
from typing import Any

__all__ = ["main"]

EXIT_USER_ERROR = 2
EXIT_NOT_SAVED = 3


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; returns the exit code.

    0: done; 2: a mistake in arguments, configuration or data; 3: trained to the end,
    but not all checkpoints could be written; 130, 143: interrupted by Ctrl-C or SIGTERM
    with the run saved; 1: a failure that is no user's mistake, with its traceback, or
    two runs that differ.
    """
    parser = _parser()
    args = parser.parse_args(argv)
    if args.command is None:
        parser.print_help()
        return EXIT_USER_ERROR
    logging.basicConfig(format="%(levelname)s: %(message)s")
    # So that a configuration can import modules that stand beside the run.
    if not {"", os.getcwd()} & set(sys.path):
        sys.path.insert(0, os.getcwd())
    from retrax.command_line import commands

    code = _run(commands, args)
    if code:
        commands.leave(code)
    return code


def _run(commands: Any, args: argparse.Namespace) -> int:
    """Runs a command, and turns errors into messages and exit codes."""
    if args.debug:
        return commands.run(args)
    try:
        return commands.run(args)
    except commands.INTERRUPTED as e:
        print(f"\n{str(e).splitlines()[0]}", file=sys.stderr)  # Below it gin's own.
        return e.exit_code
    except KeyboardInterrupt:
        print("\nInterrupted.", file=sys.stderr)
        return 130
    except commands.NOT_SAVED as e:
        print(f"\nretrax {args.command}: {commands.message(e)}", file=sys.stderr)
        return EXIT_NOT_SAVED
    except commands.USER_ERRORS as e:
        print(f"\nretrax {args.command}: {commands.message(e)}", file=sys.stderr)
        print("(--debug shows where this was raised.)", file=sys.stderr)
        return EXIT_USER_ERROR


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="retrax", description="Train deep networks from composable layers."
    )
    commands = parser.add_subparsers(dest="command", metavar="command")
    train = commands.add_parser("train", help="train what a configuration says")
    _add_config_flags(train)
    train.add_argument(
        "--output_dir", help="directory for checkpoints and logs; without it none"
    )
    _add_host_flags(train)
    evaluate = commands.add_parser("eval", help="evaluate a trained run")
    evaluate.add_argument("dir", help="the run's output directory")
    evaluate.add_argument("--checkpoint", help="file to use instead of model.pkl")
    evaluate.add_argument(
        "--n_batches", type=int, help="batches to evaluate on; by default all"
    )
    _add_config_flags(evaluate)
    predict = commands.add_parser("predict", help="sample from a trained run")
    _add_predict_flags(predict)
    _add_inspect_flags(
        commands.add_parser("inspect", help="show what a model needs to be trained")
    )
    _add_comparing(commands)
    _add_launch(commands)
    commands.add_parser("configs", help="list the configurations that ship")
    commands.add_parser("doctor", help="show versions, devices, memory")
    for command in commands.choices.values():
        command.add_argument(
            "--debug", action="store_true", help="show tracebacks of all errors"
        )
    return parser


def _add_comparing(commands: Any) -> None:
    """Adds the commands that look at runs, and at several of them."""
    runs = commands.add_parser("runs", help="list runs: steps, metrics, how they ended")
    runs.add_argument("dir", help="a directory with runs in or below it")
    plot = commands.add_parser("plot", help="draw curves of several runs in a picture")
    plot.add_argument(
        "dirs", nargs="+", metavar="dir", help="runs, or directories of them"
    )
    plot.add_argument(
        "--output", default="runs.png", help="PNG file (default runs.png)"
    )
    plot.add_argument(
        "--metric", action="append", help="a metric to show; may be repeated"
    )
    compare = commands.add_parser("compare", help="say where two runs part")
    compare.add_argument("run_a", help="output directory of one run")
    compare.add_argument("run_b", help="output directory of the other")
    verify = commands.add_parser(
        "verify-resume", help="train whole, and killed and resumed; compare bit for bit"
    )
    _add_config_flags(verify)
    verify.add_argument(
        "--steps", type=int, default=40, help="steps of each run (default 40)"
    )
    verify.add_argument(
        "--kills", type=int, default=3, help="how often one is killed (default 3)"
    )
    verify.add_argument(
        "--seed", type=int, default=0, help="another one, other steps (default 0)"
    )
    verify.add_argument("--dir", help="keep the two runs here; by default nowhere")


def _add_host_flags(parser: argparse.ArgumentParser) -> None:
    hosts = parser.add_argument_group(
        "several processes", "each is started by itself; also by JAX_... or SLURM"
    )
    hosts.add_argument(
        "--coordinator", metavar="HOST:PORT", help="of process 0, reachable from all"
    )
    hosts.add_argument("--num_processes", type=int, help="how many train together")
    hosts.add_argument("--process_id", type=int, help="number of this one, from 0")
    hosts.add_argument(
        "--connect_timeout",
        type=float,
        default=60.0,
        help="seconds in which all have to come (default 60)",
    )


def _add_launch(commands: Any) -> None:
    launch = commands.add_parser(
        "launch", help="start a command in several processes on this machine"
    )
    launch.add_argument(
        "-n", "--num_processes", type=int, default=2, help="how many (default 2)"
    )
    launch.add_argument(
        "--devices", type=int, help="CPU devices of each process (default 1)"
    )
    launch.add_argument(
        "rest",
        nargs=argparse.REMAINDER,
        metavar="-- command",
        help="such as: -- train --config_file=digits_mlp.gin --output_dir=run",
    )


def _add_predict_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("dir", help="the run's output directory")
    parser.add_argument("--checkpoint", help="file to use instead of model.pkl")
    prompts = parser.add_mutually_exclusive_group()
    prompts.add_argument(
        "--prompt", default="", help="text that the sample goes on from; or ids: '3 4'"
    )
    prompts.add_argument("--prompt_file", help="file with one prompt on each line")
    parser.add_argument(
        "--length",
        type=int,
        help="new tokens at most (default 200, or as many as the model can keep)",
    )
    parser.add_argument(
        "--temperature",
        type=float,
        default=1.0,
        help="0 for the most probable token each time (default 1)",
    )
    parser.add_argument("--top_k", type=int, help="choose among this many tokens")
    parser.add_argument(
        "--top_p", type=float, help="choose among tokens of this probability together"
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="another one, another sample (default 0)"
    )
    _add_config_flags(parser)


def _add_inspect_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "config_name",
        metavar="config",
        help="gin file: a path, or the name of one that ships",
    )
    parser.add_argument(
        "--memory", help="what there is, such as 16GB; by default this machine's"
    )
    parser.add_argument("--picture", help="PNG or SVG file for the data stack")
    parser.add_argument(
        "--no_run", action="store_true", help="only compile: no times, no errors"
    )
    _add_config_flags(parser)


def _add_config_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--config_file",
        action="append",
        default=[],
        help="gin file: a path, or the name of one that ships; may be repeated",
    )
    parser.add_argument(
        "--config",
        action="append",
        default=[],
        help="gin binding such as 'train.steps = 100'; may be repeated",
    )


if __name__ == "__main__":
    sys.exit(main())
