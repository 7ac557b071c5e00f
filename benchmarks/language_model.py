"""Time of a language model's training step: retrax, hand-written JAX, others.

A byte-level Transformer (width 256, feed-forward 1024, 4 heads, batch 8 x 128, Adam).
All do the same work in one process, in turn, round after round; each ratio is the
median over rounds of its time to that of the fastest hand-written form in the same
round. Prints one JSON line for each question:

  peers   6 layers: forms of hand-written JAX, retrax (`StepTrainer`, and the whole
          `Trainer` loop with its log), Flax NNX, Equinox, Haiku, Keras, PyTorch (eager)
  depth   retrax at 6, 24 and 48 layers, unrolled and with scan_layers: milliseconds
          for each layer, and seconds to the end of the first step

The whole process keeps freed memory as `retrax train` does (retrax.trainer.allocator),
so all that run on JAX are faster than they are by themselves; --system-allocator
leaves that out.

usage: python benchmarks/language_model.py [peers depth] [--rounds N] [--only NAME ...]
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import io
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

os.environ.setdefault("KERAS_BACKEND", "jax")

import jax
import lm_peers
import numpy as np
from lm_peers import Shape, Step

from retrax.trainer import allocator

N_BATCHES = 16


def main() -> None:
    """Answers each question on one line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("question", nargs="*", default=["peers", "depth"])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--depths", type=int, nargs="+", default=[6, 24, 48])
    parser.add_argument("--only", nargs="+", default=list(PEERS), help="of the peers")
    parser.add_argument("--system-allocator", action="store_true")
    args = parser.parse_args()
    if not args.system_allocator:
        allocator.keep_freed_memory()
    if "peers" in args.question:
        print(json.dumps(compare_peers(args.rounds, args.only)), flush=True)
    if "depth" in args.question:
        print(json.dumps(compare_depths(args.rounds, args.depths)), flush=True)


def compare_peers(rounds: int, names: list[str]) -> dict[str, Any]:
    """Times all implementations in turn."""
    shape = Shape(6)
    ids = make_ids(shape)
    missing = [n for n in names if n in NEEDS and not _found(NEEDS[n])]
    made = {n: PEERS[n](shape, ids) for n in names if n not in missing}
    firsts = {n: timed(step, 0) for n, step in made.items()}
    times = in_turn(made, rounds)
    by_hand = [n for n in made if n.startswith("hand_written")]
    best = min(by_hand, key=lambda n: statistics.median(times[n]))
    return {
        "benchmark": "language_model peers",
        "jax": jax.__version__,
        "ms_per_step": {
            n: round(1e3 * statistics.median(t), 1) for n, t in times.items()
        },
        "fastest_hand_written": best,
        "ratio_to_fastest_hand_written": {
            n: round(_ratio(t, times[best]), 3) for n, t in times.items()
        },
        "first_step_s": {n: round(t, 1) for n, t in firsts.items()},
        "not_installed": missing,
    }


def compare_depths(rounds: int, depths: list[int]) -> dict[str, Any]:
    """Times retrax at several depths."""
    shapes = {d: Shape(d) for d in depths}
    made: dict[Any, Step] = {}
    firsts: dict[Any, float] = {}
    for name, scan in (("unrolled", False), ("scan_layers", True)):
        for depth, shape in shapes.items():
            made[name, depth] = step_trainer(shape, make_ids(shape), scan_layers=scan)
            firsts[name, depth] = timed(made[name, depth], 0)
    times = in_turn(made, rounds)
    result: dict[str, Any] = {"benchmark": "language_model depth"}
    for name in ("unrolled", "scan_layers"):
        per_layer = {d: [t / d for t in times[name, d]] for d in depths}
        result[name] = {
            "ms_per_layer": {
                d: round(1e3 * statistics.median(t), 1) for d, t in per_layer.items()
            },
            "ratio_to_fewest_layers": {
                d: round(_ratio(t, per_layer[depths[0]]), 3)
                for d, t in per_layer.items()
            },
            "first_step_s": {d: round(firsts[name, d], 1) for d in depths},
        }
    return result


