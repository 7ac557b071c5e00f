"""A training run, in a process of its own, that notes its data and may be killed.

`retrax verify-resume` starts it: python -m retrax.command_line.watched_run SPEC, where
SPEC is JSON with config_files, bindings, output_dir, log (a file that gets a line
'step sha256' for each batch), and kill ([step, moment], or null). Moments are 'before'
and 'after' the step, and 'saving': in the next writing of a checkpoint.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from retrax import trainer as trainers

__all__ = ["main", "watch_steps"]


def watch_steps(
    before: Callable[[int, Any], None], after: Callable[[int], None]
) -> None:
    """Calls `before(step, batch)` and `after(step)` around every step in this process.

    All step trainers are watched, whichever kind of run holds them. There is no way
    back: it is for processes that do one run.
    """
    kinds = [getattr(trainers, name) for name in trainers.__all__]
    for kind in kinds:
        if isinstance(kind, type) and "one_step" in vars(kind):
            _watch(kind, before, after)


def _watch(kind: Any, before: Any, after: Any) -> None:
    one_step = kind.one_step

    def watched(self: Any, batch: Any, rng: Any, step: Any = None, *rest: Any) -> Any:
        number = -1 if step is None else int(step)
        before(number, batch)
        result = one_step(self, batch, rng, step, *rest)
        after(number)
        return result

    kind.one_step = watched


def batch_digest(batch: Any) -> str:
    """Returns the sha256 of all arrays of a batch."""
    digest = hashlib.sha256()
    for leaf in jax.tree.leaves(batch):
        array = np.asarray(leaf)
        digest.update(f"{array.dtype}{array.shape}".encode() + array.tobytes())
    return digest.hexdigest()


def main(argv: list[str]) -> int:
    """Runs what the JSON text in argv[1] says; returns the exit code."""
    spec = json.loads(argv[1])
    kill_step, moment = spec["kill"] or (None, None)
    log = os.open(spec["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def die() -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def before(step: int, batch: Any) -> None:
        os.write(log, f"{step} {batch_digest(batch)}\n".encode())
        if step == kill_step and moment == "before":
            die()

    def after(step: int) -> None:
        if step == kill_step and moment == "after":
            die()
        if step == kill_step and moment == "saving":
            # Called when a file is written and not yet at its place.
            os.fsync = lambda descriptor: die()

    from retrax.command_line import commands, configs
    from retrax.supervised import trainer_lib

    try:
        configs.read(spec["config_files"], spec["bindings"])
        watch_steps(before, after)
        trainer_lib.train(output_dir=spec["output_dir"])
    except commands.USER_ERRORS as e:
        print(commands.message(e), file=sys.stderr)
        return 2
    finally:
        os.close(log)
    return 0


if __name__ == "__main__":
    if not {"", os.getcwd()} & set(sys.path):
        sys.path.insert(0, os.getcwd())  # As the command line does.
    sys.exit(main(sys.argv))
