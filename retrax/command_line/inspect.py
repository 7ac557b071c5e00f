"""`retrax inspect`: what the model of a configuration needs to be trained.

Beside `commands`, which calls `run`.
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import Any

import gin

from retrax.command_line import configs
from retrax.errors import ConfigError

__all__ = ["parsed_memory", "run"]

_UNITS = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}


def run(args: argparse.Namespace) -> int:
    """Prints the report and draws the data stack; returns the exit code."""
    memory = None if args.memory is None else parsed_memory(args.memory)
    _check_picture(args.picture)
    configs.read([args.config_name, *args.config_file], args.config)
    bound = gin.get_bindings("train")
    missing = [name for name in ("model", "inputs") if name not in bound]
    if missing:
        raise ConfigError(f"{args.config_name} binds no train.{missing[0]}.")
    from retrax import layers as tl
    from retrax import optimizers
    from retrax.trainer import inspect
    from retrax.trainer.arguments import check_arity, made_model, made_optimizer

    model = made_model(bound["model"], "train")
    loss = bound.get("loss_fn") or tl.WeightedCategoryCrossEntropy()
    batch = next(configs.inputs_of(bound).train_stream(1))
    check_arity(tl.Serial(model, loss), len(batch))
    found = inspect.report(
        model,
        batch,
        loss,
        made_optimizer(bound.get("optimizer", optimizers.Adafactor)),
        memory,
        run=not args.no_run,
        precision=bound.get("precision"),
    )
    shapes = ", ".join(f"{tuple(x.shape)} {x.dtype}" for x in batch)
    print(f"{args.config_name}, batches of {shapes}\n")
    print(found.text())
    if args.picture is not None:
        inspect.draw(found.visits, args.picture)
        print(f"\n{args.picture}: the data stack")
    return 0


def parsed_memory(text: str) -> int:
    """Returns the bytes that a text such as '16GB' or '512 MiB' means.

    Units are powers of 1024, with or without an i in them.

    Raises:
      ConfigError: it is no such text.

    Example:
      >>> parsed_memory('1.5 KiB')
      1536
    """
    match = re.fullmatch(r"\s*([\d.]+)\s*([KMGT]?)(I?B)?\s*", text.upper())
    try:
        if match is None:
            raise ValueError
        n = int(float(match[1]) * 1024 ** _UNITS[match[2]])
        if n < 1:
            raise ValueError
    except ValueError as e:
        raise ConfigError(
            f"--memory must be a size such as 16GB or 512MB, got {text!r}."
        ) from e
    return n


def _check_picture(path: Any) -> None:
    if path is not None and Path(path).suffix.lower() not in (".png", ".svg"):
        raise ConfigError(f"--picture must be a .png or a .svg file, got {path!r}.")
