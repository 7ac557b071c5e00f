"""Copy, reverse and sort tasks against plain Python on each example."""

import gin
import numpy as np
import pytest

from retrax.data import tasks
from retrax.data.tasks import copy_task, reverse_task, sort_task

SOLUTIONS = {
    copy_task: lambda w: w,
    reverse_task: lambda w: w[::-1],
    sort_task: sorted,
}
each_task = pytest.mark.parametrize("task", SOLUTIONS, ids=lambda t: t.__name__)


def examples(batches):
    return [row for batch in batches for row in zip(*batch, strict=True)]


def some(inputs, n=4):
    train, evaluation = inputs.train_stream(), inputs.eval_stream()
    return [next(train) for _ in range(n)] + list(evaluation)


@each_task
def test_encoder_decoder_examples_are_right(task):
    inputs = task(16, vocab_size=7, min_length=2, max_length=5, n_eval=50)
    lengths = set()
    for x, y, weights in examples(some(inputs)):
        x, y = x.tolist(), y.tolist()
        assert len(x) == 5 and len(y) == 6
        w = [s for s in x if s]
        lengths.add(len(w))
        assert x == w + [0] * (5 - len(w)) and set(w) <= set(range(2, 7))
        answer = [*SOLUTIONS[task](w), 1]
        assert y == answer + [0] * (6 - len(answer))
        assert weights.tolist() == [float(s != 0) for s in y]
    assert lengths == {2, 3, 4, 5}


@each_task
def test_language_model_examples_are_right(task):
    inputs = task(16, vocab_size=7, min_length=1, max_length=4, lm=True, n_eval=50)
    for x, y, weights in examples(some(inputs)):
        assert x.tolist() == y.tolist() and len(x) == 10
        w = x.tolist()[: x.tolist().index(1)]
        answer = [*SOLUTIONS[task](w), 1]
        assert set(w) <= set(range(2, 7)) and 1 <= len(w) <= 4
        whole = [*w, 1, *answer]
        assert x.tolist() == whole + [0] * (10 - len(whole))
        counted = [0.0] * (len(w) + 1) + [1.0] * len(answer)
        assert weights.tolist() == counted + [0.0] * (10 - len(counted))


def test_dtypes():
    for lm in (False, True):
        for batch in some(copy_task(lm=lm), 1):
            dtypes = [part.dtype for part in batch]
            assert dtypes == [np.int32, np.int32, np.float32]


def test_lengths_and_symbols_are_equally_likely():
    inputs = copy_task(8000, vocab_size=6, min_length=3, max_length=6)
    x, _, _ = next(inputs.train_stream())
    lengths = np.bincount((x != 0).sum(1))[3:]
    symbols = np.bincount(x[x != 0])[2:]
    for counts in (lengths, symbols):
        assert len(counts) == 4
        wanted = counts.sum() / 4
        # chi-squared with 3 degrees of freedom: 16.3 is its 0.999 quantile
        assert ((counts - wanted) ** 2 / wanted).sum() < 16.3


def test_evaluation_is_the_same_every_time_and_not_the_training():
    inputs = copy_task(64, max_length=10, n_eval=100, eval_batch_size=64)
    first, again = list(inputs.eval_stream()), list(inputs.eval_stream())
    assert [len(x) for x, _, _ in first] == [64, 36]
    for a, b in zip(first, again, strict=True):
        np.testing.assert_array_equal(a[0], b[0])
    train = next(inputs.train_stream())[0]
    assert (train != first[0][0]).any()


def test_seeds_differ_and_repeat():
    a, b, c = (next(copy_task(seed=s).train_stream())[0] for s in (1, 1, 2))
    np.testing.assert_array_equal(a, b)
    assert (a != c).any()


@each_task
@pytest.mark.parametrize("peek", [False, True])
def test_a_restored_stream_goes_on_with_the_next_batch(task, peek):
    stream = task(seed=3).train_stream()
    batches = [next(stream) for _ in range(3)]
    assert (batches[0][0] != batches[1][0]).any()
    if peek:
        stream.peek()
    state = stream.state()
    assert all(isinstance(v, (int, str)) for v in state.values())
    wanted = next(stream)
    other = task(seed=3).train_stream()
    other.restore(state)
    for a, b in zip(next(other), wanted, strict=True):
        np.testing.assert_array_equal(a, b)
    np.testing.assert_array_equal(next(stream.fresh())[0], batches[0][0])


@pytest.mark.parametrize(
    "change",
    [
        {"seed": 1},
        {"batch_size": 9},
        {"vocab_size": 9},
        {"min_length": 2},
        {"max_length": 9},
        {"lm": True},
    ],
)
def test_a_state_of_another_stream_is_refused(change):
    state = copy_task().train_stream().state()
    with pytest.raises(ValueError, match=next(iter(change))):
        copy_task(**change).train_stream().restore(state)
    with pytest.raises(ValueError, match="task=copy"):
        sort_task().train_stream().restore(state)


def test_a_closed_stream_has_ended():
    stream = copy_task().train_stream()
    stream.close()
    assert list(stream) == []


@pytest.mark.parametrize(
    "options, text",
    [
        ({"min_length": 5, "max_length": 4}, "min_length=5, max_length=4"),
        ({"min_length": 0}, "min_length=0"),
        ({"vocab_size": 2}, "at least 3, got 2"),
        ({"batch_size": 0}, "batch_size=0"),
        ({"seed": -1}, "seed=-1"),
        ({"n_eval": 0}, "n_eval must be at least 1, got 0"),
    ],
)
@each_task
def test_it_refuses(task, options, text):
    with pytest.raises(ValueError, match=text):
        task(**options)


def test_gin_configures_it():
    with gin.unlock_config():
        gin.parse_config("retrax.data.sort_task.max_length = 4")
    try:
        assert next(tasks.sort_task().train_stream())[0].shape == (64, 4)
    finally:
        gin.clear_config()


def test_global_random_state_is_not_written():
    state = np.random.get_state()[1].copy()  # type: ignore[index]
    next(copy_task().train_stream())
    np.testing.assert_array_equal(np.random.get_state()[1], state)  # type: ignore[index]
