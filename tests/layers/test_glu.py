"""Gated feed-forward layers against their formulas in float64."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from retrax import layers as tl
from retrax.errors import LayerError
from retrax.shapes import ShapeDtype

ACTIVATIONS = {
    tl.SwiGLU: lambda a: a / (1 + np.exp(-a)),
    tl.GEGLU: np.vectorize(lambda a: a * (1 + math.erf(a / math.sqrt(2))) / 2),
    tl.ReGLU: lambda a: np.maximum(a, 0),
}


@pytest.mark.parametrize("make", ACTIVATIONS, ids=lambda make: make.__name__)
@pytest.mark.parametrize("use_bias", [False, True])
def test_it_is_its_formula(make, use_bias):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(2, 3, 4))
    layer = make(5, d_out=6, use_bias=use_bias)
    weights, _ = layer.init(ShapeDtype(x.shape))
    weights = jax.tree.map(lambda w: rng.normal(size=w.shape), weights)

    def dense(x, w):
        return x @ w[0] + w[1] if use_bias else x @ w

    gate, value, out = weights
    wanted = dense(ACTIVATIONS[make](dense(x, gate)) * dense(x, value), out)
    y, _ = layer.pure_fn(jnp.float32(x), jax.tree.map(jnp.float32, weights), (), None)
    np.testing.assert_allclose(y, wanted, rtol=1e-4, atol=1e-5)
    assert layer.name == make.__name__


def test_weights_are_drawn_apart_and_biases_start_at_zero():
    layer = tl.GatedFeedForward(64, jnp.tanh, use_bias=True)
    weights, _ = layer.init(ShapeDtype((1, 32)), rng=jax.random.key(0))
    assert [w.shape for w, _ in weights] == [(32, 64), (32, 64), (64, 32)]
    assert all((b == 0).all() for _, b in weights)
    gate, value, _ = (np.asarray(w) for w, _ in weights)
    assert abs(np.corrcoef(gate.ravel(), value.ravel())[0, 1]) < 0.1
    limit = math.sqrt(6 / (32 + 64))  # Glorot uniform
    assert 0.95 * limit < abs(gate).max() <= limit


def test_it_refuses():
    with pytest.raises(ValueError, match="d_ff=0"):
        tl.SwiGLU(0)
    with pytest.raises(LayerError, match="got a scalar"):
        tl.GEGLU(4).init(ShapeDtype(()))
