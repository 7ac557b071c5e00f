"""Losses and metrics against float64 definitions, and the protocol of weights."""

import gin
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from retrax import layers as tl
from retrax.errors import LayerError
from retrax.layers.running import batch_context

RNG = np.random.default_rng(0)
LOGITS = RNG.normal(size=(6, 4, 5), scale=3).astype(np.float32)
TARGETS = RNG.integers(0, 5, size=(6, 4))
WEIGHTS = RNG.uniform(size=(6, 4)).astype(np.float32) * RNG.integers(0, 2, (6, 4))
VALUES = RNG.normal(size=(6, 4), scale=2).astype(np.float32)
TRUTH = RNG.normal(size=(6, 4), scale=2).astype(np.float32)
PROBABILITIES = RNG.uniform(0.01, 0.99, size=(6, 4)).astype(np.float32)
BITS = RNG.integers(0, 2, size=(6, 4))


def log_p(logits=LOGITS):
    x = logits.astype(np.float64)
    return x - np.log(np.exp(x).sum(-1, keepdims=True))


def cross_entropies(smoothing=0.0, cutoff=0.0, targets=TARGETS):
    q = np.eye(5)[targets] * (1 - smoothing) + smoothing / 5
    return np.maximum(-(q * log_p()).sum(-1), cutoff) - cutoff


def hits():
    return (LOGITS.argmax(-1) == TARGETS).astype(np.float64)


def mean(values, weights=None):
    return np.average(values, weights=weights)


def binary(p, t):
    return -(t * np.log(p) + (1 - t) * np.log(1 - p))


def smooth_l1(d):
    return np.where(np.abs(d) < 1, d**2 / 2, np.abs(d) - 0.5)


