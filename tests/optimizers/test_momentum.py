"""Momentum against NumPy in float64, with Trax's decay."""

import jax.numpy as jnp
import numpy as np
import pytest

from retrax.optimizers import Momentum


@pytest.mark.parametrize("nesterov", [False, True])
def test_decay_does_not_depend_on_the_learning_rate(nesterov):
    lr, mass, decay = 0.05, 0.8, 0.01
    opt = Momentum(lr, mass=mass, weight_decay_rate=decay, nesterov=nesterov)
    rng = np.random.default_rng(0)
    w = rng.normal(size=(3, 4))
    v = np.zeros_like(w)
    weights = (jnp.asarray(w, jnp.float32),)
    slots, opt_params = opt.tree_init(weights)
    for step in range(1, 6):
        g = rng.normal(size=w.shape)
        v = mass * v + g
        w = (1 - decay) * w - lr * (mass * v + g if nesterov else v)
        grads = (jnp.asarray(g, jnp.float32),)
        weights, slots, _ = opt.tree_update(step, grads, weights, slots, opt_params)
        np.testing.assert_allclose(weights[0], w, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(slots[0], v, rtol=1e-5, atol=1e-6)
