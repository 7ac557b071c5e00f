"""Schedules against numbers worked out by hand, and against Optax."""

import math

import gin
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from retrax.supervised import lr_schedules as lr


def test_constant():
    assert lr.constant(0.25)(1) == 0.25
    assert lr.constant(0.25)(10**9) == 0.25


def test_warmup():
    schedule = lr.warmup(4, 10.0)
    got = [schedule(step) for step in (1, 2, 4, 5, 6, 1000)]
    assert got == pytest.approx([2.0, 4.0, 8.0, 10.0, 10.0, 10.0])


def test_no_warmup():
    assert lr.warmup(0, 10.0)(1) == 10.0


def test_warmup_and_rsqrt_decay():
    schedule = lr.warmup_and_rsqrt_decay(3, 8.0)
    got = [schedule(step) for step in (1, 3, 4, 16, 64)]
    assert got == pytest.approx([2.0, 6.0, 8.0, 4.0, 2.0])


@pytest.mark.parametrize("minimum", [0.0, 0.01])
@pytest.mark.parametrize("n_warmup", [0, 5])
def test_warmup_cosine_is_that_of_optax(n_warmup, minimum):
    ours = lr.warmup_cosine(n_warmup, 0.3, 20, minimum)
    theirs = optax.warmup_cosine_decay_schedule(0.0, 0.3, n_warmup + 1, 20, minimum)
    for step in range(1, 30):
        assert ours(step) == pytest.approx(float(theirs(step)), rel=1e-5, abs=1e-7)


MULTIFACTOR = [
    # the default: 0.1 * min(1, s / 400) / sqrt(max(s, 400))
    ({}, {1: 0.1 / 400 / 20, 200: 0.1 * 0.5 / 20, 400: 0.1 / 20, 1600: 0.1 / 40}),
    ({"factors": "constant", "constant": 0.7}, {1: 0.7, 10**7: 0.7}),
    (
        {"factors": "constant*linear_warmup", "constant": 2.0, "warmup_steps": 8},
        {1: 0.25, 4: 1.0, 8: 2.0, 9: 2.0},
    ),
    ({"factors": "linear_warmup", "warmup_steps": 0}, {1: 1.0}),
    (
        {
            "factors": "two_constants",
            "constant": 3.0,
            "second_constant": 0.5,
            "second_constant_step": 10,
        },
        {9: 3.0, 10: 0.5, 11: 0.5},
    ),
    ({"factors": "rsqrt_decay", "warmup_steps": 4}, {1: 0.5, 4: 0.5, 25: 0.2}),
    ({"factors": "rsqrt_decay", "warmup_steps": 0}, {1: 1.0, 25: 0.2}),
    (
        {"factors": "rsqrt_normalized_decay", "warmup_steps": 4},
        {1: 1.0, 4: 1.0, 16: 0.5, 100: 0.2},
    ),
    (
        {"factors": "decay_every", "decay_factor": 0.1, "steps_per_decay": 10},
        {1: 1.0, 9: 1.0, 10: 0.1, 19: 0.1, 20: 0.01},
    ),
    (
        {"factors": "cosine_decay", "warmup_steps": 10, "steps_per_cycle": 100},
        # quarter, half, three quarters, then a new cycle
        {5: 1.0, 10: 1.0, 35: 0.5 + math.sqrt(0.125), 60: 0.5, 110: 1.0, 160: 0.5},
    ),
    (
        {
            "factors": "constant * linear_warmup * cosine_decay * decay_every",
            "constant": 4.0,
            "warmup_steps": 20,
            "steps_per_cycle": 40,
            "decay_factor": 0.5,
            "steps_per_decay": 30,
        },
        {10: 2.0, 20: 4.0, 40: 4.0 * 0.5 * 0.5},
    ),
    (
        {"factors": "constant * rsqrt_decay", "warmup_steps": 1, "minimum": 0.05},
        {1: 0.1, 4: 0.05, 10000: 0.05},
    ),
]


@pytest.mark.parametrize(("arguments", "expected"), MULTIFACTOR)
def test_multifactor(arguments, expected):
    schedule = lr.multifactor(**arguments)
    got = {step: schedule(step) for step in expected}
    assert got == pytest.approx(expected, rel=1e-9, abs=1e-15)


SCHEDULES = [
    lr.constant(1),
    lr.warmup(5, 1),
    lr.warmup_and_rsqrt_decay(5, 1),
    lr.warmup_cosine(5, 1, 100),
    lr.multifactor(),
]


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("step", [3, 7, 10_000])
def test_any_integer_gives_a_python_float(schedule, step):
    values = [schedule(make(step)) for make in (int, np.int32, np.int64, jnp.int32)]
    assert {type(v) for v in values} == {float}
    assert len(set(values)) == 1


def test_unknown_factor_lists_the_known():
    with pytest.raises(ValueError, match="unknown factor 'linear'.*rsqrt_decay"):
        lr.multifactor("constant * linear")
    with pytest.raises(ValueError, match="unknown factor ''"):
        lr.multifactor("constant *")


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: lr.warmup(-1, 1.0), "n_warmup_steps is -1"),
        (lambda: lr.warmup_cosine(10, 1.0, 11), "n_steps is 11.*give n_steps > 11"),
        (lambda: lr.multifactor(warmup_steps=-1), "warmup_steps is -1"),
        (lambda: lr.multifactor("decay_every", steps_per_decay=0), "steps_per_decay"),
        (lambda: lr.multifactor("cosine_decay", steps_per_cycle=0), "steps_per_cycle"),
    ],
)
def test_counts_that_make_no_sense(make, words):
    with pytest.raises(ValueError, match=words):
        make()


def test_gin_names():
    gin.clear_config()
    try:
        gin.parse_config(
            "multifactor.factors = 'constant'\n"
            "lr_schedules.multifactor.constant = 0.5\n"
            "retrax.supervised.lr_schedules.warmup.max_value = 2.0"
        )
        assert lr.multifactor()(1) == 0.5
        assert lr.warmup(n_warmup_steps=0)(1) == 2.0
    finally:
        gin.clear_config()
