"""Adam against NumPy in float64, with Trax's decay."""

import jax
import jax.numpy as jnp
import numpy as np

from retrax.optimizers import Adam


def test_decay_does_not_depend_on_the_learning_rate():
    lr, decay, b1, b2, eps = 0.05, 0.01, 0.9, 0.999, 1e-5
    opt = Adam(lr, weight_decay_rate=decay)
    opt.opt_params = {**opt.opt_params, "eps": eps}
    rng = np.random.default_rng(0)
    w = rng.normal(size=(2, 3, 4))
    m, v = np.zeros_like(w), np.zeros_like(w)
    weights = [jnp.asarray(w, jnp.float32)]
    slots, opt_params = opt.tree_init(weights)
    update = jax.jit(lambda *args: opt.tree_update(*args, store_slots=False))
    for step in range(1, 6):
        g = rng.normal(size=w.shape)
        m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g**2
        m_hat, v_hat = m / (1 - b1**step), v / (1 - b2**step)
        w = (1 - decay) * w - lr * m_hat / (np.sqrt(v_hat) + eps)
        grads = [jnp.asarray(g, jnp.float32)]
        weights, slots, _ = update(step, grads, weights, slots, opt_params)
        np.testing.assert_allclose(weights[0], w, rtol=2e-5, atol=2e-6)
    np.testing.assert_allclose(slots[0][0], m, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(slots[0][1], v, rtol=1e-4, atol=1e-8)


def test_first_step_is_one_learning_rate_whatever_the_gradient():
    # Exponent 1, not 2: with 2 the first step would be 0.74 of this.
    opt = Adam(0.1, weight_decay_rate=0.0, eps=0.0)
    weights = (jnp.zeros(3),)
    slots, opt_params = opt.tree_init(weights)
    grads = (jnp.array([1e-4, -3.0, 1e4]),)
    new, _, _ = opt.tree_update(1, grads, weights, slots, opt_params)
    np.testing.assert_allclose(new[0], [-0.1, 0.1, -0.1], rtol=1e-5)


def test_averages_of_bfloat16_weights_keep_moving():
    # 0.999 * v rounds to v in bfloat16; the slots must not be kept so.
    opt = Adam(0.0, weight_decay_rate=0.0)
    weights = (jnp.zeros(1, jnp.bfloat16),)
    slots, opt_params = opt.tree_init(weights)
    update = jax.jit(lambda *args: opt.tree_update(*args, store_slots=False))
    for step in range(1, 101):
        grads = (jnp.ones(1, jnp.bfloat16),)
        weights, slots, _ = update(step, grads, weights, slots, opt_params)
    np.testing.assert_allclose(slots[0][1], [1 - 0.999**100], rtol=1e-3)
