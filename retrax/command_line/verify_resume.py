"""`retrax verify-resume`: does a killed and resumed run end the same, bit for bit?

It trains a configuration twice, in processes of their own: once to the end, and once
killed at random steps and started again each time. Then it compares what they left.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from retrax import storage
from retrax.command_line.parts import Comparison, compare_parts
from retrax.errors import ConfigError
from retrax.trainer.state import CHECKPOINT_NAME

__all__ = ["Verified", "run", "verify"]

Kill = tuple[int, str]
_WHEN = {"before": "before", "after": "after", "saving": "in the next save after"}
_MOMENTS = ("before", "after", "saving")


class Verified:
    """What a verification found.

    Attributes:
      parts: the comparisons, one for each part.
      kills: (step, moment) of the kills that happened; see `watched_run`.
    """

    def __init__(self, parts: list[Comparison], kills: list[Kill]) -> None:
        self.parts, self.kills = parts, kills

    @property
    def agrees(self) -> bool:
        """Whether all parts are the same."""
        return all(part.difference is None for part in self.parts)


def run(args: argparse.Namespace) -> int:
    """Verifies and prints a table; exit code 0 only if everything agrees."""
    if not args.config_file:
        raise ConfigError("give the configuration to verify: --config_file=NAME.")
    if args.steps < 2 or args.kills < 1:
        raise ConfigError(
            f"--steps must be at least 2 and --kills at least 1, got {args.steps} and "
            f"{args.kills}."
        )
    with tempfile.TemporaryDirectory(prefix="retrax-verify-") as scratch:
        verified = verify(
            Path(args.dir or scratch),
            args.config_file,
            args.config,
            args.steps,
            args.kills,
            args.seed,
            say=print,
        )
    print(_table(verified))
    return 0 if verified.agrees else 1


def verify(
    folder: Path,
    config_files: list[str],
    bindings: list[str],
    steps: int,
    n_kills: int,
    seed: int = 0,
    say: Callable[[str], Any] = lambda text: None,
) -> Verified:
    """Trains whole, and killed and resumed, in two directories in `folder`; compares.

    Args:
      folder: where the runs go; must not hold others of this kind.
      config_files: gin files, or names of ones that ship.
      bindings: gin bindings on top of them.
      steps: steps of each run.
      n_kills: how often the second run is killed.
      seed: where the steps at which it is killed come from.
      say: takes a line on what goes on.

    Raises:
      ConfigError: `folder` holds such runs already, or the configuration cannot be run.
    """
    whole, resumed = folder / "whole", folder / "resumed"
    for one in (whole, resumed):
        if one.exists():
            raise ConfigError(f"{one} is there already; choose another --dir.")
        one.mkdir(parents=True)
    kills = _kills(steps, n_kills, seed)
    bindings = [
        *bindings,
        f"train.steps = {steps}",
        # Without it a short run might have no checkpoint to resume from.
        f"CheckpointPolicy.every_steps = {max(1, steps // 8)}",
    ]
    cache = folder / "compiled"  # So that each process need not compile anew.

    def train(output_dir: Path, kill: Kill | None = None) -> bool:
        """Returns whether it was killed."""
        return _train(output_dir, config_files, bindings, cache, kill)

    train(whole)
    say(f"trained {steps} steps in one go")
    done = []
    for kill in kills:
        if train(resumed, kill):
            done.append(kill)
            say(f"killed {_WHEN[kill[1]]} step {kill[0]}")
    train(resumed)
    say(f"resumed and trained to step {steps}")
    parts = compare_parts(
        *(storage.load(f / CHECKPOINT_NAME) for f in (whole, resumed))
    )
    parts.append(_compare_data(whole, resumed))
    return Verified(parts, done)


def _kills(steps: int, n_kills: int, seed: int) -> list[Kill]:
    """Steps in order, so that each comes about, with all moments in turn."""
    rng = random.Random(seed)
    steps_of_kills = sorted(rng.randint(2, steps) for _ in range(n_kills))
    moments: list[str] = []
    while len(moments) < n_kills:
        moments += rng.sample(_MOMENTS, len(_MOMENTS))
    return list(zip(steps_of_kills, moments, strict=False))


def _train(
    output_dir: Path,
    config_files: list[str],
    bindings: list[str],
    cache: Path,
    kill: Kill | None,
) -> bool:
    spec = {
        "config_files": [str(f) for f in config_files],
        "bindings": list(bindings),
        "output_dir": str(output_dir),
        "log": str(output_dir / "batches"),
        "kill": kill,
    }
    environment = {
        "JAX_COMPILATION_CACHE_DIR": str(cache),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        **os.environ,
    }
    done = subprocess.run(
        [sys.executable, "-m", "retrax.command_line.watched_run", json.dumps(spec)],
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    if done.returncode == 0:
        return False
    if kill is not None and done.returncode == -signal.SIGKILL:
        return True
    raise ConfigError(
        f"the run in {output_dir} ended with exit code {done.returncode}:\n"
        + (done.stderr or done.stdout)[-2000:].strip()
    )


def _compare_data(whole: Path, resumed: Path) -> Comparison:
    """Compares the batches of each step, also those of steps done twice."""
    wanted: dict[int, str] = {}
    for step, digest in _batches(whole):
        wanted[step] = digest
    difference, seen = None, set()
    for step, digest in _batches(resumed):
        seen.add(step)
        if difference is None and wanted.get(step) != digest:
            difference = f"step {step}: another batch"
    missing = sorted(set(wanted) - seen)
    if difference is None and missing:
        difference = f"step {missing[0]}: not done"
    return Comparison("batches seen", len(wanted), difference)


def _batches(folder: Path) -> list[tuple[int, str]]:
    lines = (folder / "batches").read_text().splitlines()
    return [(int(step), digest) for step, digest in map(str.split, lines)]


def _table(verified: Verified) -> str:
    width = max(len(part.part) for part in verified.parts)
    lines = [f"{'part':{width}s}  leaves  agrees"]
    for part in verified.parts:
        agrees = "yes" if part.difference is None else f"NO: {part.difference}"
        lines.append(f"{part.part:{width}s}  {part.n_leaves:6d}  {agrees}")
    n = len(verified.kills)
    times = "once" if n == 1 else f"{n} times"
    lines.append(
        f"killed and resumed {times}: "
        + ("the same, bit for bit" if verified.agrees else "NOT the same")
    )
    return "\n".join(lines)
