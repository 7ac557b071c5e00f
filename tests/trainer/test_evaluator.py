"""Evaluator against sums in NumPy, and what it must leave alone."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from retrax import layers as tl
from retrax.data.arrays import ArrayStream
from retrax.data.checks import checked
from retrax.errors import DataError
from retrax.shapes import signature
from retrax.trainer import Evaluator


def normal(seed, *shape):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def identity():
    model = tl.Serial()
    model.init(signature(np.zeros((1, 1), "f")))
    return model


def evaluate(evaluator, batches, model=None, **options):
    model = model or identity()
    return evaluator.evaluate(batches, model.weights, model.state, **options)


class Constant(tl.Layer):
    """Metric whose values are the outputs and whose weights are the targets."""

    def __init__(self, tell=True):
        super().__init__(n_in=2, name="Constant")
        self._tell = tell

    def forward(self, inputs):
        values, weights = inputs
        if self._tell:
            tl.emit("weight", jnp.sum(weights))
        return jnp.sum(values * weights) / jnp.sum(weights)


def batches_of(*pairs):
    return [
        (np.full((1, 1), value, np.float32), np.full((1, 1), weight, np.float32))
        for value, weight in pairs
    ]


def test_batches_count_by_their_weight():
    evaluator = Evaluator(identity(), {"mean": Constant()})
    assert evaluator.names == ["mean"]
    assert evaluate(evaluator, batches_of((0, 2), (1, 6))) == {"mean": 0.75}


def test_a_metric_that_tells_no_weight_counts_by_rows():
    batches = [
        (np.zeros((1, 1), "f"), np.ones((1, 1), "f")),
        (np.ones((3, 1), "f"), np.ones((3, 1), "f")),
    ]
    evaluator = Evaluator(identity(), {"mean": Constant(tell=False)})
    assert evaluate(evaluator, batches) == {"mean": 0.75}


def test_sums_are_exact_over_many_batches():
    pairs = [(1e8 if i == 0 else 1, 1) for i in range(3000)]
    got = evaluate(Evaluator(identity(), {"mean": Constant()}), batches_of(*pairs))
    assert got["mean"] == (1e8 + 2999) / 3000  # In float32 the ones would vanish.


def test_a_smaller_last_batch_counts_as_much_as_it_holds():
    model = tl.Serial(tl.Dense(4))
    x, q = normal(0, 10, 3), np.abs(normal(1, 10)) * np.arange(10, dtype=np.float32)
    labels = np.arange(10, dtype=np.int32) % 4
    model.init(signature(x), rng=jax.random.key(0))
    metrics = {
        "loss": tl.WeightedCategoryCrossEntropy(),
        "accuracy": tl.WeightedCategoryAccuracy(),
        "plain": tl.CategoryAccuracy(),
    }
    stream = ArrayStream((x, labels, q), 4, shuffle=False, repeat=False)
    got = evaluate(Evaluator(model, metrics), stream, model)

    w, b = (np.float64(a) for a in model.weights[0])
    scores = np.float64(x) @ w + b
    log_sum = np.log(np.exp(scores).sum(1))
    each = log_sum - scores[np.arange(10), labels]
    hits = scores.argmax(1) == labels
    assert 0 < hits.sum() < 10
    np.testing.assert_allclose(got["loss"], (each * q).sum() / q.sum(), rtol=1e-6)
    np.testing.assert_allclose(got["accuracy"], (hits * q).sum() / q.sum(), rtol=1e-6)
    np.testing.assert_allclose(got["plain"], hits.mean(), rtol=1e-6)


def test_n_batches_ends_early_and_reads_no_more_than_that():
    batches = iter(batches_of((0, 1), (1, 1), (7, 1)))
    evaluator = Evaluator(identity(), {"mean": Constant()})
    assert evaluate(evaluator, batches, n_batches=2) == {"mean": 0.5}
    assert next(batches)[0].item() == 7
    assert evaluate(evaluator, batches_of((3, 1)), n_batches=9) == {"mean": 3}


def test_nothing_that_weighs_anything_gives_0():
    batch = (np.ones((2, 1), "f"), np.ones((2, 1), "f"), np.zeros((2, 1), "f"))
    got = evaluate(Evaluator(identity(), {"loss": tl.L2Loss()}), [batch])
    assert got == {"loss": 0.0}


def test_nan_is_reported_and_not_hidden():
    got = evaluate(
        Evaluator(identity(), {"mean": Constant()}), batches_of((np.nan, 1), (1, 1))
    )
    assert np.isnan(got["mean"])


def test_an_empty_set_is_refused():
    with pytest.raises(DataError, match="no batch: is the evaluation set empty"):
        evaluate(Evaluator(identity(), {"mean": Constant()}), [])


@pytest.mark.parametrize("wrap", [lambda s: s, checked, lambda s: s.map(tuple)])
def test_a_stream_that_never_ends_needs_a_number_of_batches(wrap):
    stream = ArrayStream(batches_of((3, 1))[0], 1)
    evaluator = Evaluator(identity(), {"mean": Constant()})
    with pytest.raises(DataError, match="never ends: say how many batches"):
        evaluate(evaluator, wrap(stream))
    assert evaluate(evaluator, wrap(stream), n_batches=2) == {"mean": 3}


def test_metrics_see_the_models_outputs_and_the_rest_of_the_batch():
    class Sum(tl.Layer):
        def __init__(self):
            super().__init__(n_in=3)

        def forward(self, inputs):
            output, target, weight = inputs
            return jnp.sum(output + 10 * target + 100 * weight)

    model = tl.Serial(tl.Add())  # Two inputs, one output.
    ones = np.ones((1, 1), np.float32)
    batch = (ones, ones, 3 * ones, 4 * ones)
    got = evaluate(Evaluator(model, {"sum": Sum()}), [batch], model)
    assert got == {"sum": 2 + 30 + 400}


def test_a_metric_may_be_made_of_layers():
    metric = tl.Serial(tl.SubtractTop(), tl.Fn("Square", lambda x: x**2), tl.Mean(0))
    metric = tl.Serial(metric, tl.Fn("Item", lambda x: x[0]))
    got = evaluate(Evaluator(identity(), {"square": metric}), batches_of((1, 4)))
    assert got == {"square": 9.0}


def test_evaluation_neither_changes_state_nor_weights():
    model = tl.Serial(tl.BatchNorm(axis=0), tl.Dense(2))  # Even in mode 'train'.
    x = normal(0, 6, 3)
    model.init(signature(x), rng=jax.random.key(0))
    before = jax.tree.map(np.array, (model.weights, model.state))
    evaluator = Evaluator(model, {"accuracy": tl.CategoryAccuracy()})
    batch = (x, np.zeros(6, np.int32))
    first = evaluate(evaluator, [batch] * 2, model)
    assert evaluate(evaluator, [batch] * 2, model) == first
    for a, b in zip(
        jax.tree.leaves(before),
        jax.tree.leaves((model.weights, model.state)),
        strict=True,
    ):
        np.testing.assert_array_equal(a, b)


def test_layers_that_draw_in_evaluation_draw_the_same_each_time():
    class Noise(tl.Layer):
        def forward(self, x):
            return x + jax.random.uniform(self.rng, x.shape)

    evaluator = Evaluator(tl.Serial(Noise()), {"mean": Constant()})
    batches = batches_of((0, 1), (0, 1))

    def draw(key, i):
        return evaluate(evaluator, batches[: i + 1], tl.Serial(Noise()), rng=key)[
            "mean"
        ]

    key = jax.random.key(3)
    assert draw(key, 0) == draw(key, 0) != draw(jax.random.key(4), 0)
    assert draw(key, 1) != draw(key, 0)  # Each batch has a key of its own.


@pytest.mark.parametrize(
    ("metric", "expected"),
    [
        (tl.CategoryAccuracy, r"'acc' must be a layer.*instance: CategoryAccuracy\(\)"),
        (lambda y, t: 0, r"'acc' must be a layer.*got <function"),
        ("accuracy", "'acc' must be a layer, got 'accuracy'"),
    ],
)
def test_a_metric_must_be_a_layer(metric, expected):
    with pytest.raises(TypeError, match=expected):
        Evaluator(identity(), {"acc": metric})


def test_a_metric_of_three_inputs_on_a_batch_of_two_parts_says_what_is_missing():
    evaluator = Evaluator(identity(), {"acc": tl.WeightedCategoryAccuracy()})
    batch = (normal(0, 4, 3), np.zeros(4, np.int32))
    expected = (
        r"metric 'acc' \(WeightedCategoryAccuracy_in3\) takes 3 inputs.*are 2.*"
        "AddLossWeights"
    )
    with pytest.raises(DataError, match=expected):
        evaluate(evaluator, [batch])
