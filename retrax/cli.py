"""The command line: `retrax train | eval | predict | configs | doctor`.

Top of the order: it parses arguments and configurations, calls the library and turns
errors into messages and exit codes. It holds nothing else.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Sequence

__all__ = ["main"]

EXIT_USER_ERROR = 2


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; returns the exit code.

    0: done; 2: a mistake in arguments, configuration or data; 130, 143: interrupted by
    Ctrl-C or SIGTERM with the run saved; 1: a failure that is no user's mistake, with
    its traceback.
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
    evaluate = commands.add_parser("eval", help="evaluate a trained run")
    evaluate.add_argument("dir", help="the run's output directory")
    evaluate.add_argument("--checkpoint", help="file to use instead of model.pkl")
    evaluate.add_argument(
        "--n_batches", type=int, help="batches to evaluate on; by default all"
    )
    _add_config_flags(evaluate)
    predict = commands.add_parser("predict", help="sample from a trained run")
    _add_predict_flags(predict)
    configs = commands.add_parser("configs", help="list the configurations that ship")
    doctor = commands.add_parser("doctor", help="show versions, devices, memory")
    for command in (train, evaluate, predict, configs, doctor):
        command.add_argument(
            "--debug", action="store_true", help="show tracebacks of all errors"
        )
    return parser


def _add_predict_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("dir", help="the run's output directory")
    parser.add_argument("--checkpoint", help="file to use instead of model.pkl")
    prompts = parser.add_mutually_exclusive_group()
    prompts.add_argument(
        "--prompt", default="", help="text that the sample goes on from; or ids: '3 4'"
    )
    prompts.add_argument("--prompt_file", help="file with one prompt on each line")
    parser.add_argument(
        "--length", type=int, default=200, help="new tokens at most (default 200)"
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