# Name: (layer, inputs, value, total weight or None if it emits none).
LOG_P = log_p().astype(np.float32)
SURE = LOGITS.argmax(-1)
CASES = {
    "CategoryAccuracy": (tl.CategoryAccuracy(), (LOGITS, TARGETS), mean(hits()), 24),
    "WeightedCategoryAccuracy": (
        tl.WeightedCategoryAccuracy(),
        (LOGITS, TARGETS, WEIGHTS),
        mean(hits(), WEIGHTS),
        WEIGHTS.sum(),
    ),
    "CategoryCrossEntropy": (
        tl.CategoryCrossEntropy(),
        (LOGITS, TARGETS),
        mean(cross_entropies()),
        24,
    ),
    "CategoryCrossEntropy smoothed": (
        tl.CategoryCrossEntropy(label_smoothing=0.1),
        (LOGITS, TARGETS),
        mean(cross_entropies(0.1)),
        24,
    ),
    "WeightedCategoryCrossEntropy": (
        tl.WeightedCategoryCrossEntropy(),
        (LOGITS, TARGETS, WEIGHTS),
        mean(cross_entropies(), WEIGHTS),
        WEIGHTS.sum(),
    ),
    "WeightedCategoryCrossEntropy smoothed, cut off": (
        tl.WeightedCategoryCrossEntropy(label_smoothing=0.2, cutoff=1.5),
        (LOGITS, TARGETS, WEIGHTS),
        mean(cross_entropies(0.2, 1.5), WEIGHTS),
        WEIGHTS.sum(),
    ),
    "BinaryCrossEntropy": (
        tl.BinaryCrossEntropy(),
        (VALUES, BITS),
        mean(binary(1 / (1 + np.exp(-VALUES.astype(np.float64))), BITS)),
        24,
    ),
    "MaskedSequenceAccuracy": (
        tl.MaskedSequenceAccuracy(),
        (LOGITS, np.where(WEIGHTS[:, :1] > 0.1, SURE, TARGETS), WEIGHTS),
        mean(
            (
                (np.where(WEIGHTS[:, :1] > 0.1, SURE, TARGETS) == SURE) | (WEIGHTS == 0)
            ).all(-1)
        ),
        6,
    ),
    "Accuracy": (
        tl.Accuracy(),
        (LOGITS, TARGETS, WEIGHTS),
        mean(hits(), WEIGHTS),
        WEIGHTS.sum(),
    ),
    "Accuracy by threshold": (
        tl.Accuracy(tl.ThresholdToBinary()),
        (PROBABILITIES, BITS, WEIGHTS),
        mean((PROBABILITIES > 0.5) == BITS, WEIGHTS),
        WEIGHTS.sum(),
    ),
    "SequenceAccuracy": (
        tl.SequenceAccuracy(),
        (LOGITS, np.where(WEIGHTS[:, :1] > 0.1, SURE, TARGETS), WEIGHTS),
        mean(
            (
                (np.where(WEIGHTS[:, :1] > 0.1, SURE, TARGETS) == SURE) | (WEIGHTS == 0)
            ).all(-1)
        ),
        6,
    ),
    "CrossEntropyLoss": (
        tl.CrossEntropyLoss(),
        (LOG_P, TARGETS, WEIGHTS),
        mean(cross_entropies(), WEIGHTS),
        WEIGHTS.sum(),
    ),
    "CrossEntropyLossWithLogSoftmax": (
        tl.CrossEntropyLossWithLogSoftmax(),
        (LOGITS, TARGETS, WEIGHTS),
        mean(cross_entropies(), WEIGHTS),
        WEIGHTS.sum(),
    ),
    "BinaryCrossEntropyLoss": (
        tl.BinaryCrossEntropyLoss(),
        (PROBABILITIES, BITS, WEIGHTS),
        mean(binary(PROBABILITIES.astype(np.float64), BITS), WEIGHTS),
        WEIGHTS.sum(),
    ),
    "L2Loss": (
        tl.L2Loss(),
        (VALUES, TRUTH, WEIGHTS),
        mean((VALUES - TRUTH) ** 2, WEIGHTS),
        WEIGHTS.sum(),
    ),
    "SmoothL1Loss": (
        tl.SmoothL1Loss(),
        (VALUES, TRUTH, WEIGHTS),
        mean(smooth_l1(VALUES - TRUTH), WEIGHTS),
        WEIGHTS.sum(),
    ),
    "WeightedSum": (
        tl.WeightedSum(),
        (VALUES, WEIGHTS),
        (VALUES * WEIGHTS).sum(),
        None,
    ),
    "CrossEntropySum": (
        tl.CrossEntropySum(),
        (LOG_P, TARGETS, WEIGHTS),
        (cross_entropies() * WEIGHTS).sum(),
        None,
    ),
    "BinaryCrossEntropySum": (
        tl.BinaryCrossEntropySum(),
        (PROBABILITIES, BITS, WEIGHTS),
        (binary(PROBABILITIES.astype(np.float64), BITS) * WEIGHTS).sum(),
        None,
    ),
}
MEANS = [name for name, case in CASES.items() if case[3] is not None]


def apply(layer, inputs, mask=None):
    """Returns (value, emitted weights)."""
    weights, state = layer.init(jax.tree.map(jnp.asarray, inputs))
    with batch_context(None, mask):
        y, _, emitted = layer.apply(inputs, weights, state, None)
    return y, [value for name, value in emitted if name == "weight"]


@pytest.mark.parametrize("name", CASES)
def test_value_and_weight_are_those_of_the_definition(name):
    layer, inputs, value, weight = CASES[name]
    y, emitted = apply(layer, inputs)
    assert y.shape == () and y.dtype == jnp.float32
    np.testing.assert_allclose(y, value, rtol=2e-5)
    if weight is None:
        assert emitted == []
    else:
        assert len(emitted) == 1 and emitted[0].dtype == jnp.float32
        np.testing.assert_allclose(emitted[0], weight, rtol=1e-6)


@pytest.mark.parametrize("name", CASES)
def test_arity_and_print_are_traxs(name):
    layer, inputs, _, _ = CASES[name]
    assert layer.n_in == len(inputs) and layer.n_out == 1
    assert str(layer) == f"{name.split()[0]}_in{layer.n_in}"


