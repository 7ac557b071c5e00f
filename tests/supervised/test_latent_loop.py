"""Latent thoughts in a Loop: random ones, with dropout, in bfloat16, and resumed."""

import functools

import jax
import numpy as np

from retrax import models, optimizers
from retrax.data.sudoku import SudokuDataset, generate
from retrax.supervised.curriculum import LatentTrainTask
from retrax.supervised.latent_config import LatentConfig
from retrax.supervised.latent_layers import latent_model
from retrax.supervised.training import Loop

COMPILES_QUICKLY = True

K = 2
CONFIG = LatentConfig(
    mode="depth", noise=True, n_draws=2, leak_weight=0.2, supervise_first=True
)
PUZZLES = generate(12, box=2, n_clues=(5, 7), seed=1)


def loop(output_dir, precision):
    lm = functools.partial(
        models.LatentTransformerLM,
        4,
        K,
        d_model=8,
        d_ff=8,
        n_layers=1,
        n_heads=2,
        dropout=0.2,
        noise_head=True,
    )
    task = LatentTrainTask(
        SudokuDataset(PUZZLES, 4, K, seed=3),
        optimizers.AdamW(3e-2),
        config=CONFIG,
        n_steps_per_checkpoint=100,
    )
    return Loop(
        latent_model(lm, CONFIG, "train"),
        task,
        output_dir=output_dir,
        n_devices=1,
        precision=precision,
    )


def test_a_loop_trains_random_thoughts_in_bfloat16_and_resumes(tmp_path):
    whole = loop(tmp_path / "whole", "mixed_bfloat16")
    whole.run(12)
    part = loop(tmp_path / "part", "mixed_bfloat16")
    part.run(5)
    resumed = loop(tmp_path / "part", "mixed_bfloat16")
    assert resumed.step == 5
    resumed.run(7)
    leaves = [jax.tree.leaves(run.model.weights) for run in (whole, resumed)]
    for a, b in zip(*leaves, strict=True):
        assert a.dtype == np.float32
        np.testing.assert_array_equal(a, b)


def test_bfloat16_thoughts_learn_as_float32_ones_do(tmp_path):
    last = {}
    for precision in ("float32", "mixed_bfloat16"):
        run = loop(None, precision)
        batch = next(SudokuDataset(PUZZLES, 12, K, augment=False, shuffle=False))
        trainer = run.step_trainer
        losses = [
            float(trainer.one_step(batch, jax.random.key(1))[0]) for _ in range(30)
        ]
        assert losses[-1] < 0.8 * losses[0]
        last[precision] = np.mean(losses[-5:])
    assert abs(last["mixed_bfloat16"] - last["float32"]) < 0.1 * last["float32"]
