"""Choosing tokens, against counts, sorted lists and the stated rules."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from retrax.supervised import sampling

N_DRAWS = 20_000
P = np.array([0.05, 0.4, 0.1, 0.3, 0.15])


def draw(t=0, seed=0, logits=None, n_rows=N_DRAWS, **kwargs):
    rule, values = sampling.rule_and_values(**kwargs)
    logits = np.log(P) if logits is None else logits
    rows = jnp.broadcast_to(jnp.asarray(logits, jnp.float32), (n_rows, len(logits)))
    keys = sampling.keys_of(jax.random.key(seed), t, n_rows)[0]
    choose = jax.jit(lambda x, k, v: sampling.next_tokens(x, k, t, rule, v))
    return np.asarray(choose(rows, keys, values))


def check_counts(tokens, p):
    """Five standard deviations around what is expected; nothing where p is 0."""
    counts = np.bincount(tokens, minlength=len(p))
    expected, deviation = N_DRAWS * p, np.sqrt(N_DRAWS * p * (1 - p))
    assert (counts[p == 0] == 0).all()
    np.testing.assert_array_less(np.abs(counts - expected), 5 * deviation + 1e-9)


def renormalised(keep, p=P):
    p = np.where(np.isin(np.arange(len(p)), keep), p, 0)
    return p / p.sum()


def test_counts_follow_the_probabilities():
    check_counts(draw(), P)


def test_temperature_divides_the_logits():
    check_counts(draw(temperature=0.5), P**2 / np.sum(P**2))


def test_top_k_draws_from_the_k_most_probable():
    check_counts(draw(top_k=2), renormalised([1, 3]))
    check_counts(draw(top_k=99), P)


@pytest.mark.parametrize(
    ("top_p", "keep"),
    [(0.39, [1]), (0.5, [1, 3]), (0.69, [1, 3]), (0.71, [1, 3, 4]), (1.0, range(5))],
)
def test_top_p_draws_from_the_fewest_with_that_probability(top_p, keep):
    check_counts(draw(top_p=top_p), renormalised(keep))


def test_top_p_looks_at_what_temperature_and_top_k_leave():
    sharp = P**2 / np.sum(P**2)  # [1, 3] have 0.88 of it.
    check_counts(draw(top_p=0.85, temperature=0.5), renormalised([1, 3], sharp))
    # Two of all have 0.7 of the probability, and two of the best three have 0.82.
    check_counts(draw(top_p=0.8), renormalised([1, 3, 4]))
    check_counts(draw(top_p=0.8, top_k=3), renormalised([1, 3]))


def test_temperature_0_takes_the_most_probable():
    assert set(draw(temperature=0, top_k=3, top_p=0.5, n_rows=9)) == {1}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_no_end_before_min_length(temperature):
    how = dict(eos_id=1, min_length=3, temperature=temperature)
    assert 1 not in draw(t=2, **how)
    assert 1 in draw(t=3, **how)


def test_a_row_draws_the_same_in_every_batch():
    many = draw(n_rows=16)
    assert len(set(many)) > 1
    np.testing.assert_array_equal(draw(n_rows=5), many[:5])


def test_steps_and_keys_draw_anew():
    first = draw(n_rows=50)
    np.testing.assert_array_equal(draw(n_rows=50), first)
    assert (draw(t=1, n_rows=50) != first).any()
    assert (draw(seed=1, n_rows=50) != first).any()


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("temperature", -0.5),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("top_k", 0),
        ("top_p", 0.0),
        ("top_p", 1.5),
        ("min_length", -2),
    ],
)
def test_arguments_out_of_range_are_refused(argument, value):
    with pytest.raises(ValueError, match=rf"{argument} must .*got {value}"):
        sampling.rule_and_values(**{argument: value})
