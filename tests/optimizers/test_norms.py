"""Norms and clipping against NumPy, at the edges of float32."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from retrax import optimizers


def test_l2_norm_is_global_over_the_tree():
    rng = np.random.default_rng(0)
    arrays = [rng.normal(size=s) for s in [(), (1,), (3, 4), (2, 3, 4), (0, 3)]]
    tree = {"a": tuple(arrays[:2]), "b": [arrays[2:], ()]}
    expected = np.sqrt(sum((a**2).sum() for a in arrays))
    np.testing.assert_allclose(optimizers.l2_norm(tree), expected, rtol=1e-6)


def test_l2_norm_of_no_arrays_is_zero():
    assert optimizers.l2_norm(((), {})) == 0


def test_l2_norm_adds_half_precision_in_float32():
    ones = jnp.ones(10_000, jnp.bfloat16)  # a bfloat16 sum would stop at 256
    norm = optimizers.l2_norm((ones,))
    assert norm.dtype == jnp.float32
    np.testing.assert_allclose(norm, 100.0, rtol=1e-6)


@pytest.mark.parametrize("max_norm", [0.5, 4.99, 5.01, 100.0])
def test_clip_grads_scales_only_above_the_limit(max_norm):
    grads = {"a": jnp.array([3.0]), "b": (jnp.array([[4.0]]),)}
    scale = min(1.0, max_norm / 5.0)
    clipped = optimizers.clip_grads(grads, max_norm)
    np.testing.assert_allclose(clipped["a"], [3.0 * scale], rtol=1e-6)
    np.testing.assert_allclose(clipped["b"][0], [[4.0 * scale]], rtol=1e-6)


@pytest.mark.parametrize("max_norm", [None, 0, 0.0])
def test_no_limit_leaves_gradients_alone(max_norm):
    grads = (jnp.array([3e5, 4e5]),)
    assert optimizers.clip_grads(grads, max_norm) is grads


def test_a_tree_without_arrays_is_clipped_to_itself():
    grads, optimizer = ((), {}), optimizers.SGD(0.1, clip_grad_norm=1.0)
    slots, opt_params = optimizer.tree_init(grads)
    new, slots, stats = optimizer.tree_update(1, grads, grads, slots, opt_params)
    assert (new, slots, float(stats["gradients_l2"])) == (grads, (), 0.0)


def test_zero_gradients_stay_zero():
    (clipped,) = optimizers.clip_grads((jnp.zeros(3),), 1.0)
    np.testing.assert_array_equal(clipped, np.zeros(3))


def test_gradients_whose_squares_overflow_are_still_clipped():
    clipped = optimizers.clip_grads((jnp.array([3e30]), jnp.array([4e30])), 1.0)
    np.testing.assert_allclose(np.concatenate(clipped), [0.6, 0.8], rtol=1e-5)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("jit", [False, True])
def test_a_bad_gradient_does_not_spoil_the_finite_ones(bad, jit):
    def clip(grads):
        return optimizers.clip_grads(grads, 1.0)

    grads = (jnp.array([bad, 2.0]), jnp.array([3.0]), jnp.zeros((0,)))
    first, second, _ = (jax.jit(clip) if jit else clip)(grads)
    np.testing.assert_array_equal(first, [bad, 2.0])
    np.testing.assert_array_equal(second, [3.0])


def test_clipping_keeps_dtypes():
    grads = (jnp.full(4, 100.0, jnp.bfloat16), jnp.full(4, 100.0))
    clipped = optimizers.clip_grads(grads, 1.0)
    assert [g.dtype for g in clipped] == [jnp.bfloat16, jnp.float32]


def test_negative_limit_is_refused():
    with pytest.raises(ValueError, match="max_norm is -1.*positive number"):
        optimizers.clip_grads((jnp.ones(1),), -1)
