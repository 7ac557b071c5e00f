"""What each of several processes reads of a batch."""

import numpy as np
import pytest

from retrax import data
from retrax.data.shares import own_rows


def shares(make, n):
    """Reads n shares of a stream side by side: a list of batches for each."""
    return [list(make((i, n))) for i in range(n)]


def assembled(batches, n):
    """Takes the own rows of each share, and joins them."""
    rows = batches[0][0].shape[0]
    cuts = [own_rows(rows, (i, n)) for i in range(n)]
    return [
        np.concatenate([b[k][cut] for b, cut in zip(batches, cuts, strict=True)])
        for k in range(len(batches[0]))
    ]


@pytest.mark.parametrize("n", [2, 3, 7])
@pytest.mark.parametrize("shuffle", [True, False])
def test_shares_of_an_array_stream_make_up_its_batches(n, shuffle):
    x, y = np.arange(1, 24).reshape(23, 1) * np.ones(3), np.arange(1, 24)

    def stream(shard):
        return data.ArrayStream(
            (x, y), 5, shuffle=shuffle, seed=3, repeat=False, shard=shard
        )

    whole = list(stream((0, 1)))
    read = shares(stream, n)
    assert [len(batches) for batches in read] == [len(whole)] * n == [5] * n
    for t, expected in enumerate(whole):
        for part, want in zip(
            assembled([r[t] for r in read], n), expected, strict=True
        ):
            np.testing.assert_array_equal(part, want)


def test_rows_of_other_shares_are_not_read():
    x = np.arange(1, 9)
    (own,) = next(data.ArrayStream((x,), 8, shard=(1, 4)))
    assert np.count_nonzero(own) == 2 and own[2:4].all()


def test_a_share_has_the_position_of_the_whole_stream():
    x = np.arange(1, 41)
    whole = data.ArrayStream((x,), 4, seed=1)
    for _ in range(3):
        next(whole)
    share = whole.sharded((0, 2))
    assert share.state() == whole.state()
    np.testing.assert_array_equal(next(share)[0][:2], next(whole)[0][:2])
    assert share.state() == whole.state()


def test_inputs_hand_their_share_to_streams_and_to_functions_that_take_it():
    x = np.arange(1, 9)
    inputs = data.Inputs(data.ArrayStream((x,), 4, shuffle=False, repeat=False))
    assert inputs.input_shape == ()
    (batch,) = next(inputs.train_stream(2, (1, 2)))
    np.testing.assert_array_equal(batch[2:], [3, 4])

    seen = []

    def own_files(n_devices, shard=(0, 1)):
        seen.append((n_devices, shard))
        i, n = shard
        return iter([(x[i::n],)])

    inputs = data.Inputs(own_files)
    assert [len(part) for part in inputs.example_shape_dtype[0]] == [1]
    (batch,) = next(inputs.train_stream(4, (1, 2)))
    assert seen == [(1, (0, 1)), (4, (1, 2))]
    np.testing.assert_array_equal(batch, [0, 0, 0, 0, 2, 4, 6, 8])


def test_other_streams_are_read_whole():
    x = np.arange(6)
    inputs = data.Inputs(lambda: iter([(x,)]))
    np.testing.assert_array_equal(next(inputs.train_stream(1, (1, 2)))[0], x)
    taken = data.ArrayStream((x + 1,), 2, shuffle=False).take(1).sharded((1, 2))
    assert [b[0].tolist() for b in taken] == [[1, 2]]  # Views of memory cost nothing.


@pytest.mark.parametrize("shard", [(2, 2), (-1, 2), (0, 0), "01", (0.0, 1), (True, 2)])
def test_what_is_no_share_is_refused(shard):
    with pytest.raises(ValueError, match=r"shard must be \(i, n\)"):
        data.ArrayStream((np.arange(4),), 2, shard=shard)
