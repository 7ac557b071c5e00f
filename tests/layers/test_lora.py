"""LoRA: nothing at first, little trained, and the same once merged."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from retrax import layers as tl
from retrax.errors import LayerError
from retrax.layers import tree
from retrax.shapes import ShapeDtype, signature


def random(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def scrambled(weights):
    """The same structure with random values, so that B is not 0."""
    leaves, structure = jax.tree.flatten(weights)
    leaves = [random(*w.shape, seed=i) for i, w in enumerate(leaves)]
    return jax.tree.unflatten(structure, leaves)


@pytest.mark.parametrize("use_bias", [False, True])
@pytest.mark.parametrize("alpha, scale", [(None, 1.0), (8.0, 4.0)])
def test_it_is_its_formula(use_bias, alpha, scale):
    x = random(2, 3, 5, seed=9)
    layer = tl.LoRA(tl.Dense(4, use_bias=use_bias), rank=2, alpha=alpha)
    weights, state = layer.init(signature(x))
    assert [w.shape for w in weights[1]] == [(5, 2), (2, 4)]
    weights = scrambled(weights)
    base, (a, b) = jax.tree.map(np.float64, weights)
    w, bias = base if use_bias else (base, 0.0)
    wanted = x @ w + bias + scale * (x @ a @ b)
    y, _ = layer.pure_fn(x, weights, state, None)
    np.testing.assert_allclose(y, wanted, rtol=1e-5, atol=1e-5)


def test_at_first_it_is_the_layer():
    x, dense = random(3, 5), tl.Dense(4)
    layer = tl.LoRA(dense, rank=2)
    (base, (a, b)), state = layer.init(signature(x))
    assert (b == 0).all() and (a != 0).all()
    y, _ = layer.pure_fn(x, (base, (a, b)), state, None)
    np.testing.assert_array_equal(y, dense.pure_fn(x, base, (), None)[0])


def model(wrap):
    return tl.Serial(
        wrap(tl.Dense(4)),
        tl.Repeat(lambda: tl.Residual(tl.LayerNorm(), wrap(tl.Dense(4))), 3),
        tl.Dropout(0.0),
        tl.BatchNorm(axis=0, mode="eval"),
        tl.Bidirectional(wrap(tl.Dense(2))),
    )


def lora(layer):
    return tl.LoRA(layer, rank=1, alpha=2.0)


def test_only_the_small_matrices_are_trained_by_it():
    tuned = model(lora)
    weights, _ = tuned.init(ShapeDtype((2, 3, 5)))
    names = [n for n, _ in tree.named_leaves(tuned, weights)]
    trained = dict(zip(names, tree.trainable_list(tuned, weights), strict=True))
    for name, is_trained in trained.items():
        inside = "LoRA" in name
        assert is_trained == (not inside or "LowRank" in name), name
    assert sum("LowRank" in n for n in names) >= 6


def test_merged_weights_do_the_same_without():
    x = random(2, 3, 5, seed=3)
    tuned, plain = model(lora), model(lambda layer: layer)
    weights, state = tuned.init(signature(x))
    plain.init(signature(x))
    tuned.weights = weights = scrambled(weights)
    plain.weights, plain.state = tl.merge_lora(tuned)
    y, _ = tuned.pure_fn(x, weights, state, None)
    np.testing.assert_allclose(plain(x), y, rtol=1e-4, atol=1e-4)
    shapes = jax.tree.map(jnp.shape, plain.weights)
    explicit, _ = tl.merge_lora(tuned, weights, state)
    assert jax.tree.map(jnp.shape, explicit) == shapes


def test_inserted_weights_do_the_same_at_first_and_come_out_again():
    x = random(2, 3, 5, seed=3)
    tuned, plain = model(lora), model(lambda layer: layer)
    tuned.init(signature(x))
    weights, _ = plain.init(signature(x))
    plain.weights = weights = scrambled(weights)
    tuned.weights = tl.insert_lora(tuned, weights)
    np.testing.assert_array_equal(tuned(x), plain(x))
    merged, _ = tl.merge_lora(tuned)
    for a, b in zip(jax.tree.leaves(merged), jax.tree.leaves(weights), strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_shared_layer_is_merged_once():
    shared = tl.LoRA(tl.Dense(4), rank=1)
    plain_dense = tl.Dense(4)
    tuned, plain = tl.Serial(shared, shared), tl.Serial(plain_dense, plain_dense)
    x = random(2, 4)
    weights, _ = tuned.init(signature(x))
    plain.init(signature(x))
    shared.weights = scrambled(shared.weights)
    plain.weights, _ = tl.merge_lora(tuned)
    np.testing.assert_allclose(plain(x), tuned(x), rtol=1e-5, atol=1e-5)


def test_half_precision_keeps_its_dtype():
    x = jnp.asarray(random(3, 5), jnp.bfloat16)
    layer = tl.LoRA(tl.Dense(4, use_bfloat16=True), rank=2)
    layer.init(signature(x))
    assert layer(x).dtype == jnp.bfloat16


def test_it_refuses():
    with pytest.raises(ValueError, match="rank of at least 1, got 0"):
        tl.LoRA(tl.Dense(4), rank=0)
    with pytest.raises(ValueError, match="n_in=2"):
        tl.LoRA(tl.Add())
    with pytest.raises(TypeError, match="wraps a layer"):
        tl.LoRA(tl.Dense)
    with pytest.raises(LayerError, match=r"matrix of shape \(5, 5\)"):
        tl.LoRA(tl.LayerNorm()).init(ShapeDtype((3, 5)))
    with pytest.raises(LayerError, match=r"one matrix of shape \(5, 5\)"):
        tl.LoRA(tl.SwiGLU(5)).init(ShapeDtype((3, 5)))
    tuned = tl.Serial(tl.LoRA(tl.Dense(4)))
    tuned.init(ShapeDtype((3, 5)))
    with pytest.raises(ValueError, match=r"\[\(5, 4\), \(4,\)\], \[\(5, 3\)\] are"):
        tl.insert_lora(tuned, (jnp.ones((5, 3)),))
    with pytest.raises(ValueError, match="1 sublayers, 2 are given"):
        tl.insert_lora(tuned, ((), ()))
