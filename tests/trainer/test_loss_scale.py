"""The golden step in bfloat16, and the loss scales against their rules."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from retrax.trainer import (
    DynamicLossScale,
    NoLossScale,
    StaticLossScale,
)
from retrax.trainer.precision import mixed_precision_step

# The three examples of the contract and 21 corners, made with JAX op by op and NumPy.
VECTORS = json.loads(
    (Path(__file__).parent / "vectors/loss_scale_public.json").read_text()
)["vectors"]
COMPILED = jax.jit(mixed_precision_step, static_argnums=6)


def floats(x):
    """Numbers, and the strings 'NaN', 'Infinity', as float32."""
    if isinstance(x, list):
        return np.array([floats(v) for v in x], np.float32)
    return np.float32(x)


def arguments(given):
    return (
        {name: floats(p) for name, p in given["params"].items()},
        floats(given["x"]),
        floats(given["y"]),
        floats(given["loss_scale"]),
        np.int32(given["good_steps"]),
        floats(given["lr"]),
        given["growth_interval"],
    )


@pytest.mark.parametrize("step", [mixed_precision_step, COMPILED], ids=["ops", "jit"])
@pytest.mark.parametrize(
    "vector", VECTORS, ids=[f"{i}_{v['name']}" for i, v in enumerate(VECTORS)]
)
def test_golden_step(vector, step):
    found, wanted = step(*arguments(vector["input"])), vector["expected"]
    near = dict(rtol=5e-6, atol=1e-6)
    np.testing.assert_allclose(found["loss"], floats(wanted["loss"]), **near)
    for name, value in wanted["params"].items():
        np.testing.assert_allclose(found["params"][name], floats(value), **near)
        assert found["params"][name].dtype == jnp.float32
        if not wanted["grads_finite"]:
            before = floats(vector["input"]["params"][name])
            assert np.asarray(found["params"][name]).tobytes() == before.tobytes()
    assert found["loss_scale"] == floats(wanted["loss_scale"])
    assert found["good_steps"] == wanted["good_steps"]
    assert bool(found["grads_finite"]) == wanted["grads_finite"]
    dtypes = [str(found[k].dtype) for k in ("loss", "loss_scale", "good_steps")]
    assert dtypes == ["float32", "float32", "int32"]
    assert found["grads_finite"].dtype == bool


def test_gradients_survive_a_scale_above_2_to_the_126():
    scale = StaticLossScale(1.6e38)
    grads = jax.jit(scale.unscale)({"w": jnp.float32([2.0**120, 1e30, 0])})
    wanted = np.array([2.0**120, 1e30, 0], np.float64) / np.float64(np.float32(1.6e38))
    np.testing.assert_allclose(grads["w"], wanted, rtol=3e-7)


@pytest.mark.parametrize("scale", [0.3, 1.0, 777.25, 2.0**63, 3e20, 3e33])
def test_unscaling_is_division(scale):
    grads = np.float32([1e-3, 7, -3e4, np.inf, np.nan]) * np.float32(scale)
    found = jax.jit(StaticLossScale(scale).unscale)(grads)
    wanted = grads.astype(np.float64) / np.float64(np.float32(scale))
    np.testing.assert_allclose(found, wanted.astype(np.float32), rtol=4e-7)


def test_dynamic_scale_follows_its_rules():
    """Against the rules written out in plain Python, over random outcomes."""
    rng = np.random.default_rng(0)
    outcomes = rng.random(200) < 0.8
    scale = DynamicLossScale(64.0, growth_interval=3, factor=4.0, min_scale=0.5)
    s, n, update = 64.0, 0, jax.jit(lambda scale, finite: scale.update(finite))
    for finite in outcomes:
        scale = update(scale, finite)
        n = n + 1 if finite else 0
        if not finite:
            s = max(s / 4, 0.5)
        elif n >= 3:
            s, n = s * 4, 0
        assert (float(scale.loss_scale), int(scale.good_steps)) == (s, n)


def test_scale_that_cannot_double_is_kept():
    scale = DynamicLossScale(2.0**127, growth_interval=1).update(jnp.bool_(True))
    assert (float(scale.loss_scale), int(scale.good_steps)) == (2.0**127, 0)


def test_bad_steps_at_the_least_scale_are_counted():
    scale, counts = DynamicLossScale(2.0, growth_interval=9), []
    for finite in (False, False, False, True, False):
        scale = scale.update(jnp.bool_(finite))
        counts.append(int(scale.bad_steps_at_min))
    assert counts == [0, 1, 2, 0, 1]


def test_saved_scale_comes_back():
    scale = DynamicLossScale(8.0, growth_interval=5).update(jnp.bool_(True))
    again = DynamicLossScale(growth_interval=5).restored(scale.payload())
    assert jax.tree.structure(again) == jax.tree.structure(scale)
    assert list(map(float, jax.tree.leaves(again))) == [8.0, 1.0, 0.0]
    assert float(DynamicLossScale(4.0).restored({}).loss_scale) == 4.0
    assert isinstance(NoLossScale().restored({}), NoLossScale)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: DynamicLossScale(0.0), "init must be finite and above 0, got 0.0"),
        (lambda: DynamicLossScale(np.inf), "above 0, got inf"),
        (lambda: StaticLossScale(-2), "loss_scale must be .* got -2.0"),
        (lambda: DynamicLossScale(growth_interval=0), "growth_interval .* got 0"),
        (lambda: DynamicLossScale(factor=1.0), "factor must be above 1, got 1.0"),
        (lambda: DynamicLossScale(min_scale=0.0), "min_scale must be finite"),
    ],
)
def test_bad_numbers_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()
