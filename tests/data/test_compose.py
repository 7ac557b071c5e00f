"""Serial and Parallel."""

import itertools

import pytest

from retrax.data.compose import Parallel, Serial


def letters(letter, n=None):
    return lambda _: itertools.repeat(letter) if n is None else iter(letter * n)


def mixed(n, *args, **kwargs):
    return "".join(itertools.islice(Parallel(*args, **kwargs)(), n))


def add(n):
    return lambda generator: (x + n for x in generator)


def test_serial_runs_in_order_and_flattens():
    double = lambda generator: (2 * x for x in generator)  # noqa: E731
    assert list(Serial(lambda _: iter([1, 2]), [add(1), (double,)])()) == [4, 6]
    assert list(Serial(add(1), double)([1, 2])) == [4, 6]
    assert list(Serial(Serial(lambda: [1], add(1)), add(1))()) == [3]


def test_serial_can_be_run_again():
    pipeline = Serial(lambda: iter([1, 2]), add(1))
    assert list(pipeline()) == list(pipeline()) == [2, 3]


def test_serial_takes_a_source_and_a_function_with_a_default():
    assert list(Serial(range(3), add(1))()) == [1, 2, 3]
    assert list(Serial(lambda generator=None: iter([generator]))()) == [None]


@pytest.mark.parametrize("fns", [(3,), (lambda g: g, "x"), (lambda g: g, iter([1]))])
def test_serial_refuses_what_is_no_function(fns):
    with pytest.raises(TypeError, match=f"position {len(fns) - 1}"):
        Serial(*fns)


def test_parallel_takes_turns():
    a, b, c = letters("a"), letters("b"), letters("c")
    assert mixed(6, [a, b]) == "ababab"
    round_ = mixed(6, [a, b, c], counters=(2, 1, 3))
    assert round_ == "abcacc"
    for k in range(4):  # every round holds 2, 1 and 3 of them
        part = mixed(24, [a, b, c], counters=(2, 1, 3))[6 * k : 6 * k + 6]
        assert sorted(part) == list("aabccc")
    assert mixed(4, [a, b], counters=(0, 2)) == "bbbb"
    assert mixed(6, [a, b], counters=(10, 25), reweight_by_minimum=True) == "abbabb"


def test_parallel_nests_by_counter():
    a, b, c = letters("a"), letters("b"), letters("c")
    nested = mixed(122, [c, a, b], counters=(40, 1, 20), gradually_reweight=True)
    assert nested == ("a" + "bcc" * 20) * 2
    kwargs = {"gradually_reweight": True, "use_remainders": True}
    one_round = "a" + "bcc" * 20 + "c" * 5
    assert mixed(132, [a, b, c], counters=(1, 20, 45), **kwargs) == one_round * 2


@pytest.mark.parametrize("gradual", [False, True])
def test_parallel_gives_every_example_of_finite_sources_and_ends(gradual):
    fns = [letters("a", 2), letters("b", 7), letters("c", 0)]
    got = mixed(99, fns, counters=(1, 2, 1), gradually_reweight=gradual)
    assert sorted(got) == list("aabbbbbbb")


def test_parallel_runs_inside_serial():
    branches = Parallel([add(1), add(10)])
    assert list(Serial(lambda: iter([0, 0, 0, 0]), branches)()) == [1, 10, 1, 10]


@pytest.mark.parametrize(
    "args", [((), None), ([letters("a")], (1, 2)), ([letters("a")], (-1,)), ([1], (0,))]
)
def test_parallel_mistakes(args):
    with pytest.raises(ValueError, match="one counter for each source"):
        Parallel(*args)
