"""Inputs: fresh streams, honest shapes, and no batch lost for looking."""

import gin
import numpy as np
import pytest

from retrax.data import inputs as inputs_module
from retrax.data.arrays import ArrayStream
from retrax.data.inputs import (
    Inputs,
    batcher,
    make_additional_stream,
    make_inputs,
    make_parallel_stream,
)
from retrax.data.pipeline import Batch, Shuffle


def numbers(start, n=3):
    return (
        (np.full((2, 5), i, np.int64), np.full(2, i)) for i in range(start, start + n)
    )


def firsts(stream, n=None):
    return [int(b[0].flat[0]) for b in (stream if n is None else stream.take(n))]


def test_the_three_streams_are_three_streams():
    inputs = Inputs(lambda _: numbers(0), lambda _: numbers(10), lambda _: numbers(20))
    for _ in range(2):
        assert firsts(inputs.train_stream(1)) == [0, 1, 2]
        assert firsts(inputs.eval_stream(1)) == [10, 11, 12]
        assert firsts(inputs.train_eval_stream(1)) == [20, 21, 22]


def test_absent_streams_are_the_training_stream():
    inputs = Inputs(lambda: numbers(0))
    assert (
        firsts(inputs.eval_stream()) == firsts(inputs.train_eval_stream()) == [0, 1, 2]
    )


def test_n_devices_arrives():
    inputs = Inputs(lambda n_devices: numbers(0, n_devices))
    assert firsts(inputs.train_stream(4)) == [0, 1, 2, 3]


ITERATOR = "one iterator"
SOURCES = {
    "function": lambda: lambda _: numbers(0),
    "iterator": lambda: numbers(0),
    "function of one iterator": lambda: (lambda it: lambda _: it)(numbers(0)),
    "list": lambda: list(numbers(0)),
    "stream": lambda: ArrayStream(np.arange(3), 1, shuffle=False, repeat=False),
    "function of a stream": lambda: (
        lambda _: ArrayStream(np.arange(3), 1, shuffle=False, repeat=False)
    ),
}


@pytest.mark.parametrize("name", list(SOURCES))
def test_looking_at_shapes_loses_no_batch(name):
    inputs = Inputs(SOURCES[name]())
    inputs.input_shape, inputs.example_shape_dtype  # noqa: B018
    assert firsts(inputs.train_stream(1)) == [0, 1, 2]
    inputs = Inputs(SOURCES[name]())
    stream = inputs.train_stream(8)
    inputs.input_shape  # noqa: B018
    assert firsts(stream) == [0, 1, 2]


def test_looking_makes_one_stream_only():
    calls = []

    def source(n_devices):
        calls.append(n_devices)
        return numbers(0)

    inputs = Inputs(source)
    assert calls == []
    inputs.input_shape, inputs.target_dtype  # noqa: B018
    inputs.train_stream(1)
    assert calls == [1]


def test_one_iterator_is_shared_and_loses_nothing():
    iterator = numbers(0, 6)
    inputs = Inputs(lambda _: iterator)
    assert inputs.input_shape == (5,)
    train, evaluation = inputs.train_stream(2), inputs.eval_stream(2)
    got = [next(train), next(evaluation), next(train)]
    assert [int(b[0][0, 0]) for b in got] == [0, 1, 2]


def test_a_stream_object_begins_anew_for_every_evaluation():
    stream = ArrayStream(np.arange(6), 2, shuffle=False, repeat=False)
    for source in (stream, lambda _: stream):
        inputs = Inputs(lambda: numbers(0), source)
        assert [firsts(inputs.eval_stream()) for _ in range(3)] == [[0, 2, 4]] * 3


def test_shapes_and_dtypes():
    x, y, w = np.zeros((4, 7, 2), np.float32), np.zeros((4, 3), np.int32), np.ones(4)
    inputs = Inputs(lambda: iter([(x, y, w)]))
    assert (inputs.input_shape, inputs.target_shape) == ((7, 2), (3,))
    assert (inputs.input_dtype, inputs.target_dtype) == (np.float32, np.int32)
    assert inputs.example_shape_dtype == (
        [(4, 7, 2), (4, 3), (4,)],
        [np.float32, np.int32, np.float64],
    )
    alone = Inputs([x])
    assert alone.target_shape == (7, 2)


def test_mistakes_are_named():
    with pytest.raises(
        TypeError, match="train_stream cannot read batches from NoneType"
    ):
        Inputs(None)
    with pytest.raises(TypeError, match="eval_stream cannot read batches from ndarray"):
        Inputs(lambda: numbers(0), np.zeros(3))
    with pytest.raises(ValueError, match="empty list"):
        Inputs([])
    with pytest.raises(ValueError, match="holds no batch"):
        Inputs(lambda: iter(())).input_shape  # noqa: B018


def examples():
    return ((np.full(n, n), np.full(n, n % 2)) for n in range(1, 6))


def test_make_inputs_joins_lists_and_runs_them_anew():
    inputs = make_inputs(
        [lambda _: examples(), Shuffle(2), Batch(2)], [examples, Batch(5)]
    )
    for _ in range(2):
        assert [len(b[0]) for b in inputs.train_stream(1)] == [2, 2, 1]
        assert next(inputs.eval_stream(1))[0].shape == (5, 5)
    plain = make_inputs(numbers(0), list(numbers(5)))
    assert firsts(plain.train_stream()) == [0, 1, 2]
    assert firsts(plain.eval_stream()) == [5, 6, 7]


def test_make_inputs_from_gin():
    config = """
        make_inputs.train_stream = [@test_source, @Batch()]
        retrax.data.Batch.batch_size = 4
    """
    gin.external_configurable(lambda _: examples(), "test_source", "tests")
    try:
        gin.parse_config(config)
        assert [len(b[0]) for b in make_inputs().train_stream()] == [4, 1]
    finally:
        gin.clear_config()


def test_additional_and_parallel_streams():
    stream = make_additional_stream([lambda _: examples(), Batch(3)])
    assert [len(b[0]) for b in stream] == [3, 2]
    mixed = make_parallel_stream([lambda _: numbers(0), lambda: numbers(10)], [1, 2])
    assert firsts(mixed, 6) == [0, 10, 11, 1, 12, 2]


def test_batcher_without_buckets():
    inputs = batcher(
        (examples, examples),
        variable_shapes=False,
        batch_size_per_device=1,
        eval_batch_size=4,
        id_to_mask=1,
    )
    train = list(inputs.train_stream(2))
    assert [b[0].shape for b in train] == [(2, 2), (2, 4), (1, 5)]
    x, y, weights = next(inputs.eval_stream(2))
    assert len(x) == 4 and weights.dtype == np.float32
    np.testing.assert_array_equal(weights, y != 1)
    assert len(next(inputs.train_eval_stream(2))[0]) == 4


def test_batcher_with_buckets_keeps_every_example():
    for kwargs in ({"bucket_length": 4}, {"buckets": ([2, 4], [2, 2, 1])}):
        inputs = batcher(lambda: (examples, examples), batch_size=2, **kwargs)
        for stream in (inputs.train_stream(1), inputs.eval_stream(1)):
            lengths = [int(row.max()) for x, _, _ in stream for row in x]
            assert sorted(lengths) == [1, 2, 3, 4, 5]


def test_pipeline_functions_are_found_as_in_trax():
    pairs = [(np.ones(2), np.ones(2))]
    assert len(next(inputs_module.add_loss_weights(pairs))) == 3
    assert set(inputs_module.__all__) <= set(dir(inputs_module))