def in_turn(made: dict[Any, Step], rounds: int) -> dict[Any, list[float]]:
    """Seconds of each step in each round; all have run once before."""
    times: dict[Any, list[float]] = {name: [] for name in made}
    for i in range(rounds + 1):
        for name, step in made.items():
            seconds = timed(step, i + 1)
            if i:  # The second run of a program still warms caches up.
                times[name].append(seconds)
    return times


def timed(step: Step, i: int) -> float:
    """Seconds from calling a step to having its loss."""
    start = time.perf_counter()
    float(step(i))
    return time.perf_counter() - start


def make_ids(shape: Shape) -> np.ndarray:
    """Random batches of ids (n, batch, length)."""
    rng = np.random.default_rng(0)
    size = (N_BATCHES, shape.batch, shape.length)
    return rng.integers(1, shape.n_ids, size, np.int32)


def _ratio(times: list[float], base: list[float]) -> float:
    return statistics.median(a / b for a, b in zip(times, base, strict=True))


def _found(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


# --- retrax ---------------------------------------------------------------------------


def language_model(shape: Shape, scan_layers: bool = False, mode: str = "train") -> Any:
    """The network of this benchmark; it shifts its ids to the right itself."""
    from retrax import models

    return models.TransformerLM(
        shape.n_ids,
        d_model=shape.d,
        d_ff=shape.d_ff,
        n_layers=shape.n_layers,
        n_heads=shape.n_heads,
        max_len=shape.length,
        dropout=0.0,
        mode=mode,
        scan_layers=scan_layers,
    )


def step_trainer(shape: Shape, ids: np.ndarray, scan_layers: bool = False) -> Step:
    """retrax, one step at a time."""
    from retrax import layers as tl
    from retrax import optimizers, shapes, trainer

    model = tl.Serial(language_model(shape, scan_layers), tl.CategoryCrossEntropy())
    batches = [(x, x) for x in ids]
    model.init(shapes.signature(batches[0]), rng=jax.random.key(0))
    optimizer = optimizers.Adam(lm_peers.LR, weight_decay_rate=0.0)
    stepper = trainer.StepTrainer(model, optimizer, n_devices=1)
    key = jax.random.key(1)
    return lambda i: stepper.one_step(batches[i % len(ids)], key, i + 1)[0]


def full_trainer(shape: Shape, ids: np.ndarray) -> Step:
    """retrax with all that a run has: stream, schedule, progress and log files."""
    from retrax import data, optimizers, trainer
    from retrax import layers as tl
    from retrax.supervised import lr_schedules
    from retrax.trainer.run_log import RunLog

    flat = ids.reshape(-1, shape.length)
    folder = tempfile.mkdtemp()
    made = trainer.Trainer(
        functools.partial(language_model, shape),
        tl.CategoryCrossEntropy(),
        optimizers.Adam(lm_peers.LR, weight_decay_rate=0.0),
        lr_schedules.warmup(100, lm_peers.LR),
        data.Inputs(data.ArrayStream((flat, flat), shape.batch, drop_remainder=True)),
        output_dir=folder,
        should_save_checkpoints=False,
        n_devices=1,
        log=RunLog(folder, stream=io.StringIO()),
    )

    def step(i: int) -> Any:
        made.train_epoch(1, 0)
        return 0.0

    return step


PEERS: dict[str, Callable[[Shape, np.ndarray], Step]] = {
    "hand_written": lm_peers.hand_written,
    "hand_written_two_passes": functools.partial(
        lm_peers.hand_written, norm=lm_peers.norm_two_passes
    ),
    "hand_written_barrier": functools.partial(lm_peers.hand_written, barrier=True),
    "step_trainer": step_trainer,
    "trainer": full_trainer,
    "nnx": lm_peers.nnx,
    "equinox": lm_peers.equinox,
    "haiku": lm_peers.haiku,
    "keras": lm_peers.keras,
    "torch": lm_peers.torch,
}
NEEDS = {
    "nnx": "flax",
    "equinox": "equinox",
    "haiku": "haiku",
    "keras": "keras",
    "torch": "torch",
}


if __name__ == "__main__":
    main()