@pytest.mark.parametrize("name", CASES)
def test_padded_rows_do_not_count(name):
    layer, inputs, _, _ = CASES[name]
    mask = jnp.array([1.0, 0.0, 1.0, 1.0, 0.0, 1.0])
    real = np.asarray(mask) == 1
    wanted, wanted_weight = apply(layer, jax.tree.map(lambda a: a[real], inputs))
    y, weight = apply(layer, inputs, mask)
    np.testing.assert_allclose(y, wanted, rtol=1e-5)
    np.testing.assert_allclose(weight, wanted_weight, rtol=1e-6)


@pytest.mark.parametrize("name", MEANS)
def test_parts_of_a_batch_combine_to_the_whole(name):
    layer, inputs, value, _ = CASES[name]
    parts = [
        apply(layer, jax.tree.map(lambda a, s=s: a[s], inputs))
        for s in (slice(0, 1), slice(1, 6))
    ]
    total = sum(w[0] for _, w in parts)
    combined = sum(y * w[0] for y, w in parts) / total
    np.testing.assert_allclose(combined, value, rtol=2e-5)


@pytest.mark.parametrize("name", MEANS)
def test_a_mask_of_other_rows_emits_no_weight(name):
    layer, inputs, value, _ = CASES[name]
    y, weight = apply(layer, inputs, jnp.array([1.0, 0.0]))
    np.testing.assert_allclose(y, value, rtol=2e-5)
    assert weight == []


@pytest.mark.parametrize("name", [n for n in MEANS if len(CASES[n][1]) == 3])
def test_the_mean_of_nothing_is_zero_and_so_is_its_gradient(name):
    layer, (x, t, w), _, _ = CASES[name]
    weights, state = layer.init(jax.tree.map(jnp.asarray, (x, t, w)))
    mask = jnp.zeros(6)  # Sequence accuracies heed the mask but not the weights.

    def value(x):
        with batch_context(None, mask):
            return layer.pure_fn((x, t, 0 * w), weights, state, None)[0]

    y, grad = jax.value_and_grad(value)(jnp.asarray(x))
    assert y == 0
    np.testing.assert_array_equal(grad, np.zeros_like(x))


@pytest.mark.parametrize("name", CASES)
def test_gradients_of_half_precision_inputs_are_finite(name):
    layer, (x, *rest), value, _ = CASES[name]
    weights, state = layer.init(jax.tree.map(jnp.asarray, (x, *rest)))

    def loss(x):
        return layer.pure_fn((x, *rest), weights, state, None)[0]

    y, grad = jax.value_and_grad(loss)(jnp.asarray(x, jnp.bfloat16))
    assert y.dtype == jnp.float32 and grad.dtype == jnp.bfloat16
    assert np.isfinite(np.asarray(grad, np.float32)).all()


# --- Cross-entropies ----------------------------------------------------------------


@pytest.mark.parametrize("scale", [1.0, 100.0])
def test_cross_entropy_and_gradient_are_those_of_optax(scale):
    x, layer = jnp.asarray(LOGITS * scale), tl.CategoryCrossEntropy()

    def ours(x):
        return layer.pure_fn((x, TARGETS), (), (), None)[0]

    def theirs(x):
        losses = optax.softmax_cross_entropy_with_integer_labels(x, TARGETS)
        return losses.mean()

    y, grad = jax.value_and_grad(ours)(x)
    wanted, wanted_grad = jax.value_and_grad(theirs)(x)
    np.testing.assert_allclose(y, wanted, rtol=1e-5)
    np.testing.assert_allclose(grad, wanted_grad, atol=1e-7)


def test_cross_entropy_is_exact_for_large_equal_scores():
    x = np.full((1, 5), 1e7, np.float32)
    x[0, 1] += 2.0
    wanted = np.log(4 + np.exp(2.0)) - 2.0
    y = tl.CategoryCrossEntropy()((x, np.array([1])))
    np.testing.assert_allclose(y, wanted, rtol=1e-6)


