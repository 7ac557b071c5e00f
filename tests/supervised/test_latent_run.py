"""Thoughts and answer in one run give what a run for each thought gives."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from retrax import models
from retrax.data.sudoku import SudokuDataset, generate
from retrax.errors import ConfigError, DataError, LayerError
from retrax.layers import Serial
from retrax.shapes import signature
from retrax.supervised.curriculum_parts import check_prefix
from retrax.supervised.latent_config import LatentConfig
from retrax.supervised.latent_evaluation import LatentEvaluation
from retrax.supervised.latent_layers import (
    LatentThoughtLoss,
    LatentThoughts,
    latent_model,
    thinking,
)

COMPILES_QUICKLY = True

K = 3
PUZZLES = generate(8, box=2, n_clues=(4, 7), seed=3)
SLOW = dict(prefix_length=24, leak_weight=0.2, supervise_first=True)
FAST = SLOW | {"shared_prefix": 12}


def lm(mode="train", noise_head=False, n_latents=K, dropout=0.0, conv_width=3):
    return models.LatentTransformerLM(
        4,
        n_latents,
        8,
        8,
        2,
        2,
        dropout,
        mode=mode,
        noise_head=noise_head,
        conv_width=conv_width,
    )


def thinker(settings, mode="train", **options):
    config = LatentConfig(**settings)
    return latent_model(functools.partial(lm, **options), config, mode), config


@functools.cache
def batch_and_weights(noise_head=False):
    batch = next(SudokuDataset(PUZZLES, 8, K, augment=False, shuffle=False))
    assert set(batch[2].ravel().tolist()) >= {4, 7}  # Rows of different starts.
    layer, _ = thinker(SLOW, noise_head=noise_head)
    wanted, state = layer.weights_and_state_signature(signature(batch))
    rng = np.random.default_rng(0)
    weights = jax.tree.map(lambda s: rng.normal(size=s.shape).astype("f") / 2, wanted)
    return batch, weights, state


def found(settings, batch, weights, state, num_passes, cast=None, **options):
    """Everything that comes of it: thoughts, outputs, loss and gradients."""
    thoughts, config = thinker(settings, **options)
    loss_layer = LatentThoughtLoss(config)

    def loss(weights):
        if cast is not None:
            weights = jax.tree.map(lambda w: w.astype(cast), weights)
        answer = thoughts.answer(weights, state, batch)
        outs, _ = thoughts.pure_fn(batch, weights, state, None)
        return loss_layer.apply(outs, (), (), None)[0], (answer, outs)

    with thinking(num_passes=num_passes):
        (value, more), grads = jax.jit(jax.value_and_grad(loss, has_aux=True))(weights)
    return value, grads, more


@pytest.mark.parametrize(
    "settings, passes, noise_head",
    [
        (dict(mode="depth"), 0, False),
        (dict(mode="depth"), 3, True),
        (dict(mode="depth", trunc=2), 3, False),
        (dict(mode="level"), 2, False),
    ],
)
def test_one_run_gives_values_and_gradients_of_many(settings, passes, noise_head):
    data = batch_and_weights(noise_head)
    many, one = (
        found(kind | settings, *data, passes, noise_head=noise_head)
        for kind in (SLOW, FAST)
    )
    latents = [np.asarray(x[2][0][0].values) for x in (many, one)]
    if passes:
        np.testing.assert_allclose(latents[1], latents[0], atol=2e-5)
    assert not latents[1][:, passes:].any()
    for name in ("positions", "active", "sigma"):
        slots = [getattr(x[2][0][0], name) for x in (many, one)]
        np.testing.assert_array_equal(*slots)
    for a, b in zip(*(x[2][0][1:] for x in (many, one)), strict=True):
        np.testing.assert_allclose(b, a, atol=5e-5)
    np.testing.assert_allclose(one[0], many[0], rtol=1e-5)
    largest = max(float(jnp.abs(g).max()) for g in jax.tree.leaves(many[1]))
    assert largest > 1e-2
    for a, b in zip(*(jax.tree.leaves(x[1]) for x in (many, one)), strict=True):
        np.testing.assert_allclose(b, a, atol=3e-5 * largest)


def test_thoughts_matter_to_the_answer():
    data = batch_and_weights()
    first, second = (found(FAST | {"mode": "depth"}, *data, n)[2][0] for n in (1, 3))
    base = 3 * data[0][2][:, 0] + K
    for i, at in enumerate(base):
        differ = np.abs(np.asarray(first[1][i] - second[1][i])).max(-1)
        assert (differ[: at - K] < 1e-5).all() and differ[at - 1 :].max() > 1e-2


def test_half_precision_stays_half_precision():
    data = batch_and_weights()
    many, one = (
        found(kind | {"mode": "depth"}, *data, K, cast=jnp.bfloat16)
        for kind in (SLOW, FAST)
    )
    assert one[2][0][1].dtype == many[2][0][1].dtype == jnp.bfloat16
    assert one[2][0][0].values.dtype == many[2][0][0].values.dtype
    assert abs(float(one[0]) - float(many[0])) < 0.05 * float(many[0])


def test_rows_beyond_the_prefixes_give_nan():
    batch, weights, state = batch_and_weights()
    starts = batch[2][:, 0]
    for settings, bad in (
        (FAST | {"shared_prefix": 13}, starts == 4),
        (FAST | {"prefix_length": 23}, starts == 7),
    ):
        logits = found(settings, batch, weights, state, K)[2][0][1]
        np.testing.assert_array_equal(np.isnan(logits).any((1, 2)), bad)
    with pytest.raises(DataError, match="has 4 clues, 12 tokens, but .* first 13 are"):
        check_prefix(batch, LatentConfig(shared_prefix=13))
    check_prefix(batch, LatentConfig(**FAST))


def test_evaluation_is_the_same():
    batch, weights, state = batch_and_weights()
    reports = []
    for settings in (SLOW, FAST):
        eval_model, cached = (thinker(settings, m)[0] for m in ("eval", "predict"))
        evaluation = LatentEvaluation(eval_model, cached)
        reports.append(
            evaluation.evaluate([batch], weights, state, K, (0, 1), (1,), ablate=True)
        )
    for a, b in zip(*(report.example for report in reports), strict=True):
        np.testing.assert_array_equal(b, a)
    for many, one in zip(*(report[:2] for report in reports), strict=True):
        assert many.keys() == one.keys()
        for name, value in many.items():
            assert abs(one[name] - value) < 1e-4, name


def test_without_slots_the_model_runs_once():
    batch = next(SudokuDataset(PUZZLES, 8, 0, augment=False, shuffle=False))
    settings = dict(supervise_first=True, shared_prefix=12)
    model, config = thinker(settings, n_latents=0)
    layer = Serial(model, LatentThoughtLoss(config))
    layer.init(signature(batch))
    assert np.isfinite(float(layer(batch)))


def test_what_cannot_be_done_in_one_run_is_told():
    with pytest.raises(ConfigError, match="shared_prefix=12 .* cannot be random"):
        LatentConfig(shared_prefix=12, noise=True)
    with pytest.raises(ConfigError, match="prefix_length=12 .* must be more"):
        LatentConfig(shared_prefix=12, prefix_length=12)
    with pytest.raises(ConfigError, match="shared_prefix must be at least 1, got 0"):
        LatentConfig(shared_prefix=0)
    with pytest.raises(ConfigError, match="needs the model in mode 'predict'"):
        LatentThoughts(lm(), LatentConfig(**FAST))
    batch = batch_and_weights()[0]
    model, _ = thinker(FAST, dropout=0.1)
    with pytest.raises(LayerError, match=r"\(dropout=0\).*Dropout needs a random"):
        model.init(signature(batch))
    not_cached = LatentThoughts(lm(), LatentConfig(**FAST), cached=lm("eval"))
    weights, state = batch_and_weights()[1:]
    with pytest.raises(ValueError, match="made with mode='predict'"):
        jax.eval_shape(lambda: not_cached.answer(weights, state, batch))
