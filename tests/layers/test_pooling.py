"""Pooling against loops written out in NumPy."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from retrax.errors import LayerError
from retrax.layers import pooling
from retrax.shapes import ShapeDtype

LAYERS = {
    "max": (pooling.MaxPool, np.max),
    "sum": (pooling.SumPool, np.sum),
    "avg": (pooling.AvgPool, np.mean),
}
every = pytest.mark.parametrize("kind", LAYERS)


def normal(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def pool(x, f, sizes, strides, padding):
    """Joins by f what each window sees of the inputs themselves."""
    shape = x.shape[1:-1]
    if padding == "SAME":
        outs = [-(-n // s) for n, s in zip(shape, strides, strict=True)]
        totals = [
            max((o - 1) * s + k - n, 0)
            for o, s, k, n in zip(outs, strides, sizes, shape, strict=True)
        ]
        padding = [(t // 2, t - t // 2) for t in totals]
    elif padding == "VALID":
        padding = [(0, 0)] * len(shape)
    outs = [
        (n + sum(p) - k) // s + 1
        for n, p, k, s in zip(shape, padding, sizes, strides, strict=True)
    ]
    y = np.zeros((x.shape[0], *outs, x.shape[-1]))
    for place in itertools.product(*map(range, outs)):
        window = tuple(
            slice(max(p * s - pad[0], 0), max(p * s - pad[0] + k, 0))
            for p, s, pad, k in zip(place, strides, padding, sizes, strict=True)
        )
        seen = x[(slice(None), *window)]
        y[(slice(None), *place)] = f(seen, axis=tuple(range(1, seen.ndim - 1)))
    return y


@every
@pytest.mark.parametrize("shape, sizes, strides, padding", [
    ((5, 6), (2, 2), (2, 2), "VALID"),
    ((5, 6), (2, 3), (1, 2), "SAME"),
    ((5, 7), (3, 4), (2, 3), "SAME"),
    ((5, 6), (3, 3), (2, 2), ((1, 0), (2, 1))),
    ((7,), (3,), (2,), "SAME"),
    ((4, 3, 5), (2, 2, 3), (2, 1, 2), "SAME"),
])  # fmt: skip
def test_pooling_is_the_loop(kind, shape, sizes, strides, padding):
    make, f = LAYERS[kind]
    x = normal(2, *shape, 3) - 5  # Zeros of padding would be the largest values.
    y = make(sizes, strides, padding)(x)
    assert y.dtype == x.dtype
    wanted = pool(x, f, sizes, strides, padding)
    assert y.shape == wanted.shape
    np.testing.assert_allclose(y, wanted, rtol=1e-5)


@every
def test_defaults_are_those_of_trax(kind):
    make, f = LAYERS[kind]
    x = normal(2, 4, 5, 3)
    wanted = pool(x, f, (2, 2), (1, 1), "VALID")
    np.testing.assert_allclose(make()(x), wanted, rtol=1e-4, atol=1e-6)
    assert str(make()) == make.__name__


@every
def test_further_leading_axes_are_batch(kind):
    make, _ = LAYERS[kind]
    x = normal(2, 3, 5, 6, 4)
    layer = make((2, 2), padding="SAME")
    for i in range(2):
        np.testing.assert_array_equal(layer(x)[i], layer(x[i]))


@every
def test_integers_and_bfloat16(kind):
    make, f = LAYERS[kind]
    x = np.arange(-30, 30).reshape(1, 5, 4, 3)
    wanted = pool(x, f, (2, 2), (1, 1), "SAME")
    layer = make((2, 2), padding="SAME")
    y = layer(x.astype(np.int32))
    assert y.dtype == (jnp.float32 if kind == "avg" else jnp.int32)
    np.testing.assert_allclose(y, wanted, rtol=1e-6)
    for padding in "SAME", "VALID":
        half = make((2, 2), padding=padding)(jnp.asarray(x, jnp.bfloat16))
        assert half.dtype == jnp.bfloat16
    np.testing.assert_allclose(
        np.asarray(layer(jnp.asarray(x, jnp.bfloat16)), np.float32), wanted, atol=0.5
    )


@every
def test_gradients_flow_to_what_the_windows_see(kind):
    make, f = LAYERS[kind]
    x, v = normal(1, 4, 5, 2).astype(np.float64), normal(1, 4, 5, 2, seed=1)
    layer = make((2, 3), (2, 2), "SAME")
    grad = jax.grad(lambda x: jnp.sum(jnp.sin(layer(x))))(jnp.asarray(x, jnp.float32))

    def wanted(x):
        return np.sum(np.sin(pool(x, f, (2, 3), (2, 2), "SAME")))

    slope = (wanted(x + 1e-6 * v) - wanted(x - 1e-6 * v)) / 2e-6
    np.testing.assert_allclose(np.sum(np.asarray(grad) * v), slope, rtol=1e-4)


@every
def test_bad_input_is_named(kind):
    make, _ = LAYERS[kind]
    name = make.__name__
    with pytest.raises(ValueError, match=rf"{name} .*\(2, 2\) and strides=\(1,\)"):
        make((2, 2), (1,))
    with pytest.raises(ValueError, match=r"pool_size=\(0, 2\)"):
        make((0, 2))
    with pytest.raises(ValueError, match=f"{name} needs padding .* got 'FULL'"):
        make(padding="FULL")
    with pytest.raises(ValueError, match=r"smaller than the size; got \(\(0, 2\), "):
        make(padding=((0, 2), (0, 0)))
    sig = ShapeDtype((5, 6, 3))
    with pytest.raises(LayerError, match=r"2 spatial axes, .* \(5, 6, 3\)"):
        make().output_signature(sig)
    with pytest.raises(LayerError, match="window of 4 .* size 3 .* axis 2"):
        make((2, 4)).output_signature(ShapeDtype((1, 5, 3, 2)))
