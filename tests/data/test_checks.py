"""checked(): what does not fit is named before a compiled step sees it."""

import numpy as np
import pytest

from retrax.data.checks import checked
from retrax.data.sources import ListStream


def good(n=4, length=3):
    return np.zeros((n, length), np.float32), np.zeros(n, np.int32)


def test_good_batches_pass_unchanged_even_smaller_ones():
    batches = [good(), good(), good(2)]
    got = list(checked(batches))
    assert all(g[0] is b[0] and g[1] is b[1] for g, b in zip(got, batches, strict=True))
    assert len(checked(batches)) == 3


@pytest.mark.parametrize(
    ("bad", "text"),
    [
        ((good()[0],), "batch 2 has 1 parts, the first batch had 2"),
        (
            (good()[0], np.zeros(3, np.int32)),
            "batch 2, part 1 has 3 examples, part 0 has 4",
        ),
        (
            (good()[0], np.zeros(4, np.int64)),
            r"batch 2, part 1: expected int32 of shape \(batch,\).* got int64",
        ),
        (
            good(length=5),
            r"batch 2, part 0: expected float32 of shape \(batch, 3\).*\(batch, 5\)",
        ),
        ((good()[0][..., None], good()[1]), r"\(batch, 3, 1\)"),
        ((np.float32(1), np.int32(1)), "batch 2, part 0 is a scalar"),
    ],
)
def test_bad_batches_are_named(bad, text):
    stream = checked([good(), good(), bad, good()])
    next(stream), next(stream)
    with pytest.raises(ValueError, match=text):
        next(stream)


def test_the_first_batch_is_checked_too():
    with pytest.raises(ValueError, match="batch 0, part 1 has 2 examples"):
        next(checked([(np.zeros(3), np.zeros(2))]))


def test_lengths_may_vary_when_asked_but_rank_and_dtype_may_not():
    stream = checked([good(), good(length=9)], same_shapes=False)
    assert [b[0].shape for b in stream] == [(4, 3), (4, 9)]
    bad = (good()[0][..., None], good()[1])
    with pytest.raises(ValueError, match="expected float32 of rank 2.*rank 3"):
        list(checked([good(), bad], same_shapes=False))


def test_the_state_is_that_of_the_wrapped_stream():
    inner = ListStream([good(n) for n in (1, 2, 3)])
    stream = checked(inner)
    stream.peek()
    assert stream.state() == ListStream([good()] * 3).state()
    next(stream)
    resumed = checked(ListStream([good(n) for n in (1, 2, 3)]))
    resumed.restore(stream.state())
    assert [len(b[0]) for b in resumed] == [2, 3]
