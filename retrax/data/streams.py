"""Streams: iterators of numpy batches that know where they are.

First in the order of `retrax.data`: everything else here makes streams or takes
them. A batch is a flat tuple of numpy arrays that share their leading dimension,
such as (inputs, targets) or (inputs, targets, weights). A stream keeps the dtypes
it is given; narrowing float64 or int64 for a device is the trainer's business.

The position of a stream is a small dict of plain values, so it goes into any
checkpoint, and a restored stream continues with the very batch that was next.
"""

from collections.abc import Callable, Iterator
from typing import Any, Self

import numpy as np

Batch = tuple[np.ndarray, ...]
Position = dict[str, Any]


class Stream(Iterator[Batch]):
    """Iterates over batches, and can say and change where it stands.

    Subclasses write `read()` (the next batch, or StopIteration), `position()` (a
    dict of plain ints, strings, lists or bytes) and `seek(position)`, and where it
    makes sense `fresh()`. Users call `next`, `peek`, `state`, `restore`, `close`.

    Attributes:
      n_batches: batches in one whole pass; None if endless or unknown.
      n_examples: examples in one whole pass; None if endless or unknown.
      is_endless: whether it is known never to end.
    """

    n_batches: int | None = None
    n_examples: int | None = None
    is_endless: bool = False
    _held: tuple[Batch, Position] | None = None

    def read(self) -> Batch:
        """Returns the next batch; raises StopIteration at the end."""
        raise NotImplementedError(f"{type(self).__name__} must define read()")

    def position(self) -> Position:
        """Returns where the next `read` starts, as plain values."""
        raise NotImplementedError(f"{type(self).__name__} must define position()")

    def seek(self, position: Position) -> None:
        """Makes the next `read` start at a value of `position()`."""
        raise NotImplementedError(f"{type(self).__name__} must define seek()")

    def fresh(self) -> "Stream":
        """Returns an independent stream over the same data, at its beginning.

        Raises:
          TypeError: the stream has no way to begin again.
        """
        raise TypeError(
            f"{type(self).__name__} cannot begin again; build it in a function and "
            "pass that function instead"
        )

    def __next__(self) -> Batch:
        if self._held is not None:
            batch, self._held = self._held[0], None
            return batch
        return self.read()

    def __iter__(self) -> Self:
        return self

    def peek(self) -> Batch:
        """Returns the next batch without consuming it.

        Raises:
          StopIteration: the stream has ended.
        """
        if self._held is None:
            position = self.position()
            self._held = (self.read(), position)
        return self._held[0]

    def state(self) -> Position:
        """Returns the position of the batch that `next` would return."""
        return dict(self.position() if self._held is None else self._held[1])

    def restore(self, state: Position) -> None:
        """Continues at a position that `state()` returned, here or elsewhere.

        Raises:
          ValueError: the state belongs to another kind of stream, or to other data.
        """
        if self._held is not None and self._held[1] == state:
            return
        self._held = None
        self.seek(state)

    def sharded(self, shard: tuple[int, int]) -> "Stream":
        """Returns a stream for process i of n, (i, n), that may read its rows only.

        Batches have all rows, but those of other processes may be zeros; see `shares`.
        A stream that cannot do with less, as this one, reads all of them.
        """
        del shard
        return self

    def close(self) -> None:
        """Releases what the stream holds; a closed stream has ended."""
        self._held = None

    def map(self, fn: Callable[[Batch], Any]) -> "Stream":
        """Returns a stream of `fn(batch)`; the state is this stream's.

        `fn` takes the tuple of arrays and returns a batch. A resumed run repeats
        the same batches if `fn` depends on its argument alone.
        """
        return MappedStream(self, fn)

    def take(self, n: int) -> "Stream":
        """Returns a stream of the next `n` batches only (fewer if this one ends)."""
        return TakenStream(self, n)

    def __len__(self) -> int:
        """Returns the number of batches in one whole pass."""
        if self.n_batches is None:
            raise TypeError(
                f"{type(self).__name__} is endless or its length is not known; "
                "take(n) makes a finite stream of it"
            )
        return self.n_batches

    def __bool__(self) -> bool:
        return True  # `if stream:` asks whether there is one, not for its length.

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *unused_exc_info: object) -> None:
        self.close()


