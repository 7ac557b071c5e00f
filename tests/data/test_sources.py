"""Lists, generators and functions as streams."""

import numpy as np
import pytest
from absl import logging

from retrax.data.sources import GeneratorStream, ListStream, as_stream
from retrax.data.streams import Stream


def numbers(n):
    return (np.full(2, i) for i in range(n))


def firsts(stream):
    return [int(batch[0][0]) for batch in stream]


@pytest.fixture
def warnings_logged(monkeypatch):
    logged = []
    monkeypatch.setattr(
        logging, "warning", lambda text, *args: logged.append(text % args)
    )
    return logged


def test_a_function_replays_and_says_so(warnings_logged):
    stream = as_stream(lambda: numbers(9))
    stream.restore({"kind": "generator", "batches": 4})
    assert firsts(stream) == [4, 5, 6, 7, 8]
    assert len(warnings_logged) == 1 and "4 batches" in warnings_logged[0]


def test_a_function_can_go_back(warnings_logged):
    stream = as_stream(lambda: numbers(9))
    start = stream.state()
    assert firsts(stream) == list(range(9))
    stream.restore(start)
    assert firsts(stream) == list(range(9))
    assert warnings_logged == []  # nothing had to be discarded


def test_a_bare_iterator_skips_from_where_it_stands(warnings_logged):
    stream = as_stream(numbers(9))
    stream.peek()  # a peeked batch counts as not yet consumed
    stream.restore({"kind": "generator", "batches": 3})
    assert firsts(stream) == [3, 4, 5, 6, 7, 8]
    with pytest.raises(ValueError, match="cannot go back from batch 9 to batch 3"):
        stream.restore({"kind": "generator", "batches": 3})


def test_a_function_that_returns_one_iterator_cannot_go_back():
    iterator = numbers(5)
    stream = as_stream(lambda _: iterator)
    assert firsts(stream) == [0, 1, 2, 3, 4]
    stream.restore({"kind": "generator", "batches": 0})
    with pytest.raises(ValueError, match="same iterator"):
        next(stream)


def test_a_generator_that_is_too_short_for_the_state(warnings_logged):
    with pytest.raises(ValueError, match="ended after 3 batches, before batch 5"):
        as_stream(lambda: numbers(3)).restore({"kind": "generator", "batches": 5})


def test_an_exception_of_a_generator_arrives():
    def broken():
        yield np.zeros(2)
        raise OSError("disk gone")

    stream = as_stream(broken)
    next(stream)
    with pytest.raises(OSError, match="disk gone"):
        next(stream)


def test_close_closes_the_generator():
    closed = []

    def generator():
        try:
            yield from numbers(5)
        finally:
            closed.append(True)

    stream = as_stream(generator)
    next(stream)
    stream.close()
    assert closed == [True] and list(stream) == []


class Loader:
    """Can be run through again and again, like a data loader."""

    def __iter__(self):
        return numbers(3)


class Counter:
    """An iterator of one's own with a position."""

    def __init__(self):
        self.n = 0

    def __iter__(self):
        return self

    def __next__(self):
        self.n += 1
        return np.full(2, self.n - 1)

    def state(self):
        return {"n": self.n}

    def restore(self, state):
        self.n = state["n"]


@pytest.mark.parametrize(
    "source",
    [
        numbers(3),
        lambda: numbers(3),
        lambda n_devices: numbers(3),
        lambda n_devices=1: numbers(3),
        lambda _: numbers(3),
        lambda generator=None: numbers(3),
        lambda: list(numbers(3)),
        lambda: ListStream(list(numbers(3))),
        list(numbers(3)),
        Loader(),
        Loader,
        iter(list(numbers(3))),
        ListStream(list(numbers(3))),
        map(lambda b: (b,), numbers(3)),
    ],
)
def test_accepted_sources(source):
    stream = as_stream(source)
    assert isinstance(stream, Stream)
    assert firsts(stream) == [0, 1, 2]


def test_n_devices_arrives():
    assert firsts(as_stream(lambda n_devices: numbers(n_devices), 4)) == [0, 1, 2, 3]
    assert firsts(as_stream(lambda n: numbers(n), 2)) == [0, 1]
    keyword = as_stream(lambda seed=0, *, n_devices=9: numbers(n_devices), 3)
    assert firsts(keyword) == [0, 1, 2]


def test_an_iterator_with_its_own_position_keeps_it():
    for source in (Counter(), Counter):
        stream = as_stream(source)
        next(stream), next(stream), stream.peek()
        assert stream.state() == {"n": 2}
        stream.restore({"n": 41})
        assert firsts(stream.take(2)) == [41, 42]


@pytest.mark.parametrize(
    "source",
    [None, 3, np.zeros((4, 2)), (np.zeros(3), np.zeros(3)), {"x": 1}, "train.csv"],
)
def test_refused_sources_are_named(source):
    with pytest.raises(TypeError, match=type(source).__name__):
        as_stream(source)


def test_refused_functions():
    with pytest.raises(TypeError, match="must return batches"):
        as_stream(lambda: lambda: numbers(3))
    with pytest.raises(TypeError, match="NoneType"):
        as_stream(lambda: None)
    with pytest.raises(TypeError, match=r"\['a', 'b'\]"):
        as_stream(lambda a, b: numbers(3))
    with pytest.raises(TypeError, match="as_stream"):
        GeneratorStream(3)  # type: ignore[arg-type]


def test_an_empty_list_is_refused():
    with pytest.raises(ValueError, match="empty"):
        as_stream([])
    with pytest.raises(ValueError, match="empty"):
        ListStream([])


def test_a_list_of_another_length_is_refused():
    state = as_stream(list(numbers(3))).state()
    with pytest.raises(ValueError, match="3 batches, this list has 4"):
        as_stream(list(numbers(4))).restore(state)


def test_fresh_needs_a_way_to_begin_again():
    with pytest.raises(TypeError, match="cannot begin again"):
        as_stream(numbers(3)).fresh()