def test_scores_of_minus_infinity_rule_categories_out():
    x = np.array([[0.0, -np.inf, 0.0]], np.float32)
    loss = tl.CategoryCrossEntropy()
    np.testing.assert_allclose(loss((x, np.array([0]))), np.log(2), rtol=1e-6)
    assert loss((x, np.array([1]))) == np.inf


def test_targets_that_are_no_category_have_no_loss_as_in_trax():
    targets = np.where(TARGETS == 2, -1, np.where(TARGETS == 3, 7, TARGETS))
    values = np.where(np.isin(TARGETS, [2, 3]), 0, cross_entropies())
    y = tl.CategoryCrossEntropy()((LOGITS, targets))
    np.testing.assert_allclose(y, values.mean(), rtol=1e-5)
    y = tl.CrossEntropyLoss()((LOG_P, targets, WEIGHTS))
    np.testing.assert_allclose(y, np.average(values, weights=WEIGHTS), rtol=1e-5)


def test_elements_without_weight_may_be_non_finite():
    x = VALUES.copy()
    x[WEIGHTS == 0] = np.nan
    wanted = np.average((VALUES - TRUTH) ** 2, weights=WEIGHTS)
    np.testing.assert_allclose(tl.L2Loss()((x, TRUTH, WEIGHTS)), wanted, rtol=1e-5)


def test_binary_cross_entropy_stays_finite_where_the_sigmoid_rounds():
    x = np.array([-200.0, 200.0], np.float32)
    loss = tl.BinaryCrossEntropy()
    assert loss((x, np.array([0.0, 1.0]))) == 0
    np.testing.assert_allclose(loss((x, np.array([1.0, 0.0]))), 200.0)


def test_binary_cross_entropy_of_sure_probabilities_is_finite():
    p, t = np.array([0.0, 1.0], np.float32), np.array([0, 1])
    loss = tl.BinaryCrossEntropyLoss()
    assert 0 <= loss((p, t, np.ones(2))) < 1e-6
    assert 15 < loss((p, 1 - t, np.ones(2))) < 17


def test_functions_are_the_layers():
    pairs = [
        (tl.category_accuracy(LOGITS, TARGETS), "CategoryAccuracy"),
        (tl.category_cross_entropy(LOGITS, TARGETS), "CategoryCrossEntropy"),
        (
            tl.category_cross_entropy(LOGITS, TARGETS, 0.1),
            "CategoryCrossEntropy smoothed",
        ),
        (
            tl.weighted_category_accuracy(LOGITS, TARGETS, WEIGHTS),
            "WeightedCategoryAccuracy",
        ),
        (
            tl.weighted_category_cross_entropy(LOGITS, TARGETS, WEIGHTS),
            "WeightedCategoryCrossEntropy",
        ),
        (
            tl.weighted_category_cross_entropy(LOGITS, TARGETS, WEIGHTS, 0.2, 1.5),
            "WeightedCategoryCrossEntropy smoothed, cut off",
        ),
    ]
    for y, name in pairs:
        np.testing.assert_allclose(y, CASES[name][2], rtol=2e-5)


# --- F-scores -----------------------------------------------------------------------


def f_scores(predictions, targets, beta, first, n):
    """F of each category by its definition, and numbers of targets."""
    scores, counts = [], []
    for k in range(first, n):
        n_hits = ((predictions == k) & (targets == k)).sum()
        n_predicted, n_targets = (predictions == k).sum(), (targets == k).sum()
        p = n_hits / n_predicted if n_predicted else 0.0
        r = n_hits / n_targets if n_targets else 0.0
        below = beta**2 * p + r
        scores.append((1 + beta**2) * p * r / below if below else 0.0)
        counts.append(n_targets)
    return np.array(scores), np.array(counts)


