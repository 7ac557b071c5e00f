"""BERT: published number of weights, masks, heads, masked language model."""

import jax
import numpy as np
import pytest

from retrax import layers as tl
from retrax import models
from retrax.shapes import ShapeDtype

D, V = 8, 11
SMALL = dict(d_model=D, d_ff=16, n_layers=1, n_heads=2, max_len=16)


def n_weights(model, sig):
    weights, _ = model.weights_and_state_signature(sig)
    return sum(int(np.prod(w.shape)) for w in jax.tree.leaves(weights))


def run(model, x):
    return jax.jit(model.pure_fn)(x, model.weights, model.state, None)[0]


def inputs(length=5):
    ids = np.array([[5, 6, 7, 8, 0, 0, 0], [1, 2, 3, 4, 0, 0, 0]], np.int32)
    segments = np.array([[0, 0, 1, 1, 0, 0, 0], [0, 1, 1, 1, 0, 0, 0]], np.int32)
    return ids[:, :length], segments[:, :length], np.arange(2, dtype=np.int32)


def test_base_model_has_as_many_weights_as_published():
    """bert-base-uncased without its head for training: 109,482,240."""
    ids = ShapeDtype((1, 4), np.int32)
    model = models.BERT(scan_layers=True)
    assert n_weights(model, (ids, ids, ShapeDtype((1,), np.int32))) == 109_482_240


def test_padding_is_not_seen():
    model = models.BERT(vocab_size=V, **SMALL)
    model.init(inputs(), rng=jax.random.key(0))
    pooled, vectors = run(model, inputs(5))
    longer_pooled, longer = run(model, inputs(7))
    assert pooled.shape == (2, D) and vectors.shape == (2, 5, D)
    np.testing.assert_allclose(pooled, longer_pooled, atol=1e-5)
    np.testing.assert_allclose(vectors[:, :4], longer[:, :4], atol=1e-5)


def test_segments_and_later_ids_are_seen():
    model = models.BERT(vocab_size=V, **SMALL)
    ids, segments, idx = inputs()
    model.init(inputs(), rng=jax.random.key(0))
    pooled, _ = run(model, (ids, segments, idx))
    other_segments, _ = run(model, (ids, 1 - segments, idx))
    other_last, _ = run(model, (np.where(ids == 8, 9, ids), segments, idx))
    assert np.abs(pooled - other_segments).max() > 1e-4
    changed = np.abs(pooled - other_last).max(-1)
    assert changed[0] > 1e-5 and changed[1] == 0


@pytest.mark.parametrize(
    "head, shape",
    [
        (lambda: models.BERTClassifierHead(3), (2, 3)),
        (models.BERTRegressionHead, (2,)),
        (lambda: models.BERTMLMHead(V), (2, 5, V)),
    ],
)
def test_heads(head, shape):
    model = models.BERT(vocab_size=V, head=head, **SMALL)
    model.init(inputs(), rng=jax.random.key(0))
    assert run(model, inputs()).shape == shape


def test_pretraining_loss_is_the_sum_of_both():
    rng = np.random.default_rng(0)
    class_logits = rng.normal(size=(2, 3)).astype(np.float32)
    logits = rng.normal(size=(2, 5, V)).astype(np.float32)
    classes, ids = np.array([0, 2]), rng.integers(0, V, (2, 5))
    class_weights = np.ones(2, np.float32)
    weights = rng.integers(0, 2, (2, 5)).astype(np.float32)

    def entropy(logits, targets, weights):
        logits = logits.astype(np.float64)
        log_p = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        picked = np.take_along_axis(log_p, targets[..., None], -1)[..., 0]
        return -(picked * weights).sum() / weights.sum()

    got = models.BERTPretrainingLoss()(
        (class_logits, logits, classes, class_weights, ids, weights)
    )
    expected = entropy(class_logits, classes, class_weights)
    expected += entropy(logits, ids, weights)
    np.testing.assert_allclose(got, expected, rtol=1e-5)
    assert models.BERTPretrainingHead(3, V).n_out == 2


def test_masked_lm_sees_both_sides_but_no_padding():
    model = models.MaskedLM(V, mode="eval", **SMALL)
    ids = inputs(5)[0]
    model.init(ids, rng=jax.random.key(0))
    logits = run(model, ids)
    assert logits.shape == (2, 5, V)
    longer = run(model, inputs(7)[0])
    np.testing.assert_allclose(logits[:, :4], longer[:, :4], atol=1e-5)
    other = np.where(ids == 8, 9, ids)
    assert np.abs(logits - run(model, other))[0, 0].max() > 1e-5


def test_weights_of_masked_lm():
    model = models.MaskedLM(V, **{**SMALL, "n_layers": 3})
    block = 4 * (D * D + D) + (D * 16 + 16) + (16 * D + D) + 4 * D
    before = V * D + 16 * D + 2 * D
    after = (D * D + D) + 2 * D + (D * V + V)
    expected = before + 3 * block + after
    assert n_weights(model, ShapeDtype((2, 5), np.int32)) == expected


def test_normalization_comes_last_in_a_block():
    text = str(models.MaskedLM(V, **SMALL))
    assert text.index("PureAttention") < text.index("Gelu") < text.rindex("LayerNorm")
    assert isinstance(models.BERTClassifierHead(2), tl.Serial)
