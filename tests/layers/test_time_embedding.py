"""SinCosTimeEmbedding against its formula in float64."""

import jax.numpy as jnp
import numpy as np
import pytest

from retrax import layers as tl


@pytest.mark.parametrize("dtype", [np.float32, np.int32])
def test_it_is_its_formula(dtype):
    t = np.array([[0, 1, 7], [250, 999, 3]], dtype)
    y = tl.SinCosTimeEmbedding(6, max_period=100.0)(t)
    angles = t[..., None].astype(np.float64) * np.array([1, 0.1, 0.01])
    wanted = np.concatenate([np.sin(angles), np.cos(angles)], -1)
    assert y.shape == (2, 3, 6) and y.dtype == jnp.float32
    np.testing.assert_allclose(y, wanted, rtol=0, atol=1e-4)


def test_half_precision_is_computed_in_float32():
    t = jnp.array([250.0], jnp.bfloat16)
    y = tl.SinCosTimeEmbedding(8)(t)
    wanted = tl.SinCosTimeEmbedding(8)(t.astype(jnp.float32))
    assert y.dtype == jnp.bfloat16
    np.testing.assert_allclose(y.astype(jnp.float32), wanted, rtol=0, atol=2**-8)


@pytest.mark.parametrize("d", [0, 2, 5])
def test_it_refuses(d):
    with pytest.raises(ValueError, match=f"even and at least 4, got {d}"):
        tl.SinCosTimeEmbedding(d)
    with pytest.raises(ValueError, match="above 1, got 1"):
        tl.SinCosTimeEmbedding(4, max_period=1.0)