@pytest.mark.parametrize("beta, first", [(1.0, 0), (2.0, 1), (0.5, 2)])
@pytest.mark.parametrize("masked", [False, True])
def test_f_scores_are_their_definition(beta, first, masked):
    rng = np.random.default_rng(1)
    x = rng.normal(size=(30, 6)).astype(np.float32)
    x[:, 4] = -10.0  # Never predicted.
    targets = np.where(rng.random(30) < 0.5, x.argmax(-1), rng.integers(0, 5, 30))
    real = np.arange(30) < (20 if masked else 30)
    mask = jnp.asarray(real, jnp.float32) if masked else None
    scores, counts = f_scores(x.argmax(-1)[real], targets[real], beta, first, 6)
    y, emitted = apply(tl.MacroAveragedFScore(beta, first), (x, targets), mask)
    np.testing.assert_allclose(y, scores.mean(), rtol=1e-5)
    assert emitted == []
    y, emitted = apply(tl.WeightedFScore(beta, first), (x, targets), mask)
    np.testing.assert_allclose(y, np.average(scores, weights=counts), rtol=1e-5)
    assert emitted == []


def test_f_scores_are_those_of_scikit_learn():
    metrics = pytest.importorskip("sklearn.metrics")
    x, targets = LOGITS.reshape(-1, 5), TARGETS.reshape(-1)
    for beta in (0.5, 1.0, 2.0):
        for layer, average in (
            (tl.MacroAveragedFScore(beta), "macro"),
            (tl.WeightedFScore(beta), "weighted"),
        ):
            wanted = metrics.fbeta_score(
                targets, x.argmax(-1), beta=beta, average=average, zero_division=0
            )
            np.testing.assert_allclose(layer((x, targets)), wanted, rtol=1e-5)


def test_weighted_f_score_of_no_counted_target_is_zero():
    x, targets = np.eye(3, dtype=np.float32), np.zeros(3, np.int32)
    assert tl.WeightedFScore(initial_category_index=1)((x, targets)) == 0
    with pytest.raises(LayerError, match="3 leaves none of 3 categories"):
        tl.MacroAveragedFScore(initial_category_index=3)((x, targets))


# --- Values recorded from Trax 1.4.1 ------------------------------------------------

TRAX_LOGITS = np.array(
    [[1.0, 2.0, -1.0], [0.0, 0.5, 3.0], [1.0, 1.5, 0.2], [3.0, 2.0, 1.0]], np.float32
)
TRAX_INPUTS = (TRAX_LOGITS, np.array([1, 2, 0, 0]), np.array([1.0, 0.5, 0.0, 2.0]))
TRAX_PREDICTED = np.eye(3, dtype=np.float32)[[1, 2, 0, 0, 1, 2, 1]]
TRAX_F_INPUTS = (TRAX_PREDICTED, np.array([1, 2, 1, 0, 0, 2, 1]))


@pytest.mark.parametrize(
    "layer, inputs, value",
    [
        (tl.CategoryAccuracy(), TRAX_INPUTS[:2], 0.75),
        (tl.CategoryCrossEntropy(), TRAX_INPUTS[:2], 0.5028160214424133),
        (tl.CategoryCrossEntropy(0.1), TRAX_INPUTS[:2], 0.6094827055931091),
        (tl.WeightedCategoryCrossEntropy(), TRAX_INPUTS, 0.35033154487609863),
        (tl.WeightedCategoryCrossEntropy(0.1), TRAX_INPUTS, 0.4717601239681244),
        (
            tl.WeightedCategoryCrossEntropy(cutoff=0.3),
            TRAX_INPUTS,
            0.07549253851175308,
        ),
        (tl.CrossEntropyLoss(), TRAX_INPUTS, -2.7142856121063232),
        (tl.CrossEntropySum(), TRAX_INPUTS, -9.5),
        (tl.MacroAveragedFScore(), TRAX_F_INPUTS, 0.7222222685813904),
        (
            tl.MacroAveragedFScore(initial_category_index=1),
            TRAX_F_INPUTS,
            0.8333333730697632,
        ),
        (tl.WeightedFScore(0.5), TRAX_F_INPUTS, 0.7142857313156128),
    ],
    ids=repr,
)
def test_values_are_traxs(layer, inputs, value):
    np.testing.assert_allclose(layer(inputs), value, rtol=1e-5, atol=1e-7)


