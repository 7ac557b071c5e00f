"""How long saving holds up training, and how fast the bytes reach the disk.

Saves the state of a model with Adam (400 MB by default) in the midst of training:
waiting for it, and in the background. Writing is compared with copying the same file
and hashing it. Prints one JSON line. Goals: training stands still for at most 0.1 of a
write that is waited for (`stall_ratio`), and writing takes at most 1.2 of copying and
hashing (`write_ratio`).

`stall` is the time until the step after the save can begin. `slower_steps` is what the
steps during the write took beyond their usual time: the writer needs a processor, too.

usage: python benchmarks/save_stall.py [--megabytes N] [--rounds N] [--folder DIR]
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np

from retrax import layers as tl
from retrax import optimizers, shapes, storage
from retrax.trainer import StepTrainer
from retrax.trainer.checkpointer import Checkpointer
from retrax.trainer.state import step_trainer_payload

WIDTH = 1024


def make_trainer(megabytes: int) -> tuple[StepTrainer, tuple[Any, ...]]:
    """Makes a trainer whose weights and slots take so much, and a batch for it."""
    n_layers = max(1, round(megabytes * 1e6 / (3 * 4 * WIDTH**2)))
    model = tl.Serial([tl.Dense(WIDTH) for _ in range(n_layers)])
    with_loss = tl.Serial(model, tl.L2Loss())
    x = np.ones((4, WIDTH), np.float32)
    batch = (x, x, np.ones_like(x))
    with_loss.init(shapes.signature(batch), rng=jax.random.key(0))
    return StepTrainer(with_loss, optimizers.Adam(1e-4), n_devices=1), batch


class Run:
    """Steps and saves, with their times."""

    def __init__(self, megabytes: int, folder: Path) -> None:
        self.trainer, self.batch = make_trainer(megabytes)
        self.checkpointer = Checkpointer(folder)
        self.step = 0

    def train(self) -> float:
        """Returns the seconds of one step."""
        start = time.perf_counter()
        self.step += 1
        self.trainer.one_step(self.batch, jax.random.key(0), self.step)
        jax.block_until_ready(self.trainer.carry)
        return time.perf_counter() - start

    def payload(self) -> dict[str, Any]:
        found = step_trainer_payload(self.trainer, on_host=False)
        return {"kind": "run", "step": self.step, "history": {}, **found}

    def save(self, wait: bool) -> float:
        """Returns how long the call took."""
        start = time.perf_counter()
        self.checkpointer.save(self.payload(), keep=False, wait=wait)
        return time.perf_counter() - start


def copy_and_hash(path: Path) -> float:
    """Returns the seconds of copying a file to the disk, and hashing it."""
    copy = path.with_name("copy")
    start = time.perf_counter()
    shutil.copyfile(path, copy)
    with open(copy, "rb+") as file:
        os.fsync(file.fileno())
        hashlib.file_digest(file, "sha256")
    seconds = time.perf_counter() - start
    copy.unlink()
    return seconds


def measure(megabytes: int, rounds: int, folder: Path) -> dict[str, Any]:
    """Measures all in turn, so that a machine that slows down slows all of them."""
    run = Run(megabytes, folder)
    for _ in range(3):
        run.train()
    first = run.save(wait=False)
    run.checkpointer.wait()
    payload = storage.load(folder / "model.pkl")
    times: dict[str, list[float]] = {}

    def note(name: str, seconds: float) -> None:
        times.setdefault(name, []).append(seconds)

    for _ in range(rounds):
        usual = statistics.median(run.train() for _ in range(5))
        note("step", usual)
        note("waited_for", run.save(wait=True))
        run.train()
        note("stall", run.save(wait=False))
        start, slower = time.perf_counter(), 0.0
        while run.checkpointer.is_writing:
            slower += run.train() - usual
        note("background", time.perf_counter() - start)
        note("slower_steps", slower)
        start = time.perf_counter()
        storage.save(folder / "other.pkl", payload, keep_previous=False)
        note("write", time.perf_counter() - start)
        note("copy_and_hash", copy_and_hash(folder / "other.pkl"))
    seconds = {n: round(statistics.median(t), 4) for n, t in times.items()}
    size = (folder / "model.pkl").stat().st_size
    return {
        "benchmark": "save_stall",
        "device": jax.devices()[0].platform,
        "megabytes": round(size / 1e6, 1),
        "seconds": {**seconds, "first_stall": round(first, 4)},
        "stall_ratio": _ratio(times["stall"], times["waited_for"]),
        "write_ratio": _ratio(times["write"], times["copy_and_hash"]),
    }


def _ratio(times: list[float], to: list[float]) -> float:
    """Median of the ratios of the rounds."""
    ratios = [a / b for a, b in zip(times, to, strict=True)]
    return round(statistics.median(ratios), 3)


def main() -> None:
    """Prints one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, default=400)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", help="on the disk to measure; by default temporary")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        print(json.dumps(measure(args.megabytes, args.rounds, Path(folder))))


if __name__ == "__main__":
    main()
