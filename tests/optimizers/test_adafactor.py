"""Adafactor against NumPy in float64 where Optax factors other axes or has no name."""

import jax.numpy as jnp
import numpy as np
import pytest

from retrax.optimizers import Adafactor


def oracle(w, grads, lr, decay_rate, eps1, eps2, threshold, decay_of_step):
    """Algorithm 4 of the paper on the last two axes, one matrix at a time."""
    w = w.copy()
    v_row = np.zeros(w.shape[:-1])
    v_col = np.zeros(w.shape[:-2] + w.shape[-1:])
    for step, g in enumerate(grads, start=1):
        b = 1 - step**-decay_rate
        u = np.empty_like(g)
        for i in np.ndindex(*w.shape[:-2]):
            q = g[i] ** 2 + eps1
            v_row[i] = b * v_row[i] + (1 - b) * q.mean(axis=1)
            v_col[i] = b * v_col[i] + (1 - b) * q.mean(axis=0)
            v = np.outer(v_row[i], v_col[i]) / v_row[i].mean()
            u[i] = g[i] / np.sqrt(v)
        u /= max(1.0, np.sqrt((u**2).mean()) / threshold)
        scale = max(np.sqrt((w**2).mean()), eps2)
        w = (1 - decay_of_step(step)) * w - lr * scale * u
    return w


@pytest.mark.parametrize(
    ("shape", "n_decay_steps"), [((4, 3), 3), ((7, 3, 4), 0), ((2, 5, 3, 4), 0)]
)
def test_last_two_axes_are_factored(shape, n_decay_steps):
    def decay(step):
        return 0.01 * max(n_decay_steps - step, 0) / n_decay_steps

    rng = np.random.default_rng(0)
    w = 1e-4 * rng.normal(size=shape)  # below epsilon2: the floor is in use at first
    grads = [rng.normal(size=shape) ** 3 for _ in range(5)]
    expected = oracle(
        w, grads, 0.5, 0.7, 1e-6, 1e-2, 0.9, decay if n_decay_steps else lambda _: 0.01
    )
    opt = Adafactor(
        0.5,
        decay_rate=0.7,
        clipping_threshold=0.9,
        weight_decay_rate=0.01,
        weight_decay_n_steps=n_decay_steps,
        epsilon1=1e-6,
        epsilon2=1e-2,
    )
    weights = (jnp.asarray(w, jnp.float32),)
    slots, opt_params = opt.tree_init(weights)
    assert [v.shape for v in slots[0]] == [shape[:-1], shape[:-2] + shape[-1:]]
    for step, g in enumerate(grads, start=1):
        weights, slots, _ = opt.tree_update(
            step, (jnp.asarray(g, jnp.float32),), weights, slots, opt_params
        )
    np.testing.assert_allclose(weights[0], expected, rtol=5e-5, atol=1e-7)


def test_slots_by_rank_and_option():
    weights = [jnp.ones(()), jnp.ones(5), jnp.ones((3, 4))]
    shapes = [
        [v.shape for v in slot]
        for slot in Adafactor(do_momentum=True).tree_init(weights)[0]
    ]
    assert shapes == [[(), ()], [(5,), (5,)], [(3,), (4,), (3, 4)]]
    slots, _ = Adafactor(factored=False).tree_init(weights)
    assert [v.shape for (v,) in slots] == [(), (5,), (3, 4)]


def test_momentum_in_bfloat16():
    opt = Adafactor(do_momentum=True, momentum_in_bfloat16=True, beta1=0.5)
    weights = (jnp.ones((3, 4)),)
    slots, opt_params = opt.tree_init(weights)
    for step in (1, 2):
        weights, slots, _ = opt.tree_update(step, weights, weights, slots, opt_params)
        assert slots[0][-1].dtype == jnp.bfloat16
    assert weights[0].dtype == jnp.float32


@pytest.mark.parametrize("off", [{"do_clipping": False}, {"clipping_threshold": None}])
def test_clipping_off(off):
    opt = Adafactor(
        1.0, multiply_by_parameter_scale=False, weight_decay_rate=0.0, **off
    )
    weights, slots = (jnp.zeros(1),), ([jnp.zeros(1)],)
    # Step 2, with v at 0: v' = 2^-0.8 g^2, so the step is 2^0.4 > 1.
    new, _, _ = opt.tree_update(2, (jnp.ones(1),), weights, slots, opt.opt_params)
    np.testing.assert_allclose(new[0], [-(2**0.4)], rtol=1e-5)
    new, _, _ = Adafactor(
        1.0, multiply_by_parameter_scale=False, weight_decay_rate=0.0
    ).tree_update(2, (jnp.ones(1),), weights, slots, opt.opt_params)
    np.testing.assert_allclose(new[0], [-1.0], rtol=1e-5)
