"""ArrayStream: every example once an epoch, in an order fixed by seed and epoch."""

import numpy as np
import pytest

from retrax.data import arrays
from retrax.data.arrays import ArrayStream


def oracle_order(n, seed, epoch):
    """The documented rule, written with Python integers."""
    raw = np.random.PCG64(np.random.SeedSequence([seed, epoch])).random_raw(n)
    bits = n.bit_length()
    keyed = [((int(r) >> bits), i) for i, r in enumerate(raw)]
    return [i for _, i in sorted(keyed)]


@pytest.mark.parametrize("n", [1, 2, 7, 64, 100])
@pytest.mark.parametrize("batch_size", [1, 3, 7])
@pytest.mark.parametrize("block_bytes", [1, 100, 1 << 20])
def test_epochs_are_permutations_in_the_documented_order(
    n, batch_size, block_bytes, monkeypatch
):
    monkeypatch.setattr(arrays, "_BLOCK_BYTES", block_bytes)
    x = np.arange(n) * 10
    stream = ArrayStream((x, x + 1), batch_size, seed=3)
    for epoch in range(3):
        got = [next(stream) for _ in range(stream.batches_per_epoch)]
        sizes = [len(b[0]) for b in got]
        rest = [n % batch_size] if n % batch_size else []
        assert sizes == [batch_size] * (n // batch_size) + rest
        rows = np.concatenate([b[0] for b in got])
        np.testing.assert_array_equal(rows, x[oracle_order(n, 3, epoch)])
        np.testing.assert_array_equal(np.concatenate([b[1] for b in got]), rows + 1)


def test_order_is_pinned_across_versions():
    (batch,) = next(ArrayStream(np.arange(8), 8, seed=0))
    assert batch.tolist() == oracle_order(8, 0, 0) == PINNED


PINNED = [3, 2, 1, 6, 0, 7, 4, 5]


def test_shuffling_looks_uniform():
    counts = np.zeros((6, 6))
    for seed in range(600):
        (order,) = next(ArrayStream(np.arange(6), 6, seed=seed))
        counts[np.arange(6), order] += 1
    # chi-squared with 25 degrees of freedom: 52.6 is its 0.999 quantile
    assert ((counts - 100) ** 2 / 100).sum() < 52.6
    assert counts.min() > 0


def test_seed_and_epoch_change_the_order():
    def epoch(stream):
        return next(stream)[0].tolist()

    a, b = (
        ArrayStream(np.arange(50), 50, seed=1),
        ArrayStream(np.arange(50), 50, seed=2),
    )
    orders = [epoch(a), epoch(a), epoch(b), epoch(b)]
    assert all(orders[i] != orders[j] for i in range(4) for j in range(i))


def test_global_random_state_is_neither_read_nor_written():
    before = np.random.get_state()[1].copy()  # type: ignore[index]
    first = [b[0].tolist() for b in ArrayStream(np.arange(9), 2, repeat=False)]
    np.testing.assert_array_equal(before, np.random.get_state()[1])  # type: ignore[index]
    np.random.seed(99)
    assert first == [b[0].tolist() for b in ArrayStream(np.arange(9), 2, repeat=False)]


def test_finite_without_shuffling_covers_each_once_in_order():
    x = np.arange(10)
    stream = ArrayStream(x, 4, shuffle=False, repeat=False)
    assert len(stream) == 3 and stream.n_examples == 10
    assert [b[0].tolist() for b in stream] == [
        [0, 1, 2, 3],
        [4, 5, 6, 7],
        [8, 9],
    ]


def test_drop_remainder_keeps_shapes():
    stream = ArrayStream(np.arange(10), 4, drop_remainder=True, repeat=False)
    assert stream.n_examples == 8 and len(stream) == 2
    assert [len(b[0]) for b in stream] == [4, 4]
    endless = ArrayStream(np.arange(10), 4, drop_remainder=True)
    assert {len(next(endless)[0]) for _ in range(20)} == {4}


def test_restore_across_epochs_is_exact():
    def make():
        return ArrayStream(np.arange(10), 3, seed=7)

    reference, running = make(), make()
    expected = [next(reference)[0].tolist() for _ in range(60)]
    for step in range(40):
        resumed = make()
        resumed.restore(running.state())
        assert [next(resumed)[0].tolist() for _ in range(20)] == expected[
            step : step + 20
        ]
        next(running)
    assert running.state()["epoch"] == 9


def test_restore_reads_nothing(monkeypatch):
    stream = ArrayStream(np.arange(10), 2)
    state = {**stream.state(), "epoch": 10**9, "position": 6}
    monkeypatch.setattr(stream, "_load", lambda low: pytest.fail("read data"))
    stream.restore(state)
    assert stream.state() == state


def test_restore_with_another_batch_size_goes_on_at_the_same_example():
    before = ArrayStream(np.arange(10), 4, seed=2, drop_remainder=True)
    order = oracle_order(10, 2, 0)
    next(before)
    after = ArrayStream(np.arange(10), 3, seed=2, drop_remainder=True)
    after.restore(before.state())
    assert [next(after)[0].tolist() for _ in range(2)] == [order[4:7], order[7:10]]
    after.restore({**before.state(), "position": 8})
    assert len(next(after)[0]) == 3  # two rows make no batch: the next epoch
    assert after.state()["epoch"] == 1


@pytest.mark.parametrize(
    "changed", [{"seed": 1}, {"shuffle": False}, {"arrays": np.arange(11)}]
)
def test_restore_refuses_other_data_or_order(changed):
    state = ArrayStream(np.arange(10), 2).state()
    kwargs = {"arrays": np.arange(10), "batch_size": 2, **changed}
    with pytest.raises(ValueError, match="was saved with"):
        ArrayStream(**kwargs).restore(state)


def test_batches_cannot_damage_the_data():
    x = np.zeros((6, 2))
    (batch,) = next(ArrayStream(x, 3))
    batch += 1
    (view,) = next(ArrayStream(x, 3, shuffle=False))
    with pytest.raises(ValueError, match="read-only"):
        view += 1
    assert not x.any()


def test_kept_batches_do_not_change():
    stream = ArrayStream(np.arange(6), 2, seed=1)
    kept = [next(stream)[0] for _ in range(30)]
    copies = [b.copy() for b in kept]
    for _ in range(30):
        next(stream)
    np.testing.assert_array_equal(kept, copies)


def test_dtypes_and_trailing_shapes_stay():
    parts = (np.zeros((5, 2, 3), np.float64), np.zeros(5, np.int64), np.zeros((5, 0)))
    for shuffle in (True, False):
        got = next(ArrayStream(parts, 2, shuffle=shuffle))
        assert [(g.dtype, g.shape[1:]) for g in got] == [
            (p.dtype, p.shape[1:]) for p in parts
        ]


@pytest.mark.parametrize(
    ("kwargs", "text"),
    [
        ({"arrays": np.zeros((0, 3)), "batch_size": 2}, "at least one example"),
        ({"arrays": (np.zeros(3), np.zeros(4)), "batch_size": 2}, r"\(3,\), \(4,\)"),
        ({"arrays": np.float32(3), "batch_size": 2}, "first dimension"),
        ({"arrays": np.zeros(3), "batch_size": 0}, "got 0"),
        ({"arrays": np.zeros(3), "batch_size": 2, "seed": -1}, "got -1"),
        (
            {"arrays": np.zeros(3), "batch_size": 4, "drop_remainder": True},
            "3 examples make no batch of 4",
        ),
    ],
)
def test_mistakes_are_named(kwargs, text):
    with pytest.raises(ValueError, match=text):
        ArrayStream(**kwargs)
