"""Pipeline functions on single examples."""

import numpy as np
import pytest
from absl import logging

from retrax.data.examples import (
    AddLossWeights,
    AppendValue,
    CastTo,
    Dup,
    FilterByLength,
    FilterEmptyExamples,
    PadToLength,
    TruncateToLength,
    add_loss_weights,
)


def one(stage, example):
    (result,) = stage([example])
    return result


def ones(n):
    return np.ones(n, np.int32)


def test_loss_weights_of_pairs():
    x, y = ones(2), np.array([[3, 0], [0, 4]])
    got = one(AddLossWeights(), (x, y))
    assert got[0] is x and got[1] is y
    assert got[2].dtype == np.float32 and got[2].tolist() == [[1, 1], [1, 1]]
    assert one(AddLossWeights(id_to_mask=0), (x, y))[2].tolist() == [[1, 0], [0, 1]]


def test_loss_weights_of_triples_are_multiplied_not_changed_in_place():
    weights = np.array([0.5, 0.5, 2.0])
    got = one(AddLossWeights(7), (ones(3), np.array([7, 1, 2]), weights))
    assert got[2].tolist() == [0, 0.5, 2] and got[2].dtype == np.float32
    assert weights.tolist() == [0.5, 0.5, 2.0]
    assert one(AddLossWeights(), (ones(3), ones(3), weights))[2].tolist() == [
        0.5,
        0.5,
        2,
    ]


def test_loss_weights_of_other_examples():
    four = (ones(1),) * 4
    assert one(AddLossWeights(), four) is four
    with pytest.raises(ValueError, match="id_to_mask=0.*4 parts"):
        next(add_loss_weights([four], id_to_mask=0))


def test_dup():
    assert one(Dup(), (1, 2)) == (1, 1, 2)
    assert one(Dup(), 1) == (1, 1)


def test_cast(monkeypatch):
    logged = []
    monkeypatch.setattr(logging, "info", lambda text, *args: logged.append(text % args))
    example = (np.array([1.7]), np.array([2], np.int64), np.array([3.0]))
    got = one(CastTo(debug=True), example)
    assert [p.dtype for p in got] == [np.int32, np.int32, np.float64]
    assert len(logged) == 1 and "float64" in logged[0]
    assert one(CastTo("float32", indices=(0, 5)), example[:1])[0].dtype == np.float32
    with pytest.raises(ValueError, match="tuples"):
        one(CastTo(), np.zeros(3))


def test_append():
    got = one(
        AppendValue({0: 1, 1: [8, 9]}), (np.array([5, 6], np.int32), np.zeros((2, 1)))
    )
    assert got[0].tolist() == [5, 6, 1] and got[0].dtype == np.int32
    assert got[1].tolist() == [[0, 8, 9], [0, 8, 9]]
    assert one(AppendValue({0: 1}), np.array([5])).tolist() == [5, 1]
    assert one(AppendValue(), (1, 2)) == (1, 2)


def test_filter_empty():
    full, empty = (ones(1), ones(2)), (ones(1), ones(0))
    assert list(FilterEmptyExamples()([empty, full, empty])) == [full]
    assert list(FilterEmptyExamples(axes=[0])([empty])) == [empty]
    assert list(FilterEmptyExamples()([ones(0)])) == []


def test_filter_by_length_is_inclusive():
    examples = [(ones(i), ones(1), ones(50)) for i in range(7)]

    def kept(**kwargs):
        return [len(e[0]) for e in FilterByLength(**kwargs)(examples)]

    assert kept(max_length=4, min_length=2) == [2, 3, 4]
    assert kept(max_length=None, min_length=5) == [5, 6]
    assert kept(max_length=1, length_keys=[1]) == list(range(7))
    assert kept(max_length=49, length_keys=[0, 2]) == []
    single = [np.zeros((2, n)) for n in (1, 9)]
    assert len(list(FilterByLength(5, length_axis=1)(single))) == 1
    assert len(list(FilterByLength(5)([{0: ones(3), 1: ones(9)}]))) == 0
    with pytest.raises(ValueError, match="max_length"):
        FilterByLength(None, None)


def test_truncate():
    cut = TruncateToLength({0: (3,), 1: 2})
    got = one(cut, (np.arange(5), np.arange(12).reshape(4, 3), ones(9)))
    assert got[0].tolist() == [0, 1, 2]
    assert got[1].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert len(got[2]) == 9
    got = one(TruncateToLength({0: (None, 2)}), np.arange(6).reshape(2, 3))
    assert got.tolist() == [[0, 1], [3, 4]]
    assert one(cut, (np.arange(2), np.zeros((1, 3))))[0].tolist() == [0, 1]
    with pytest.raises(ValueError, match=r"\(3,\) for an array of shape \(\)"):
        one(cut, (np.float32(1), ones(1)))


def test_pad():
    got = one(PadToLength({0: 4, 1: 1}), (np.array([1, 2]), np.array([3, 4])))
    assert [p.tolist() for p in got] == [[1, 2, 0, 0], [3, 4]]
    got = one(PadToLength({0: 3, 1: 3}, pad_value={1: 9}), (ones(1), ones(2)))
    assert [p.tolist() for p in got] == [[1, 0, 0], [1, 1, 9]]
    assert one(PadToLength({0: 3}, 7), ones(1)).tolist() == [1, 7, 7]
    assert one(PadToLength({0: 3}), np.ones((2, 2))).tolist() == [
        [1, 1],
        [1, 1],
        [0, 0],
    ]
    assert len(one(PadToLength({"x": 3}), {"x": ones(1)})["x"]) == 3


@pytest.mark.parametrize(
    ("n", "padded"), [(0, 0), (1, 4), (4, 4), (5, 8), (7, 8), (9, 12)]
)
def test_pad_to_the_next_multiple(n, padded):
    assert len(one(PadToLength({0: 4}, multiple=True), ones(n))) == padded


@pytest.mark.parametrize("len_map", [None, {}, {0: 0}])
def test_pad_needs_lengths(len_map):
    with pytest.raises(ValueError, match="len_map"):
        PadToLength(len_map)


def test_a_missing_part_is_named():
    with pytest.raises(ValueError, match="no part 3 in an example of 1 parts"):
        one(PadToLength({3: 4}), (ones(1),))
    with pytest.raises(ValueError, match=r"no part 0 in .*\['x'\]"):
        one(PadToLength({0: 4}), {"x": ones(1)})
