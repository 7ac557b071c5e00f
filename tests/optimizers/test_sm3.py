"""SM3 against NumPy in float64: kinds of momentum, decay, scalars."""

import jax.numpy as jnp
import numpy as np
import pytest

from retrax.optimizers import SM3, MomentumType


def oracle(w, grads, lr, momentum, b, decay, kind):
    """SM3-II, entry by entry; a scalar is a vector of one entry."""
    shape = w.shape
    w = np.atleast_1d(w)
    accumulators = [np.zeros(n) for n in w.shape]
    m = np.zeros_like(w)
    for g in (np.atleast_1d(g) for g in grads):
        new = [np.zeros(n) for n in w.shape]
        u = np.zeros_like(w)
        for index in np.ndindex(*w.shape):
            nu = min(accumulators[d][i] for d, i in enumerate(index))
            nu = b * nu + (1.0 if b == 1 else 1 - b) * g[index] ** 2
            u[index] = g[index] / np.sqrt(nu) if nu > 0 else 0.0
            for d, i in enumerate(index):
                new[d][i] = max(new[d][i], nu)
        accumulators = new
        u = u + decay * w
        m = momentum * m + (1 - momentum if kind == "EMA" else 1) * u
        w = w - lr * (momentum * m + u if kind == "NESTEROV" else m)
    return w.reshape(shape)


@pytest.mark.parametrize("kind", ["EMA", "HEAVY_BALL", "NESTEROV"])
@pytest.mark.parametrize("b", [1.0, 0.9])
@pytest.mark.parametrize("shape", [(), (5,), (3, 4), (2, 3, 2)])
def test_against_a_loop_over_entries(kind, b, shape):
    rng = np.random.default_rng(0)
    w = rng.normal(size=shape)
    grads = [rng.normal(size=shape) * (rng.random(shape) > 0.3) for _ in range(4)]
    expected = oracle(w, grads, 0.1, 0.6, b, 0.02, kind)
    opt = SM3(
        0.1,
        momentum=0.6,
        second_moment_averaging=b,
        weight_decay=0.02,
        momentum_type=kind,
    )
    weights = (jnp.asarray(w, jnp.float32),)
    slots, opt_params = opt.tree_init(weights)
    for step, g in enumerate(grads, start=1):
        weights, slots, _ = opt.tree_update(
            step, (jnp.asarray(g, jnp.float32),), weights, slots, opt_params
        )
    np.testing.assert_allclose(weights[0], expected, rtol=1e-5, atol=1e-6)


def test_slots_are_one_vector_per_axis():
    slots, _ = SM3().tree_init([jnp.ones((2, 3, 4)), jnp.ones(())])
    (m, vectors), (_, scalar) = slots
    assert m.shape == (2, 3, 4)
    assert [v.shape for v in vectors] == [(2,), (3,), (4,)]
    assert [v.shape for v in scalar] == [(1,)]


@pytest.mark.parametrize("same", [MomentumType.NESTEROV, 3, "NESTEROV"])
def test_momentum_type_by_member_number_or_name(same):
    # v' = g^2 -> u = 1; m' = 1; step by 0.5 * 1 + 1.
    opt = SM3(1.0, momentum=0.5, momentum_type=same)
    weights = (jnp.zeros(2),)
    slots, opt_params = opt.tree_init(weights)
    new, _, _ = opt.tree_update(1, (jnp.full(2, 7.0),), weights, slots, opt_params)
    np.testing.assert_allclose(new[0], [-1.5, -1.5], rtol=1e-6)


def test_unknown_momentum_type():
    with pytest.raises(ValueError, match="'ema'; give one of MomentumType.EMA, "):
        SM3(momentum_type="ema")
