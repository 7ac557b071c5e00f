"""PrefetchStream: the consumer's position, errors, and prompt closing."""

import gc
import threading
import time

import numpy as np
import pytest

from retrax.data.arrays import ArrayStream
from retrax.data.prefetch import PrefetchStream
from retrax.data.sources import ListStream

LIMIT = 5.0  # seconds; only a hang comes near it


def firsts(stream):
    return [int(batch[0][0]) for batch in stream]


def numbers(n=20):
    return [np.full(2, i) for i in range(n)]


def prefetch_threads():
    return [t for t in threading.enumerate() if t.name == "retrax-prefetch"]


def wait_for_threads_to_end():
    for thread in prefetch_threads():
        thread.join(LIMIT)
    return not prefetch_threads()


def test_same_batches_in_the_same_order_and_a_clean_end():
    stream = PrefetchStream(numbers(), 3)
    assert len(stream) == 20
    assert firsts(stream) == list(range(20))
    with pytest.raises(StopIteration):
        next(stream)
    stream.close()
    assert wait_for_threads_to_end()


@pytest.mark.parametrize("n_ahead", [1, 2, 7])
def test_state_is_the_consumers(n_ahead):
    def make():
        return ArrayStream(np.arange(10), 3, seed=4)

    plain = make()
    with PrefetchStream(make(), n_ahead) as ahead:
        for _ in range(15):
            assert ahead.state() == plain.state()
            next(plain), next(ahead)
        resumed = make()
        resumed.restore(ahead.state())
        assert [next(resumed)[0].tolist() for _ in range(9)] == [
            next(plain)[0].tolist() for _ in range(9)
        ]


def test_restore_goes_back():
    with PrefetchStream(numbers(), 4) as stream:
        next(stream), next(stream)
        state = stream.state()
        assert firsts(stream) == list(range(2, 20))
        stream.restore(state)
        stream.peek()
        assert stream.state() == state
        assert firsts(stream) == list(range(2, 20))


def test_reads_no_further_than_asked():
    read = []
    reached = threading.Event()

    def source():
        for i in range(100):
            read.append(i)
            if i == 4:
                reached.set()
            yield np.full(2, i)

    with PrefetchStream(source, 3) as stream:
        next(stream)
        assert not read[5:]
        next(stream)
        assert reached.wait(LIMIT)
        assert len(read) <= 6  # 2 taken, 3 waiting, 1 being read


def test_an_exception_comes_after_the_batches_before_it_and_stays():
    def source():
        yield np.full(2, 0)
        yield np.full(2, 1)
        raise OSError("disk gone")

    with PrefetchStream(source, 5) as stream:
        assert [int(next(stream)[0][0]) for _ in range(2)] == [0, 1]
        for _ in range(2):
            with pytest.raises(OSError, match="disk gone"):
                next(stream)


def test_close_returns_while_the_source_is_blocked():
    entered, release, closed = threading.Event(), threading.Event(), threading.Event()

    def source():
        try:
            entered.set()
            release.wait(LIMIT)
            yield np.zeros(2)
        finally:
            closed.set()

    stream = PrefetchStream(source, 2)
    consumer_ended = []
    consumer = threading.Thread(target=lambda: consumer_ended.append(list(stream)))
    consumer.start()
    assert entered.wait(LIMIT)
    start = time.monotonic()
    stream.close()
    assert time.monotonic() - start < 2
    consumer.join(LIMIT)
    assert consumer_ended == [[]]
    release.set()
    assert closed.wait(LIMIT) and wait_for_threads_to_end()


@pytest.mark.parametrize("steps", [0, 1, 20])
def test_close_closes_the_source_and_is_idempotent(steps):
    source = ListStream(numbers())
    stream = PrefetchStream(source, 2)
    for _ in range(steps):
        next(stream)
    stream.close()
    assert wait_for_threads_to_end()
    stream.close()
    assert list(source) == [] and list(stream) == []


def test_a_forgotten_stream_ends_its_thread():
    stream = PrefetchStream(ArrayStream(np.arange(10), 2), 2)
    next(stream)
    assert prefetch_threads()
    del stream
    gc.collect()
    assert wait_for_threads_to_end()


def test_n_ahead_is_checked():
    with pytest.raises(ValueError, match="got 0"):
        PrefetchStream(numbers(), 0)
