"""Which rows of a batch each process of a run reads.

Beside `streams` in the order of `retrax.data`. Where several processes train together,
each of them reads batches of all rows, of which only those of its share need be there:
other rows may be anything, and are zeros in the streams of this package. So shapes and
positions are the same in every process, and a stream that knows nothing of all this,
and reads every row, is right as well.
"""

from typing import Any

import numpy as np

from retrax.data.streams import Batch, Position, Stream

Shard = tuple[int, int]


def check_shard(shard: Any) -> Shard:
    """Returns (i, n) if it is share i of n.

    Raises:
      ValueError: it is not.
    """
    if (
        not isinstance(shard, (tuple, list))
        or len(shard) != 2
        or not all(type(k) is int for k in shard)
        or not 0 <= shard[0] < shard[1]
    ):
        raise ValueError(
            f"shard must be (i, n) with whole numbers 0 <= i < n, the number of this "
            f"process and of all, got {shard!r}"
        )
    return shard[0], shard[1]


def own_rows(n_rows: int, shard: Shard) -> slice:
    """Returns the rows of a batch that belong to share (i, n).

    All shares but the last ones have the same number of rows, n_rows / n rounded up.

    >>> [own_rows(10, (i, 4)) for i in range(4)]
    [slice(0, 3, None), slice(3, 6, None), slice(6, 9, None), slice(9, 10, None)]
    """
    i, n = shard
    each = -(-n_rows // n)
    return slice(min(i * each, n_rows), min((i + 1) * each, n_rows))


class ShareStream(Stream):
    """Puts batches of one process's own rows where they belong in the whole batch.

    It is for data that each process reads from its own files. Every process must give
    batches of as many rows, and as many batches.

    >>> from retrax.data import as_stream
    >>> next(ShareStream(as_stream([np.array([7, 8])]), (1, 3)))
    (array([0, 0, 7, 8, 0, 0]),)
    """

    def __init__(self, stream: Stream, shard: Shard):
        self._stream, self._shard = stream, check_shard(shard)
        self.n_batches, self.is_endless = stream.n_batches, stream.is_endless
        if stream.n_examples is not None:
            self.n_examples = stream.n_examples * self._shard[1]

    def read(self) -> Batch:
        own = next(self._stream)
        i, n = self._shard
        rows = len(own[0])
        whole = tuple(np.zeros((rows * n, *x.shape[1:]), x.dtype) for x in own)
        for x, part in zip(whole, own, strict=True):
            x[i * rows : (i + 1) * rows] = part
        return whole

    def position(self) -> Position:
        return self._stream.state()

    def seek(self, position: Position) -> None:
        self._stream.restore(position)

    def fresh(self) -> Stream:
        return ShareStream(self._stream.fresh(), self._shard)

    def close(self) -> None:
        super().close()
        self._stream.close()
