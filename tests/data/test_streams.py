"""Streams: positions, peeking, mapping, taking, and the forms of a batch."""

import numpy as np
import pytest

from retrax.data.arrays import ArrayStream
from retrax.data.sources import GeneratorStream, ListStream
from retrax.data.streams import as_batch, peek


def make_streams():
    x = np.arange(22).reshape(11, 2)
    y = np.arange(11)
    batches = [(np.full(3, i), np.full(3, -i)) for i in range(7)]
    return {
        "array": lambda: ArrayStream((x, y), 3, seed=5, repeat=False),
        "list": lambda: ListStream(batches),
        "generator": lambda: GeneratorStream(lambda: iter(batches)),
        "map": lambda: ListStream(batches).map(lambda b: (b[0] + 1, b[1])),
        "take": lambda: ArrayStream((x, y), 3).take(6),
        "take of map": lambda: ListStream(batches).map(lambda b: b[0]).take(5),
    }


def plain(batches):
    return [[part.tolist() for part in batch] for batch in batches]


@pytest.fixture(params=list(make_streams()))
def make(request):
    return make_streams()[request.param]


def test_every_position_restores_in_a_new_stream(make):
    whole = plain(make())
    assert len(whole) >= 4
    for n in range(len(whole) + 1):
        first = make()
        taken = [next(first) for _ in range(n)]
        second = make()
        second.restore(first.state())
        assert plain(taken) + plain(second) == whole


def test_peek_consumes_nothing_and_state_is_before_the_peeked_batch(make):
    whole = plain(make())
    stream = make()
    next(stream)
    before = stream.state()
    assert plain([peek(stream)]) == plain([peek(stream)]) == whole[1:2]
    assert stream.state() == before
    other = make()
    other.restore(stream.state())
    assert plain(other) == whole[1:]
    assert plain(stream) == whole[1:]


def test_restore_to_its_own_state_keeps_a_peeked_batch(make):
    whole = plain(make())
    stream = make()
    peek(stream)
    stream.restore(stream.state())
    assert plain(stream) == whole


def test_restore_forgets_a_peeked_batch(make):
    stream, whole = make(), plain(make())
    start = stream.state()
    for _ in range(3):
        next(stream)
    peek(stream)
    stream.restore(start)
    assert plain(stream) == whole


def test_states_are_plain_values(make):
    def check(value):
        if isinstance(value, dict):
            assert all(type(key) is str for key in value)
            return all(check(v) for v in value.values())
        return type(value) in (int, str, bool, bytes)

    stream = make()
    next(stream)
    assert check(stream.state())


def test_a_state_is_a_snapshot(make):
    stream = make()
    state = stream.state()
    next(stream)
    assert state != stream.state()


def test_fresh_begins_again_and_is_independent(make):
    stream = make()
    whole = plain(make())
    next(stream)
    assert plain(stream.fresh()) == whole
    assert plain(stream) == whole[1:]


def test_length_is_the_number_of_batches(make):
    stream = make()
    if stream.n_batches is not None:
        assert len(stream) == stream.n_batches == len(plain(make()))


def test_a_closed_stream_has_ended(make):
    with make() as stream:
        peek(stream)
    assert list(stream) == []
    stream.close()


def test_end_is_stop_iteration_again_and_again(make):
    stream = make()
    list(stream)
    for _ in range(2):
        with pytest.raises(StopIteration):
            next(stream)
    with pytest.raises(StopIteration):
        stream.peek()


def test_state_of_another_kind_is_refused():
    states = {name: make().state() for name, make in make_streams().items()}
    with pytest.raises(ValueError, match="kind 'array', got 'list'"):
        make_streams()["array"]().restore(states["list"])
    with pytest.raises(ValueError, match="kind 'list', got 'take'"):
        make_streams()["map"]().restore(states["take"])
    with pytest.raises(ValueError, match="lacks"):
        make_streams()["list"]().restore({"kind": "list"})


def test_take_counts_batches_not_examples():
    stream = ListStream([np.zeros(4)] * 3)
    assert stream.n_examples == 12 and stream.take(9).n_examples == 12
    assert len(stream.take(2)) == 2 and stream.take(2).n_examples is None
    with pytest.raises(ValueError, match="n=0"):
        stream.take(0)


def test_an_endless_stream_has_no_length_but_is_true():
    stream = ArrayStream(np.zeros(5), 2)
    assert stream
    with pytest.raises(TypeError, match=r"take\(n\)"):
        len(stream)


def test_peek_refuses_what_cannot_take_a_batch_back():
    with pytest.raises(TypeError, match="as_stream"):
        peek(iter([np.zeros(3)]))  # type: ignore[arg-type]


def test_map_refuses_no_function():
    with pytest.raises(TypeError, match="function"):
        ListStream([np.zeros(3)]).map(3)  # type: ignore[arg-type]


class FakeTensor:
    """Has numpy() but no __array__, as some tensor types do."""

    def numpy(self):
        return np.array([1.5, 2.5], np.float16)


def test_as_batch_takes_the_usual_forms_and_keeps_dtypes():
    x = np.array([1, 2], np.int64)
    assert as_batch((x,))[0] is x
    assert as_batch(x)[0] is x
    got = as_batch([x, [1.0, 2.0], FakeTensor()])
    assert [part.dtype for part in got] == [np.int64, np.float64, np.float16]
    assert type(got) is tuple


@pytest.mark.parametrize(
    ("item", "text"),
    [
        ({"a": 1}, r"dict with keys \['a'\]"),
        (((np.ones(2), np.ones(2)), np.ones(2)), "part 0 of a batch is a nested"),
        ((np.ones(2), [np.ones(2)]), "part 1 of a batch is a nested"),
        (None, "NoneType"),
        ((np.ones(2), None), "part 1"),
        ((), "empty"),
    ],
)
def test_as_batch_refuses(item, text):
    with pytest.raises(TypeError, match=text):
        as_batch(item)
