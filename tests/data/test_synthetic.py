"""Rule-made inputs: the rules hold, and the seed fixes everything."""

import numpy as np
import pytest

from retrax.data.synthetic import (
    addition_inputs,
    random_inputs,
    sequence_copy_inputs,
    sine_inputs,
)

LENGTHS = {"train_length": 8, "eval_min_length": 5, "eval_max_length": 9}
MAKERS = {
    "random": lambda **k: random_inputs(input_shape=(3, 4), output_shape=(3,), **k),
    "copy": lambda **k: sequence_copy_inputs(10, 3, **LENGTHS, **k),
    "addition": lambda **k: addition_inputs(10, 3, **LENGTHS, **k),
    "sine": lambda **k: sine_inputs(3, 7, **k),
}


@pytest.mark.parametrize("name", list(MAKERS))
def test_seeds(name):
    def first(stream):
        return [part.tolist() for batch in stream.take(4) for part in batch]

    make = MAKERS[name]
    assert first(make().train_stream()) == first(make().train_stream())
    assert first(make().train_stream()) != first(make(seed=1).train_stream())
    assert first(make().train_stream()) != first(make().eval_stream())
    inputs = make()
    assert first(inputs.eval_stream()) == first(inputs.eval_stream())


def test_random_ranges_are_inclusive():
    inputs = random_inputs(
        input_shape=(500,),
        input_range=(3, 5),
        output_shape=(500,),
        output_dtype=np.float32,
        output_range=(-1, 1),
    )
    x, y = next(inputs.train_stream())
    assert set(x.tolist()) == {3, 4, 5} and x.dtype == np.int32
    assert y.dtype == np.float32 and -1 <= y.min() < -0.9 and 0.9 < y.max() <= 1


@pytest.mark.parametrize("reverse", [False, True])
def test_copy(reverse):
    inputs = sequence_copy_inputs(5, 4, **LENGTHS, reverse=reverse, pad_to_multiple=8)
    seen = set()
    for x, y, weights in inputs.eval_stream().take(40):
        assert x.shape == y.shape == weights.shape and x.shape[1] % 8 == 0
        for row, weight in zip(x, weights, strict=True):
            n = int(weight.sum())
            seen.add(n)
            first, second = row[1 : n + 1], row[n + 2 : 2 * n + 2]
            assert row[0] == row[n + 1] == 0 and (first > 0).all() and first.max() < 5
            assert (second == (first[::-1] if reverse else first)).all()
            assert weight[n + 2 : 2 * n + 2].all() and not row[2 * n + 2 :].any()
    assert seen == {5, 6, 7, 8, 9}


def number(symbols, base):
    return sum((int(s) - 1) * base**i for i, s in enumerate(symbols))


@pytest.mark.parametrize("encdec", [False, True])
def test_addition(encdec):
    inputs = addition_inputs(6, 4, **LENGTHS, encdec=encdec, pad_to_multiple=4)
    for x, y, weights in inputs.train_stream().take(30):
        for question, target, weight in zip(x, y, weights, strict=True):
            answer = target[weight == 1]
            signs = np.flatnonzero(question == 5)
            assert len(signs) == (1 if encdec else 2)
            end = np.count_nonzero(question) if encdec else signs[1]
            assert 3 <= end <= 8
            a, b = question[: signs[0]], question[signs[0] + 1 : end]
            assert number(a, 4) + number(b, 4) == number(answer, 4)
            assert answer.max() <= 4


def test_addition_mistakes():
    with pytest.raises(ValueError, match="vocab_size=3"):
        addition_inputs(3, 4, **LENGTHS)


def test_sine():
    x, actions, targets, weights = next(sine_inputs(50, 20).train_stream())
    assert x.shape == (50, 20) and x.dtype == np.float32 and x is targets
    assert not actions.any() and actions.dtype == np.int32 and weights.all()
    # sin(u + 2d) = 2 cos(d) sin(u + d) - sin(u): one constant for each row
    middle, ends = x[:, 1:-1].astype(np.float64), (x[:, 2:] + x[:, :-2]).astype(float)
    slope = (middle * ends).sum(1) / (middle**2).sum(1)
    np.testing.assert_allclose(ends, slope[:, None] * middle, atol=1e-5)
