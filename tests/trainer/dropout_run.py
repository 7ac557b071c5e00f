"""A small training run with dropout and shuffled data, in a process of its own.

Usage: dropout_run.py OUTPUT_DIR STEPS [--stop-at STEP] [--kill WHAT:STEP]

Each step appends its number to OUTPUT_DIR/progress. With --stop-at the run waits for a
line on stdin in that step, while it is not finished yet. With --kill the process kills
itself (SIGKILL) at that step: WHAT is 'evaluate' or 'save', when that begins.
"""

import argparse
import os
import signal
import sys
from pathlib import Path

import jax
from absl import logging

from retrax import data, optimizers
from retrax import layers as tl
from retrax.supervised import trainer_lib
from retrax.trainer import Interrupted, Trainer


def model(mode):
    return tl.Serial(
        tl.Dense(16),
        tl.BatchNorm(axis=0, mode=mode),
        tl.Relu(),
        tl.Dropout(0.3, mode=mode),
        tl.Dense(10),
    )


def schedule():
    return lambda step: 0.01 / (1 + 0.1 * step)


class Watched(Trainer):
    """Says where it is, and stops or dies there if asked."""

    arguments: argparse.Namespace

    def __init__(self, *args, **kwargs):
        super().__init__(*args, should_write_summaries=False, **kwargs)

    def train_step(self, batch):
        if self.step + 1 == self.arguments.stop_at:
            with open(self.arguments.output_dir / "stopped", "w"):
                pass
            sys.stdin.readline()
        super().train_step(batch)
        with open(self.arguments.output_dir / "progress", "a") as file:
            file.write(f"{self.step}\n")

    def evaluate(self, n_eval_steps):
        self.die_at("evaluate")
        super().evaluate(n_eval_steps)

    def save_state(self, keep, prefix="model"):
        self.die_at("save")
        super().save_state(keep, prefix)

    def die_at(self, what):
        if self.arguments.kill == f"{what}:{self.step}":
            os.kill(os.getpid(), signal.SIGKILL)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("output_dir", type=Path)
    parser.add_argument("steps", type=int)
    parser.add_argument("--stop-at", type=int)
    parser.add_argument("--kill")
    Watched.arguments = arguments = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    logging.set_verbosity(logging.ERROR)
    try:
        trainer_lib.train(
            arguments.output_dir,
            model=model,
            loss_fn=tl.CategoryCrossEntropy(),
            inputs=data.digits(batch_size=64, flatten=True, seed=3),
            optimizer=optimizers.Adam,
            lr_schedule_fn=schedule,
            trainer_class=Watched,
            steps=arguments.steps,
            eval_frequency=10,
            eval_steps=1,
            permanent_checkpoint_frequency=20,
            random_seed=7,
            checkpoint_highest="accuracy",
        )
    except Interrupted as e:
        print(e, file=sys.stderr)
        return e.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
