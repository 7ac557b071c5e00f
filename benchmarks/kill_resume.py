"""Kills a run many times, at random moments and while it saves; is the end the same?

A small model with dropout and BatchNorm on shuffled, prefetched data is trained whole,
and killed (SIGKILL) and started again `--kills` times: before a step, after one, or in
the middle of writing a checkpoint. Prints one JSON line: which parts of the two last
checkpoints, and the batches of all steps, agree bit for bit, and the seconds that all
took. Goal: all agree (`ratio` is 1.0).

usage: python benchmarks/kill_resume.py [--kills N] [--steps N] [--seed N]
           [--trainer trainer|loop] [--devices 1|2]
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from pathlib import Path

from retrax.command_line.verify_resume import verify

MODULE = """
import gin
from retrax import data, layers as tl

@gin.configurable
def NoisyNet(mode="train"):
    return tl.Serial(
        tl.Dense(32), tl.BatchNorm(axis=0, mode=mode), tl.Relu(),
        tl.Dropout(0.3, mode=mode), tl.Dense(10),
    )

@gin.configurable
def prefetched_digits():
    digits = data.digits(batch_size=32, flatten=True, seed=3)
    return data.Inputs(
        data.PrefetchStream(digits.train_stream(), 4), digits.eval_stream()
    )
"""

CONFIG = """
import kill_resume_parts
train.model = @NoisyNet
train.inputs = @prefetched_digits
train.loss_fn = @CategoryCrossEntropy()
train.optimizer = @optimizers.Adam
train.lr_schedule_fn = @lr_schedules.multifactor
train.eval_frequency = 25
train.eval_steps = 1
train.permanent_checkpoint_frequency = 50
train.checkpoint_highest = 'accuracy'
CheckpointPolicy.keep_last = 3
"""


def main() -> int:
    """Prints one JSON line; exit code 0 only if all agrees."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--trainer", choices=("trainer", "loop"), default="trainer")
    parser.add_argument("--devices", type=int, choices=(1, 2), default=1)
    args = parser.parse_args()
    if args.devices > 1:
        flag = f"--xla_force_host_platform_device_count={args.devices}"
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flag}".strip()
    bindings = [f"num_devices.value = {args.devices}"]
    if args.trainer == "loop":
        bindings.append("train.use_loop = True")
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        (folder / "kill_resume_parts.py").write_text(MODULE)
        (folder / "kill_resume.gin").write_text(CONFIG)
        os.chdir(folder)  # Where configurations find their modules.
        verified = verify(
            folder / "runs",
            ["kill_resume.gin"],
            bindings,
            args.steps,
            args.kills,
            args.seed,
        )
        os.chdir("/")
    agree = {part.part: part.difference is None for part in verified.parts}
    moments = [moment for _, moment in verified.kills]
    result = {
        "benchmark": "kill_resume",
        "trainer": args.trainer,
        "devices": args.devices,
        "steps": args.steps,
        "kills": {moment: moments.count(moment) for moment in sorted(set(moments))},
        "agree": agree,
        "differences": [p.difference for p in verified.parts if p.difference],
        "ratio": round(sum(agree.values()) / len(agree), 3),
        "seconds": round(time.perf_counter() - start, 1),
    }
    print(json.dumps(result))
    return 0 if verified.agrees else 1


if __name__ == "__main__":
    raise SystemExit(main())
