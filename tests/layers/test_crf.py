"""CRF by enumeration of all sequences of tags."""

import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from retrax import layers as tl
from retrax.errors import LayerError
from retrax.layers.running import batch_context
from retrax.shapes import ShapeDtype

N_TAGS, LENGTH = 3, 4
MASKS = list(itertools.product((0, 1), repeat=LENGTH))


def random(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def score(scores, transitions, tags, mask):
    """The score of one sequence, position by position."""
    total, before = 0.0, N_TAGS
    for t, tag in enumerate(tags):
        if mask[t]:
            total += float(scores[t, tag]) + float(transitions[before, tag])
            before = tag
    return total


def enumerated(scores, transitions, mask):
    """All sequences of tags (0 where masked) with their scores."""
    choices = [range(N_TAGS) if m else (0,) for m in mask]
    return {
        tags: score(scores, transitions, tags, mask)
        for tags in itertools.product(*choices)
    }


def setting(seed=0):
    scores = random(len(MASKS), LENGTH, N_TAGS, seed=seed) * 2
    transitions = random(N_TAGS + 1, N_TAGS, seed=seed + 1) * 2
    potentials, _ = tl.CRF().pure_fn(scores, transitions, (), None)
    return scores, transitions, potentials


def test_likelihood_is_that_of_enumeration_for_every_mask():
    scores, transitions, potentials = setting()
    mask = np.array(MASKS)
    tags = np.random.default_rng(5).integers(0, N_TAGS, mask.shape)
    got = jax.jit(tl.crf_log_likelihood)(potentials, tags, mask)
    for row in range(len(MASKS)):
        every = enumerated(scores[row], transitions, mask[row])
        log_z = math.log(sum(math.exp(s) for s in every.values()))
        wanted = score(scores[row], transitions, tags[row], mask[row]) - log_z
        np.testing.assert_allclose(got[row], wanted, rtol=1e-5, atol=1e-5)


def test_probabilities_of_all_sequences_sum_to_one():
    _, _, potentials = setting()
    every = np.array(list(itertools.product(range(N_TAGS), repeat=LENGTH)))
    same = jnp.broadcast_to(potentials[0], (len(every), *potentials.shape[1:]))
    logs = tl.crf_log_likelihood(same, every)
    np.testing.assert_allclose(np.exp(logs).sum(), 1, rtol=1e-5)


def test_viterbi_finds_the_best_sequence_for_every_mask():
    scores, transitions, potentials = setting(seed=3)
    tags, best = jax.jit(tl.viterbi)(potentials, np.array(MASKS, np.float32))
    assert tags.dtype == jnp.int32
    for row, mask in enumerate(MASKS):
        every = enumerated(scores[row], transitions, mask)
        wanted = max(every, key=lambda tags: every[tags])
        assert tuple(tags[row].tolist()) == wanted
        np.testing.assert_allclose(best[row], every[wanted], rtol=1e-5, atol=1e-5)


def test_no_mask_is_a_mask_of_ones():
    _, _, potentials = setting()
    tags, ones = np.zeros((len(MASKS), LENGTH), int), np.ones((len(MASKS), LENGTH))
    np.testing.assert_array_equal(
        tl.crf_log_likelihood(potentials, tags),
        tl.crf_log_likelihood(potentials, tags, ones),
    )
    a, b = tl.viterbi(potentials)[0], tl.viterbi(potentials, ones)[0]
    np.testing.assert_array_equal(a, b)


def test_loss_is_nats_per_tag_and_knows_its_weight():
    _, _, potentials = setting()
    mask = np.array(MASKS, np.float32)
    tags = np.ones(mask.shape, np.int32)
    loss, _, emitted = tl.CRFLoss().apply((potentials, tags, mask * 0.3), (), (), None)
    logs = np.asarray(tl.crf_log_likelihood(potentials, tags, mask), np.float64)
    np.testing.assert_allclose(loss, -logs.sum() / mask.sum(), rtol=1e-5)
    assert dict(emitted)["weight"] == mask.sum()
    rows = jnp.arange(len(MASKS)) < 9
    with batch_context(None, rows.astype(jnp.float32)):
        part = tl.CRFLoss()((potentials, tags, mask))
    np.testing.assert_allclose(part, -logs[:9].sum() / mask[:9].sum(), rtol=1e-5)


def test_accuracy_counts_tags_with_weight():
    _, _, potentials = setting()
    mask = np.array(MASKS, np.float32)
    best = np.array(tl.viterbi(potentials, mask)[0])
    wrong = best.copy()
    wrong[-1] = (wrong[-1] + 1) % N_TAGS  # the row without any masked position
    accuracy = tl.CRFAccuracy()((potentials, wrong, mask))
    np.testing.assert_allclose(accuracy, 1 - LENGTH / mask.sum(), rtol=1e-6)


def test_gradient_of_the_loss_is_expected_minus_observed_counts():
    scores, transitions, _ = setting()
    mask = np.array(MASKS, np.float32)
    tags = np.full(mask.shape, 2)

    def loss(scores, transitions):
        potentials, _ = tl.CRF().pure_fn(scores, transitions, (), None)
        return -tl.crf_log_likelihood(potentials, tags, mask).sum()

    got = jax.grad(loss, (0, 1))(scores, transitions)
    wanted = [np.zeros(scores.shape), np.zeros(transitions.shape)]

    def count(row, sequence, share):
        before = N_TAGS
        for t, tag in enumerate(sequence):
            if mask[row, t]:
                wanted[0][row, t, tag] += share
                wanted[1][before, tag] += share
                before = tag

    for row in range(len(MASKS)):
        every = enumerated(scores[row], transitions, mask[row])
        z = sum(math.exp(s) for s in every.values())
        for sequence, s in every.items():
            count(row, sequence, math.exp(s) / z)
        count(row, tags[row], -1)
    for a, b in zip(got, wanted, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


def test_masked_positions_may_hold_anything():
    scores, transitions, _ = setting()
    mask = np.array(MASKS, np.float32)
    tags = np.zeros(mask.shape, int)

    def loss(scores, tags):
        potentials, _ = tl.CRF().pure_fn(scores, transitions, (), None)
        return tl.crf_log_likelihood(potentials, tags, mask).sum()

    other = np.where(mask[..., None] > 0, scores, 1e4)
    a = jax.value_and_grad(loss)(scores, tags)
    b = jax.value_and_grad(loss)(other, np.where(mask > 0, tags, -7))
    np.testing.assert_allclose(a[0], b[0], rtol=1e-6)
    np.testing.assert_allclose(a[1], b[1], rtol=1e-5, atol=1e-6)


def test_it_learns_what_follows_what():
    """Tags alternate and the scores say nothing but the first one."""
    tags = np.array([[0, 1, 0, 1, 0, 1], [1, 0, 1, 0, 1, 0]])
    scores = np.zeros((2, 6, 2), np.float32)
    scores[:, 0] = np.eye(2) * 4
    layer = tl.CRF()
    weights, _ = layer.init(ShapeDtype(scores.shape), rng=jax.random.key(0))

    @jax.jit
    def step(w):
        def loss(w):
            return -tl.crf_log_likelihood(layer.pure_fn(scores, w, (), None)[0], tags)

        return w - 0.5 * jax.grad(lambda w: loss(w).mean())(w)

    for _ in range(30):
        weights = step(weights)
    best, _ = tl.viterbi(layer.pure_fn(scores, weights, (), None)[0])
    np.testing.assert_array_equal(best, tags)


def test_it_refuses():
    _, _, potentials = setting()
    tags = np.zeros(potentials.shape[:2], int)
    with pytest.raises(ValueError, match=r"\(16, 4, 4\); end the model with CRF"):
        tl.viterbi(potentials[..., 0])
    with pytest.raises(ValueError, match=r"tags have shape \(16, 3\)"):
        tl.crf_log_likelihood(potentials, tags[:, 1:])
    with pytest.raises(ValueError, match=r"mask or weights have shape \(4,\)"):
        tl.viterbi(potentials, np.ones(4))
    with pytest.raises(ValueError, match=r"\[0, 3\), got 5"):
        tl.crf_log_likelihood(potentials, tags + 5)
    with pytest.raises(TypeError, match="float64"):
        tl.crf_log_likelihood(potentials, tags * 1.0)
    with pytest.raises(LayerError, match=r"got \(2, 3\)"):
        tl.CRF().init(ShapeDtype((2, 3)))
