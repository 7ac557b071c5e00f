"""Train a little, save, load in a new process, sample: the same text comes out."""

import os
import subprocess
import sys
from pathlib import Path

import gin
import jax
import numpy as np
import pytest

from retrax import data, models
from retrax.command_line import configs
from retrax.supervised import trainer_lib
from retrax.supervised.decoding import autoregressive_sample

ROOT = Path(__file__).parents[2]
LIMIT = 200  # seconds
PROMPT, N_NEW = "ROMEO: I", 12
SIZES = dict(vocab_size=72, d_model=8, d_ff=16, n_layers=1, n_heads=2, max_len=32)
CONFIG = """
train.model = @TransformerLM
train.inputs = @shakespeare
train.steps = 4
train.eval_frequency = None
train.eval_steps = 1
train.optimizer = @Adam
train.lr_schedule_fn = @lr_schedules.constant
lr_schedules.constant.value = 0.03
shakespeare.batch_size = 2
shakespeare.length = 8
shakespeare.eval_batch_size = 2
""" + "\n".join(f"TransformerLM.{name} = {n}" for name, n in SIZES.items())

# What a person writes who has the run's directory or the file, and nothing else.
LATER = f"""
import numpy as np
from retrax import cli, data, models
from retrax.shapes import ShapeDtype
from retrax.supervised.decoding import autoregressive_sample

assert cli.main(["predict", "run", "--prompt", {PROMPT!r}, "--length={N_NEW}"]) == 0
print("---")
lm = models.TransformerLM(**{SIZES!r}, mode="predict")
lm.init_from_file(
    "lm.pkl", weights_only=True, input_signature=ShapeDtype((1, 1), np.int32)
)
tokenizer = data.text.CharTokenizer()
prompt = tokenizer.encode({PROMPT!r})[None]
(row,) = autoregressive_sample(lm, prompt, max_length={N_NEW})
print({PROMPT!r} + tokenizer.decode(row))
"""


@pytest.fixture(autouse=True)
def _compile_fast_with_own_gin():
    gin.clear_config()
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)
    gin.clear_config()


def sample(model, weights):
    model.weights = weights
    tokenizer = data.text.CharTokenizer()
    prompt = np.asarray(tokenizer.encode(PROMPT))[None]
    (row,) = autoregressive_sample(model, prompt, max_length=N_NEW)
    return PROMPT + tokenizer.decode(row)


def test_a_new_process_gives_the_same_text(tmp_path):
    configs.read([], [CONFIG])
    trained = trainer_lib.train(output_dir=tmp_path / "run").opt_state.weights
    model = models.TransformerLM(**SIZES, mode="eval")
    ids = np.zeros((1, 4), np.int32)
    first, _ = jax.jit(lambda key: model.init(ids, rng=key))(jax.random.key(0))
    predict = models.TransformerLM(**SIZES, mode="predict")
    expected = sample(predict, trained)
    assert expected != sample(predict, first)  # Other weights give another text.
    model.weights = trained
    model.save_to_file(tmp_path / "lm.pkl", weights_only=True)
    done = subprocess.run(
        [sys.executable, "-c", LATER],
        cwd=tmp_path,
        env={
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
        },
        capture_output=True,
        text=True,
        timeout=LIMIT,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{expected}\n---\n{expected}\n"
