"""RMSNorm against float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from retrax import layers as tl
from retrax.errors import LayerError
from retrax.shapes import ShapeDtype, signature


def normal(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def formula(x, scale, epsilon):
    x = x.astype(np.float64)
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + epsilon) * scale


@pytest.mark.parametrize("size", [1e-3, 1.0, 1e6])
def test_it_is_its_formula(size):
    x, scale = normal(3, 4, 6) * np.float32(size), normal(6, seed=1)
    y, _ = tl.RMSNorm(epsilon=1e-3).pure_fn(x, scale, (), None)
    np.testing.assert_allclose(y, formula(x, scale, 1e-3), rtol=1e-6, atol=1e-7)


def test_it_starts_with_a_scale_of_one():
    weights, state = tl.RMSNorm().init(ShapeDtype((2, 5)))
    assert weights.tolist() == [1.0] * 5 and state == ()


def test_gradient_is_that_of_the_formula():
    x, scale, g = normal(2, 7), normal(7, seed=1), normal(2, 7, seed=2)
    layer = tl.RMSNorm(epsilon=1e-2)

    def loss(x, scale):
        return (layer.pure_fn(x, scale, (), None)[0] * g).sum()

    for i, got in enumerate(jax.grad(loss, (0, 1))(x, scale)):
        args = [x.astype(np.float64), scale.astype(np.float64)]
        wanted = np.zeros(args[i].shape)
        for place in np.ndindex(wanted.shape):
            ends = []
            for step in (1e-5, -1e-5):
                moved = [a.copy() for a in args]
                moved[i][place] += step
                ends.append((formula(*moved, 1e-2) * g).sum())
            wanted[place] = (ends[0] - ends[1]) / 2e-5
        np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-5)


def test_a_vector_of_zeros_is_zero_with_finite_gradient():
    layer, x = tl.RMSNorm(), jnp.zeros((2, 4))
    weights, _ = layer.init(signature(x))
    assert (layer(x) == 0).all()
    grad = jax.grad(lambda x: layer.pure_fn(x, weights, (), None)[0].sum())(x)
    assert np.isfinite(grad).all()


def test_half_precision_is_normalized_in_float32():
    x = jnp.asarray(normal(4, 256) * 300, jnp.bfloat16)
    layer = tl.RMSNorm()
    layer.init(signature(x))
    y = layer(x)
    assert y.dtype == jnp.bfloat16
    wanted = formula(np.asarray(x, np.float32), 1, 1e-6)
    np.testing.assert_allclose(y.astype(np.float32), wanted, rtol=2**-8, atol=1e-6)


def test_code_grows_with_depth_not_with_its_square():
    def lines(depth):
        model = tl.Serial(
            [tl.Residual(tl.RMSNorm(), tl.Dense(4)) for _ in range(depth)]
        )
        x = jnp.ones((2, 4))
        weights, state = model.init(signature(x))

        def loss(w):
            return model.pure_fn(x, w, state, None)[0].sum()

        text = jax.jit(jax.grad(loss)).lower(weights).compile().as_text()
        return text.count("\n")

    assert lines(16) < 2.5 * lines(8)


def test_it_refuses():
    with pytest.raises(LayerError, match="got a scalar"):
        tl.RMSNorm().init(ShapeDtype(()))
    with pytest.raises(ValueError, match="got -1"):
        tl.RMSNorm(epsilon=-1.0)
