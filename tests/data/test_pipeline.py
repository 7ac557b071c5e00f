"""Shuffle, Log, Prefetch, and pipelines as streams."""

import collections
import threading

import numpy as np
import pytest

import retrax.data
from retrax.data import pipeline
from retrax.data.pipeline import Batch, Log, Prefetch, Serial, Shuffle, shuffle
from retrax.data.sources import as_stream


def test_shuffle_is_a_permutation_fixed_by_its_seed():
    orders = [list(shuffle(range(50), 8, seed)) for seed in (0, 0, 1)]
    assert orders[0] == orders[1] != orders[2]
    assert all(sorted(order) == list(range(50)) for order in orders)


def test_shuffle_holds_back_no_more_than_its_queue():
    order = list(shuffle(range(200), 10, seed=3))
    assert all(x <= i + 10 for i, x in enumerate(order))
    assert list(shuffle(range(5), 1)) == [0, 1, 2, 3, 4]
    assert sorted(shuffle(range(5), 99)) == [0, 1, 2, 3, 4]


def test_shuffle_mixes():
    first = collections.Counter(next(shuffle(range(9), 4, seed)) for seed in range(400))
    assert sorted(first) == [0, 1, 2, 3] and min(first.values()) > 60


def test_two_shuffles_do_not_touch_each_other_or_the_global_state():
    before = np.random.get_state()[1].copy()  # type: ignore[index]
    alone = list(Shuffle(4, seed=1)(range(20)))
    both = zip(
        Shuffle(4, seed=1)(range(20)), Shuffle(4, seed=2)(range(20)), strict=True
    )
    assert [a for a, _ in both] == alone
    np.testing.assert_array_equal(before, np.random.get_state()[1])  # type: ignore[index]


@pytest.mark.parametrize(("queue_size", "seed"), [(0, 0), (3, -1)])
def test_shuffle_mistakes(queue_size, seed):
    with pytest.raises(ValueError, match=f"queue_size={queue_size}, seed={seed}"):
        Shuffle(queue_size, seed)


def test_log_prints_and_passes(capsys):
    examples = [(np.zeros((2, 3), np.float32), {"y": np.int32(1)})] * 3
    assert list(Log(n_steps_per_example=2)(examples)) == examples
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 and lines[1].startswith("example 2: ")
    assert "float32[2, 3]" in lines[0] and "int32[]" in lines[0]
    list(Log(only_shapes=False)(["text"]))
    assert capsys.readouterr().out == "example 0: text\n"
    with pytest.raises(ValueError, match="got 0"):
        Log(0)


def test_prefetch_hands_on_any_item_ends_and_raises():
    items = ["text", {"x": 1}, (1, "a"), None]
    assert list(Prefetch(2)(iter(items))) == items

    def broken():
        yield 1
        raise OSError("disk gone")

    got = Prefetch()(broken())
    assert next(got) == 1
    with pytest.raises(OSError, match="disk gone"):
        next(got)


def test_prefetch_ends_its_thread_with_the_generator():
    got = Prefetch(2)(iter(range(100)))
    next(got)
    got.close()
    for thread in threading.enumerate():
        if thread.name == "retrax-prefetch":
            thread.join(5)
            assert not thread.is_alive()


def test_a_pipeline_is_a_stream_that_resumes_by_replay():
    make = Serial(lambda: (np.full(3, i) for i in range(20)), Shuffle(5), Batch(3))
    stream = as_stream(make)
    whole = [b[0].tolist() for b in as_stream(make)]
    next(stream), next(stream)
    resumed = as_stream(make)
    resumed.restore(stream.state())
    assert [b[0].tolist() for b in resumed] == whole[2:]


def test_everything_is_exported():
    assert set(pipeline.__all__) <= set(retrax.data.__all__)
    assert all(hasattr(retrax.data, name) for name in retrax.data.__all__)
