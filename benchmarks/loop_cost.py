"""What a Loop adds to a training step: Loop.run against StepTrainer.one_step alone.

Both train the same network (64-1024-1024-10, batch 512, Adam: steps of about 10 ms) on
the same batches in one process, in turn, round after round. The ratio is the median
over rounds of Loop's time to that of the step trainer in the same round. The Loop has
stream, schedule, progress bar, history, TensorBoard and JSONL summaries on; evaluations
and checkpoints are not counted (benchmarks/save_stall.py measures those). `callbacks`
is the same Loop with EarlyStopping and TimeLimit. `own_us_per_step` is the processor
time of a Loop whose steps do nothing, which other work on the machine disturbs less.
Prints one JSON line.

usage: python benchmarks/loop_cost.py [--rounds N] [--steps N]
"""

from __future__ import annotations

import argparse
import io
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from retrax import data, optimizers, shapes, trainer
from retrax import layers as tl
from retrax.supervised import callbacks, lr_schedules
from retrax.supervised.training import Loop, TrainTask
from retrax.trainer.run_log import RunLog

RATE, BATCH, N_BATCHES = 1e-3, 512, 16


def main() -> None:
    """Measures and prints one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--steps", type=int, default=40, help="steps in a round")
    args = parser.parse_args()
    rng = np.random.default_rng(0)
    x = rng.standard_normal((N_BATCHES * BATCH, 64), np.float32)
    y = rng.integers(0, 10, N_BATCHES * BATCH, np.int32)
    watching = [callbacks.EarlyStopping(), callbacks.TimeLimit(1e9)]
    runs = {
        "step_trainer": step_trainer(x, y),
        "loop": loop(x, y),
        "callbacks": loop(x, y, watching),
    }
    times: dict[str, list[float]] = {name: [] for name in runs}
    for run in runs.values():
        run(3)  # Compiles.
    for _ in range(args.rounds):
        for name, run in runs.items():
            start = time.perf_counter()
            run(args.steps)
            times[name].append((time.perf_counter() - start) / args.steps)
    base = times["step_trainer"]
    result = {
        "benchmark": "loop_cost",
        "jax": jax.__version__,
        "ms_per_step": {
            n: round(1e3 * statistics.median(t), 3) for n, t in times.items()
        },
        "ratio_to_step_trainer": {
            n: round(statistics.median(a / b for a, b in zip(t, base, strict=True)), 4)
            for n, t in times.items()
        },
    }
    result["own_us_per_step"] = round(own_cost(x, y), 1)
    print(json.dumps(result), flush=True)


def network() -> Any:
    """The network without its loss."""
    return tl.Serial(tl.Dense(1024), tl.Relu(), tl.Dense(1024), tl.Relu(), tl.Dense(10))


def step_trainer(x: np.ndarray, y: np.ndarray) -> Callable[[int], None]:
    """Steps on batches that lie ready, and nothing else."""
    batches = [(x[i::N_BATCHES], y[i::N_BATCHES]) for i in range(N_BATCHES)]
    batches = [(np.ascontiguousarray(a), np.ascontiguousarray(b)) for a, b in batches]
    model = tl.Serial(network(), tl.CategoryCrossEntropy())
    model.init(shapes.signature(batches[0]), rng=jax.random.key(0))
    optimizer = optimizers.Adam(RATE, weight_decay_rate=0.0)
    stepper = trainer.StepTrainer(model, optimizer, n_devices=1)
    key, done = jax.random.key(1), 0

    def run(n: int) -> None:
        nonlocal done
        loss = None
        for i in range(done, done + n):
            loss, _ = stepper.one_step(batches[i % N_BATCHES], key, i + 1, RATE)
        jax.block_until_ready(loss)
        done += n

    return run


class Idle(trainer.StepTrainer):
    """Makes one step, and then returns the same values again and again."""

    done: Any = None

    def one_step(self, *args: Any, **kwargs: Any) -> Any:
        """Returns (loss, stats) of the first step."""
        if self.done is None:
            self.done = super().one_step(*args, **kwargs)
        return self.done


class IdleLoop(Loop):
    """A Loop whose steps do nothing."""

    def make_step_trainer(self, *args: Any, **options: Any) -> Any:
        """Returns an idle step trainer."""
        return Idle(*args, **options)


def own_cost(x: np.ndarray, y: np.ndarray, n: int = 4000) -> float:
    """Processor time of a Loop itself, in microseconds per step."""
    run = loop(x[:512], y[:512], kind=IdleLoop, batch=8)
    run(10)
    start = time.process_time()
    run(n)
    return 1e6 * (time.process_time() - start) / n


def loop(
    x: np.ndarray,
    y: np.ndarray,
    watching: Any = None,
    kind: type[Loop] = Loop,
    batch: int = BATCH,
) -> Callable[[int], None]:
    """A Loop with all that a run has."""
    folder = tempfile.mkdtemp()
    made = kind(
        network(),
        TrainTask(
            data.ArrayStream((x, y), batch, drop_remainder=True),
            tl.CategoryCrossEntropy(),
            optimizers.Adam(RATE, weight_decay_rate=0.0),
            lr_schedules.warmup(100, RATE),
        ),
        eval_at=lambda step: False,
        n_devices=1,
        callbacks=watching,
        log=RunLog(folder, stream=io.StringIO(), progress="bar"),
    )

    def run(n: int) -> None:
        made.run(n)
        jax.block_until_ready(made.step_trainer.carry.weights_l2)

    return run


if __name__ == "__main__":
    main()