# --- Mistakes -----------------------------------------------------------------------


@pytest.mark.parametrize(
    "targets, text",
    [
        (
            np.zeros((32, 1), np.int32),
            r"targets have shape \(32, 1\) but the outputs \(32, 10\) ask for \(32,\); "
            r"drop the last axis: np.squeeze",
        ),
        (np.zeros((32, 10), np.int32), r"np.argmax\(targets, -1\)"),
        (np.zeros((16,), np.int32), r"\(16,\) but the outputs \(32, 10\)"),
        (np.zeros((32,), np.float32), "must be integers .*, got float32"),
    ],
)
@pytest.mark.parametrize(
    "layer",
    [
        tl.CategoryCrossEntropy(),
        tl.CategoryAccuracy(),
        tl.MacroAveragedFScore(),
        tl.WeightedCategoryCrossEntropy(),
        tl.CrossEntropyLoss(),
    ],
    ids=repr,
)
def test_targets_that_do_not_fit_are_refused(layer, targets, text):
    inputs = (np.zeros((32, 10), np.float32), targets, np.ones(32))[: layer.n_in]
    with pytest.raises(LayerError, match=text):
        layer(inputs)


@pytest.mark.parametrize(
    "weights, text",
    [
        (np.ones(6), r"shape \(6,\) but the targets ask for \(6, 4\).*weights\[..., N"),
        (np.ones(4), r"shape \(4,\) .* give one weight for each target"),
        (np.ones((6, 4, 1)), r"shape \(6, 4, 1\)"),
        (np.ones((6, 3)), r"shape \(6, 3\)"),
    ],
)
def test_weights_that_do_not_fit_are_refused(weights, text):
    with pytest.raises(LayerError, match=text):
        tl.WeightedCategoryCrossEntropy()((LOGITS, TARGETS, weights))


@pytest.mark.parametrize("shape", [(), (6, 1), (1, 4)])
def test_weights_are_broadcast_and_counted_by_element(shape):
    weights = np.full(shape, 0.5, np.float32)
    y, (total,) = apply(tl.L2Loss(), (VALUES, TRUTH, weights))
    np.testing.assert_allclose(y, ((VALUES - TRUTH) ** 2).mean(), rtol=1e-5)
    assert total == 12


@pytest.mark.parametrize(
    "layer", [tl.L2Loss(), tl.SmoothL1Loss(), tl.BinaryCrossEntropyLoss()], ids=repr
)
def test_shapes_of_outputs_and_targets_must_agree(layer):
    with pytest.raises(LayerError, match=r"\(6,\) but the outputs \(6, 1\)"):
        layer((np.full((6, 1), 0.5, np.float32), np.ones(6), np.ones((6, 1))))


@pytest.mark.parametrize(
    "make, text",
    [
        (lambda: tl.CategoryCrossEntropy(1.5), r"\[0, 1\], got 1.5"),
        (lambda: tl.WeightedCategoryCrossEntropy(-0.1), r"\[0, 1\], got -0.1"),
        (lambda: tl.WeightedCategoryCrossEntropy(cutoff=-1.0), "got -1.0"),
    ],
)
def test_settings_out_of_range_are_refused(make, text):
    with pytest.raises(ValueError, match=text):
        make()


def test_gin_sets_the_smoothing():
    gin.clear_config()
    try:
        gin.parse_config("WeightedCategoryCrossEntropy.label_smoothing = 0.1")
        y = tl.WeightedCategoryCrossEntropy()((LOGITS, TARGETS, WEIGHTS))
        wanted = np.average(cross_entropies(0.1), weights=WEIGHTS)
        np.testing.assert_allclose(y, wanted, rtol=1e-5)
    finally:
        gin.clear_config()
