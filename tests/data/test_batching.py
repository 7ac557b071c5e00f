"""Batch, UnBatch and BucketByLength: padding, and nothing lost."""

import numpy as np
import pytest

from retrax.data.batching import (
    Batch,
    BucketByLength,
    UnBatch,
    buckets_for_length,
    pad_to_max_dims,
)


def ramp(n):
    return np.arange(1, n + 1)


def test_ten_examples_in_fours_are_three_batches():
    examples = [(ramp(3), np.int32(i)) for i in range(10)]
    got = list(Batch(4)(examples))
    assert [x.shape for x, _ in got] == [(4, 3), (4, 3), (2, 3)]
    assert np.concatenate([y for _, y in got]).tolist() == list(range(10))
    assert len(list(Batch(4, drop_remainder=True)(examples))) == 2


def test_batch_pads_with_zeros_to_the_largest_and_keeps_dtypes():
    ((x, y),) = Batch(2)(
        [(np.ones((2, 1), np.float32), ramp(1)), (np.ones((1, 3)), ramp(2))]
    )
    assert x.tolist() == [[[1, 0, 0], [1, 0, 0]], [[1, 1, 1], [0, 0, 0]]]
    assert y.tolist() == [[1, 0], [1, 2]] and y.dtype == ramp(1).dtype
    ((z,),) = Batch(2)([ramp(1).astype(np.int8), ramp(2).astype(np.int8)])
    assert z.dtype == np.int8


def test_batch_mistakes():
    with pytest.raises(ValueError, match=r"\[0\]"):
        Batch(0)
    with pytest.raises(ValueError, match=r"different rank.*\(1,\), \(1, 1\)"):
        list(Batch(2)([np.ones(1), np.ones((1, 1))]))
    with pytest.raises(ValueError, match=r"numbers of parts: \[1, 2\]"):
        list(Batch(2)([(ramp(1),), (ramp(1), ramp(1))]))


def test_unbatch_undoes_batch():
    examples = [(np.full(2, i), np.float32(i)) for i in range(5)]
    got = list(UnBatch()(Batch(2)(examples)))
    assert len(got) == 5
    for (x, y), (a, b) in zip(got, examples, strict=True):
        assert x.tolist() == a.tolist() and y == b
    with pytest.raises(ValueError, match=r"\(2,\), \(3,\)"):
        list(UnBatch()([(ramp(2), ramp(3))]))


def test_buckets_by_inclusive_length_and_leftovers_last():
    lengths = [2, 5, 1, 4, 9, 2, 3, 5]
    stage = BucketByLength([2, 4], [2, 2, 1])
    got = list(stage((ramp(n), ramp(1)) for n in lengths))
    assert [[int(row.max()) for row in x] for x, _ in got] == [
        [5],
        [2, 1],
        [9],
        [4, 3],
        [5],
        [2],
    ]
    assert [x.shape[1] for x, _ in got] == [5, 2, 9, 4, 5, 2]
    full = BucketByLength([2, 4], [2, 2, 1], drop_remainder=True)
    assert len(list(full((ramp(n), ramp(1)) for n in lengths))) == 5


def test_bucket_length_keys_and_strict_padding():
    stage = BucketByLength([4], [1, 1], length_keys=[1], strict_pad_on_len=True)
    ((x, y),) = stage([(ramp(6), ramp(3))])
    assert x.shape == (1, 8) and y.shape == (1, 4)
    rows = BucketByLength([2], [1, 1], length_axis=1)
    ((x,),) = rows([np.ones((9, 2))])
    assert x.shape == (1, 9, 2)


@pytest.mark.parametrize(
    ("boundaries", "sizes"), [([2, 4], [1, 1]), ([4, 2], [1, 1, 1]), ([2], [1, 0])]
)
def test_bucket_mistakes(boundaries, sizes):
    with pytest.raises(ValueError, match=r"got"):
        BucketByLength(boundaries, sizes)


@pytest.mark.parametrize(
    ("shapes", "boundary", "strict", "expected"),
    [
        ([(8, 10), (8, 9)], 12, False, (12, 12)),
        ([(2, 10), (3, 9)], None, False, (3, 10)),
        ([(6,), (5,)], 12, False, (12,)),
        ([(5,), (5,)], 12, False, (8,)),
        ([(13,), (5,)], 12, False, (13,)),
        ([(12,), (12,)], 12, False, (12,)),
        ([(0,), (0,)], 12, False, (1,)),
        ([(13,), (5,)], 12, True, (24,)),
        ([(13, 3), (5, 2)], [4, None], False, (16, 3)),
        ([(), ()], None, False, ()),
    ],
)
def test_padded_shapes(shapes, boundary, strict, expected):
    got = pad_to_max_dims([np.ones(s) for s in shapes], boundary, strict)
    assert got.shape == (len(shapes), *expected)
    assert got.sum() == sum(np.prod(s) for s in shapes)
    with pytest.raises(ValueError, match="3 boundaries"):
        pad_to_max_dims([np.ones((1, 1))], [1, 1, 1])


def test_chosen_buckets():
    boundaries, sizes = buckets_for_length(32, 8, longest=100, n_devices=4)
    assert boundaries == [8, 16, 32, 64, 100]
    assert sizes == [32, 16, 8, 4, 4, 4]
