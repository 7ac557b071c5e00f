"""What training on several devices costs beyond the computation.

* `mesh_of_one`: a step over a mesh of one device (shard_map) against plain jit on that
  device, in turn in one process; the goal is at most 1.05.
* `reads`: reading all weights after a step, from 4 devices against from 1. Results lie
  whole on each device, so nothing is gathered and the ratio stays near 1; with
  sharding='fsdp' they must be.
* `step_ms`: the same global batch on 1, 2 and 4 devices, with weights whole and cut.
  CPU devices share the cores, so this shows overhead, not speed.

The last two run in a process of their own with 4 CPU devices. The network is
64-1024-1024-10 with Adam at batch 512. Prints one JSON line.

usage: python benchmarks/scaling.py [--rounds N] [--steps N]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from retrax import layers as tl
from retrax import optimizers, shapes, trainer

BATCH = 512


def main() -> None:
    """Measures and prints one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--steps", type=int, default=20, help="steps in a round")
    parser.add_argument("--several", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.several:
        print(json.dumps(several(args.rounds, args.steps)), flush=True)
        return
    result: dict[str, Any] = {"benchmark": "scaling", "jax": jax.__version__}
    result |= mesh_of_one(args.rounds, args.steps)
    flags = "--xla_force_host_platform_device_count=4"
    done = subprocess.run(
        [sys.executable, __file__, "--several", f"--rounds={args.rounds}"],
        env={**os.environ, "XLA_FLAGS": flags},
        check=True,
        stdout=subprocess.PIPE,
        timeout=600,
    )
    print(json.dumps(result | json.loads(done.stdout.splitlines()[-1])), flush=True)


def made(**options: Any) -> trainer.StepTrainer:
    """A step trainer of its own network."""
    model = tl.Serial(
        tl.Dense(1024),
        tl.Relu(),
        tl.Dense(1024),
        tl.Relu(),
        tl.Dense(10),
        tl.CategoryCrossEntropy(),
    )
    model.init(shapes.signature(batch()), rng=jax.random.key(0))
    return trainer.StepTrainer(model, optimizers.Adam(1e-3), **options)


def batch() -> tuple[np.ndarray, np.ndarray]:
    """(inputs, labels)."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((BATCH, 64), np.float32)
    return x, rng.integers(0, 10, BATCH, np.int32)


def steps_of(stepper: trainer.StepTrainer) -> Callable[[int], None]:
    """Makes a function that trains for n steps and waits for the last."""
    xs, key = batch(), jax.random.key(1)

    def run(n: int) -> None:
        for _ in range(n):
            loss, _ = stepper.one_step(xs, key)
        jax.block_until_ready(loss)

    return run


def in_turn(
    runs: dict[str, Callable[[int], None]], rounds: int, n: int
) -> dict[str, list[float]]:
    """Seconds per call of each, round after round."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for run in runs.values():
        run(2)  # Compiles.
    for _ in range(rounds):
        for name, run in runs.items():
            start = time.perf_counter()
            run(n)
            times[name].append((time.perf_counter() - start) / n)
    return times


def ratio(times: list[float], base: list[float]) -> float:
    """Median over rounds of the ratio in each."""
    pairs = zip(times, base, strict=True)
    return round(statistics.median(a / b for a, b in pairs), 4)


def mesh_of_one(rounds: int, n: int) -> dict[str, Any]:
    """A mesh of one device against jit."""
    runs = {
        "jit": steps_of(made(n_devices=1)),
        "mesh": steps_of(made(n_devices=1, backend="shard_map")),
    }
    times = in_turn(runs, rounds, n)
    return {
        "jit_ms": round(1e3 * statistics.median(times["jit"]), 3),
        "mesh_of_one": ratio(times["mesh"], times["jit"]),
    }


def several(rounds: int, n: int) -> dict[str, Any]:
    """Reads and steps on 1, 2 and 4 devices."""
    trainers = {
        "1": made(n_devices=1),
        "2": made(n_devices=2),
        "4": made(n_devices=4),
        "4 fsdp": made(n_devices=4, sharding="fsdp"),
    }
    steps = in_turn({k: steps_of(t) for k, t in trainers.items()}, rounds, n)

    def reading(stepper: trainer.StepTrainer) -> Callable[[int], None]:
        def run(n: int) -> None:
            for _ in range(n):
                jax.block_until_ready(stepper.weights)

        return run

    reads = in_turn({k: reading(t) for k, t in trainers.items()}, rounds, n)
    return {
        "reads": {k: ratio(t, reads["1"]) for k, t in reads.items()},
        "step_ms": {k: round(1e3 * statistics.median(t), 2) for k, t in steps.items()},
    }


if __name__ == "__main__":
    main()