class MappedStream(Stream):
    """Applies a function to every batch of another stream."""

    def __init__(self, stream: Stream, fn: Callable[[Batch], Any]):
        if not callable(fn):
            raise TypeError(f"map needs a function of a batch, got {fn!r}")
        self._stream, self._fn = stream, fn
        self.n_batches, self.n_examples = stream.n_batches, stream.n_examples
        self.is_endless = stream.is_endless

    def read(self) -> Batch:
        return as_batch(self._fn(next(self._stream)))

    def position(self) -> Position:
        return self._stream.state()

    def seek(self, position: Position) -> None:
        self._stream.restore(position)

    def fresh(self) -> Stream:
        return MappedStream(self._stream.fresh(), self._fn)

    def close(self) -> None:
        super().close()
        self._stream.close()


class TakenStream(Stream):
    """Ends after n batches of another stream."""

    def __init__(self, stream: Stream, n: int):
        if n < 1:
            raise ValueError(f"take needs at least 1 batch, got n={n}")
        self._stream, self._n, self._taken = stream, n, 0
        whole = stream.n_batches
        self.n_batches = n if whole is None else min(n, whole)
        if self.n_batches == whole:
            self.n_examples = stream.n_examples

    def read(self) -> Batch:
        if self._taken >= self._n:
            raise StopIteration
        batch = next(self._stream)
        self._taken += 1
        return batch

    def position(self) -> Position:
        return {"kind": "take", "taken": self._taken, "inner": self._stream.state()}

    def seek(self, position: Position) -> None:
        check_kind(position, "take", ("taken", "inner"))
        self._stream.restore(position["inner"])
        self._taken = position["taken"]

    def fresh(self) -> Stream:
        return TakenStream(self._stream.fresh(), self._n)

    def sharded(self, shard: tuple[int, int]) -> Stream:
        stream = TakenStream(self._stream.sharded(shard), self._n)
        stream._taken = self._taken
        return stream

    def close(self) -> None:
        super().close()
        self._taken = self._n
        self._stream.close()


def peek(stream: Stream) -> Batch:
    """Returns the next batch of a stream without consuming it.

    >>> from retrax.data import as_stream
    >>> stream = as_stream([np.array([1, 2]), np.array([3, 4])])
    >>> peek(stream), next(stream)
    ((array([1, 2]),), (array([1, 2]),))

    Raises:
      StopIteration: the stream has ended.
      TypeError: the argument is not a Stream (a plain iterator cannot take a
        batch back).
    """
    if not isinstance(stream, Stream):
        raise TypeError(
            f"peek needs a Stream, got {type(stream).__name__}; wrap it once with "
            "as_stream(...) and use the wrapped one from then on"
        )
    return stream.peek()


def as_batch(item: Any) -> Batch:
    """Returns an item of any usual form as a flat tuple of numpy arrays.

    Tuples and lists become tuples, a single array a 1-tuple. Whatever has
    `__array__` or `numpy()` (JAX, TensorFlow, PyTorch on the CPU) is converted;
    dtypes stay as they are.

    Raises:
      TypeError: the item is a dict, None, nested or ragged.
    """
    if type(item) is tuple and item and all(type(p) is np.ndarray for p in item):
        return item
    if isinstance(item, dict):
        raise TypeError(
            f"a batch must be a tuple of arrays, got a dict with keys {list(item)}; "
            "map it first, for example (b['inputs'], b['targets']) for b in batches"
        )
    if isinstance(item, (tuple, list)):
        if not item:
            raise TypeError("a batch must hold at least one array, got an empty one")
        return tuple(_as_array(part, i) for i, part in enumerate(item))
    return (_as_array(item, 0),)


def check_kind(position: Position, kind: str, keys: tuple[str, ...]) -> None:
    """Raises ValueError unless a state was made by a stream of this kind."""
    if not isinstance(position, dict) or position.get("kind") != kind:
        got = position.get("kind") if isinstance(position, dict) else position
        raise ValueError(
            f"this stream restores states of kind {kind!r}, got {got!r}; was the "
            "state saved with other data or another pipeline?"
        )
    missing = [key for key in keys if key not in position]
    if missing:
        raise ValueError(f"the {kind!r} state {position} lacks {missing}")


def _as_array(part: Any, index: int) -> np.ndarray:
    if isinstance(part, (tuple, list)) and any(np.ndim(p) > 0 for p in part):
        raise TypeError(
            f"part {index} of a batch is a nested {type(part).__name__}; batches are "
            "flat: (x1, x2, y), not ((x1, x2), y); np.stack equal parts into one array"
        )
    to_numpy = getattr(part, "numpy", None)
    if callable(to_numpy) and not hasattr(part, "__array__"):
        part = to_numpy()
    array = np.asarray(part)
    if array.dtype == object:
        raise TypeError(
            f"part {index} of a batch is {type(part).__name__}, which is not numeric "
            "array data; a batch is a tuple of arrays such as (inputs, targets)"
        )
    return array
