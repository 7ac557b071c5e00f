"""`ArrayStream`: seeded batches of arrays in memory, with an exact position.

Second in the order of `retrax.data`, after `streams`.
"""

import operator
from typing import Any

import numpy as np

from retrax.data.shares import check_shard, own_rows
from retrax.data.streams import Batch, Position, Stream, as_batch, check_kind

# Rows are gathered this many bytes at a time and handed out as views: one call of
# numpy per block, not per batch. A batch that is kept keeps its block alive.
_BLOCK_BYTES = 1 << 20


class ArrayStream(Stream):
    """Streams batches of rows of arrays in memory, in seeded random order or not.

    Epochs are not mixed: every epoch is one permutation, drawn from (seed, epoch)
    alone, and its last batch is smaller unless `drop_remainder`. The order depends
    neither on the NumPy version nor on any global state. The arrays are not copied;
    without shuffling batches are read-only views of them.

    Args:
      arrays: one array or several with equal first dimension.
      batch_size: rows in a batch.
      shuffle: whether each epoch is permuted.
      seed: non-negative; with the epoch number it fixes the order.
      repeat: whether to go on after the first epoch. If not, each row comes once.
      drop_remainder: whether to leave out an epoch's last, smaller batch, so that
        shapes stay fixed.
      shard: (i, n): read only the rows of batches that are of process i of n; others
        are zeros, or their true values where that costs nothing. See `shares`.

    Raises:
      ValueError: no rows, unequal first dimensions, a bad batch_size, seed or shard, or
        drop_remainder with fewer rows than one batch.

    >>> stream = ArrayStream((np.arange(5),), 2, shuffle=False, repeat=False)
    >>> [x.tolist() for (x,) in stream]
    [[0, 1], [2, 3], [4]]
    """

    def __init__(
        self,
        arrays: Any,
        batch_size: int,
        shuffle: bool = True,
        seed: int = 0,
        repeat: bool = True,
        drop_remainder: bool = False,
        shard: tuple[int, int] = (0, 1),
    ):
        self._arrays = as_batch(arrays)
        self._n = n = _common_rows(self._arrays)
        if batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, got {batch_size}")
        if seed < 0:
            raise ValueError(f"seed must not be negative, got {seed}")
        if drop_remainder and n < batch_size:
            raise ValueError(
                f"{n} examples make no batch of {batch_size} with drop_remainder=True; "
                "lower batch_size or set drop_remainder=False"
            )
        self.batch_size = batch_size = operator.index(batch_size)
        self._shuffle, self._seed = bool(shuffle), operator.index(seed)
        self._repeat, self._drop_remainder = repeat, drop_remainder
        self._shard = check_shard(shard)
        self._last = n - batch_size if drop_remainder else n - 1
        self.batches_per_epoch = self._last // batch_size + 1
        self.is_endless = bool(repeat)
        if not repeat:
            self.n_batches = self.batches_per_epoch
            self.n_examples = min(n, self.batches_per_epoch * batch_size)
        row_bytes = sum(a.nbytes for a in self._arrays) // n
        block_batches = max(1, _BLOCK_BYTES // max(1, row_bytes * batch_size))
        self._block_rows = block_batches * batch_size
        self._epoch, self._next, self._order = 0, 0, None
        self._block: Batch = ()
        self._start = self._stop = 0  # the rows that the block holds

    def read(self) -> Batch:
        low = self._next
        if low > self._last:
            if not self._repeat:
                raise StopIteration
            self._epoch, self._next, self._order = self._epoch + 1, 0, None
            self._start = self._stop = low = 0
        if low >= self._stop:
            self._load(low)
        self._next = high = min(low + self.batch_size, self._n)
        low, high = low - self._start, high - self._start
        return tuple([a[low:high] for a in self._block])

    def position(self) -> Position:
        return {
            "kind": "array",
            "epoch": self._epoch,
            "position": self._next,
            "seed": self._seed,
            "shuffle": self._shuffle,
            "n_examples": self._n,
        }

    def seek(self, position: Position) -> None:
        mine = self.position()
        check_kind(position, "array", tuple(mine))
        for key in ("n_examples", "shuffle", "seed"):
            if position[key] != mine[key]:
                raise ValueError(
                    f"the state was saved with {key}={position[key]}, this stream has "
                    f"{key}={mine[key]}; build the stream as it was, or do not restore"
                )
        self._epoch, self._next = position["epoch"], position["position"]
        self._order = None
        self._start = self._stop = 0

    def fresh(self) -> "ArrayStream":
        return self._copy(self._shard)

    def sharded(self, shard: tuple[int, int]) -> "ArrayStream":
        stream = self._copy(shard)
        stream.restore(self.state())
        return stream

    def _copy(self, shard: tuple[int, int]) -> "ArrayStream":
        return ArrayStream(
            self._arrays,
            self.batch_size,
            shuffle=self._shuffle,
            seed=self._seed,
            repeat=self._repeat,
            drop_remainder=self._drop_remainder,
            shard=shard,
        )

    def close(self) -> None:
        super().close()
        self._repeat, self._next, self._block = False, self._n, ()

    def _load(self, low: int) -> None:
        if not self._shuffle:
            self._block = tuple([_read_only(a) for a in self._arrays])
            self._start, self._stop = 0, self._n
            return
        if self._order is None:
            self._order = _permutation(self._n, self._seed, self._epoch)
        self._start, self._stop = low, min(low + self._block_rows, self._n)
        rows = self._order[self._start : self._stop]
        if self._shard[1] == 1:
            self._block = tuple([a.take(rows, axis=0) for a in self._arrays])
            return
        own = self._own(len(rows))
        block = [np.zeros((len(rows), *a.shape[1:]), a.dtype) for a in self._arrays]
        for part, a in zip(block, self._arrays, strict=True):
            part[own] = a.take(rows[own], axis=0)
        self._block = tuple(block)

    def _own(self, n_rows: int) -> np.ndarray:
        """Which of the rows of a block are of our share, batch by batch."""
        own = []
        for low in range(0, n_rows, self.batch_size):
            rows = own_rows(min(self.batch_size, n_rows - low), self._shard)
            own.append(np.arange(low + rows.start, low + rows.stop))
        return np.concatenate(own)


def _common_rows(arrays: Batch) -> int:
    rows = {len(a) if a.ndim else None for a in arrays}
    shapes = [a.shape for a in arrays]
    if len(rows) != 1 or None in rows:
        raise ValueError(
            f"arrays must share their first dimension, got shapes {shapes}"
        )
    n = rows.pop()
    if not n:
        raise ValueError(f"a stream needs at least one example, got shapes {shapes}")
    return n


def _permutation(n: int, seed: int, epoch: int) -> np.ndarray:
    """Sorts random keys that carry their index in the low bits.

    NumPy promises the raw bits of a generator for ever, but not what `permutation`
    makes of them; sorting unique keys also leaves nothing to the sort's own order.
    """
    mask = np.uint64((1 << n.bit_length()) - 1)
    keys = np.random.PCG64([seed, epoch]).random_raw(n) & ~mask
    keys |= np.arange(n, dtype=np.uint64)
    keys.sort()
    return (keys & mask).astype(np.intp)


def _read_only(array: np.ndarray) -> np.ndarray:
    view = array.view()
    view.flags.writeable = False
    return view
