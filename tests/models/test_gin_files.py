"""The configurations that ship: models take the data, in both modes of training."""

import gin
import jax
import numpy as np
import pytest

from retrax.command_line import configs
from retrax.shapes import signature


@pytest.fixture(autouse=True)
def clean_gin():
    gin.clear_config()
    yield
    gin.clear_config()


def bound(name):
    return gin.query_parameter(name).scoped_configurable_fn


@pytest.mark.parametrize("name", sorted(configs.shipped()))
def test_model_takes_the_data(name):
    small = ["sudoku.n_train = 80", "sudoku.n_eval = 8", "sudoku.workers = 0"]
    small.append("sudoku.cache_dir = None")
    configs.read([name], small if "sudoku" in name else [])
    inputs = bound("train.inputs")()
    batch = next(inputs.train_stream())
    for mode in ("train", "eval"):
        model = bound("train.model")(mode=mode)
        x = batch[0] if model.n_in == 1 else batch[: model.n_in]
        sig = signature(x)
        weights, state = model.weights_and_state_signature(sig)
        arguments = jax.tree.map(
            lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype), (sig, weights, state)
        )
        key = jax.eval_shape(lambda: jax.random.key(0))
        outputs, _ = jax.eval_shape(model.pure_fn, *arguments, key)
        logits = outputs if model.n_out == 1 else outputs[0]
        targets = batch[1]
        if logits.ndim == 4:  # Of several draws, and each predicts the next id.
            logits, targets = jax.eval_shape(lambda x: x[0], logits), batch[0][:, 1:]
        assert logits.shape[:-1] == targets.shape
        assert np.max(targets) < logits.shape[-1]


def test_each_says_what_it_is_for():
    assert all(len(line) > 20 for line in configs.shipped().values())
