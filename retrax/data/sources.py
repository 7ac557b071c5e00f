"""Streams over lists and generators, and `as_stream`, which takes any usual source.

Second in the order of `retrax.data`, after `streams`.
"""

import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
from absl import logging

from retrax.data.shares import ShareStream
from retrax.data.streams import Batch, Position, Stream, as_batch, check_kind


class ListStream(Stream):
    """Streams the batches of a list, once.

    Raises:
      ValueError: the list is empty.
      TypeError: an item is no batch (see `as_batch`).
    """

    def __init__(self, batches: Sequence[Any]):
        if not batches:
            raise ValueError("a stream needs at least one batch, got an empty list")
        self._batches = [as_batch(b) for b in batches]
        self._next = 0
        self.n_batches = len(self._batches)
        if all(np.ndim(b[0]) for b in self._batches):
            self.n_examples = sum(len(b[0]) for b in self._batches)

    def read(self) -> Batch:
        if self._next >= len(self._batches):
            raise StopIteration
        self._next += 1
        return self._batches[self._next - 1]

    def position(self) -> Position:
        return {"kind": "list", "next": self._next, "n_batches": self.n_batches}

    def seek(self, position: Position) -> None:
        check_kind(position, "list", ("next", "n_batches"))
        if position["n_batches"] != self.n_batches:
            raise ValueError(
                f"the state was saved with {position['n_batches']} batches, this list "
                f"has {self.n_batches}"
            )
        self._next = position["next"]

    def fresh(self) -> "ListStream":
        return ListStream(self._batches)

    def close(self) -> None:
        super().close()
        self._next = len(self._batches)


class GeneratorStream(Stream):
    """Streams the items of a plain iterator, or of a function that returns one.

    A generator cannot say where it stands, so the state is the number of batches
    taken, and `restore` replays: it reads and discards batches up to that number,
    with a warning. A function can be called again, so it can also go back; a bare
    iterator only goes on, from where it stands.

    Args:
      source: an iterator, or a function without arguments that returns an iterable.

    >>> stream = GeneratorStream(lambda: (np.full(2, i) for i in range(9)))
    >>> stream.restore({"kind": "generator", "batches": 3})
    >>> next(stream)
    (array([3, 3]),)
    """

    def __init__(self, source: Iterator[Any] | Callable[[], Iterable[Any]]):
        self._make = None if isinstance(source, Iterator) else source
        if self._make is not None and not callable(self._make):
            raise TypeError(
                "GeneratorStream needs an iterator or a function that returns one, got "
                f"{type(source).__name__}; as_stream(...) accepts more"
            )
        self._iterator = source if isinstance(source, Iterator) else None
        self._read = 0
        self._closed = False

    def read(self) -> Batch:
        if self._closed:
            raise StopIteration
        if self._iterator is None:
            self._iterator = _iterate(self._make)
        item = next(self._iterator)
        self._read += 1
        return as_batch(item)

    def position(self) -> Position:
        return {"kind": "generator", "batches": self._read}

    def seek(self, position: Position) -> None:
        check_kind(position, "generator", ("batches",))
        target = position["batches"]
        if target < self._read:
            if self._make is None:
                raise ValueError(
                    f"cannot go back from batch {self._read} to batch {target} of a "
                    "plain iterator; pass the function that makes it instead"
                )
            _close(self._iterator)
            self._iterator, self._read = None, 0
        if target == self._read:
            return
        logging.warning(
            "Replaying a generator: reading and discarding %d batches to continue at "
            "batch %d. A stream with a real position, such as ArrayStream, is instant.",
            target - self._read,
            target,
        )
        while self._read < target:
            try:
                self.read()
            except StopIteration:
                raise ValueError(
                    f"the generator ended after {self._read} batches, before batch "
                    f"{target} where the saved run stood; has its data changed?"
                ) from None

    def fresh(self) -> Stream:
        return super().fresh() if self._make is None else GeneratorStream(self._make)

    def reads_like(self, other: Stream) -> bool:
        """Returns whether another stream reads the very same iterator."""
        return (
            isinstance(other, GeneratorStream)
            and other._iterator is not None
            and other._iterator is self._iterator
        )

    def close(self) -> None:
        super().close()
        self._closed = True
        _close(self._iterator)


class _PositionedStream(Stream):
    """Adapts an iterator that has state() and restore() but is no Stream."""

    def __init__(self, iterator: Any):
        self._iterator = iterator

    def read(self) -> Batch:
        return as_batch(next(self._iterator))

    def position(self) -> Position:
        return self._iterator.state()

    def seek(self, position: Position) -> None:
        self._iterator.restore(position)

    def close(self) -> None:
        super().close()
        _close(self._iterator)


def as_stream(
    source: Any, n_devices: int = 1, shard: tuple[int, int] = (0, 1)
) -> Stream:
    """Returns any usual source of batches as a Stream.

    Accepts a Stream (returned as it is), an iterator or generator, a function that
    returns one (called with `n_devices` if it needs an argument, as Trax's do), a
    list of batches, and any other iterable that can be run through more than once,
    such as a `tf.data.Dataset` or a data loader. An iterator of one's own that has
    `state()` and `restore(state)` keeps them.

    Args:
      source: where batches come from.
      n_devices: for functions that take it.
      shard: (i, n), where n processes read together and this is number i. A function
        that takes `shard` gets it, and gives batches of its own rows only; see
        `ShareStream`. Others give all rows.

    Raises:
      TypeError: the source is none of these; the text names what was got.
      ValueError: the source is an empty list.

    >>> x = np.ones((4, 2), np.float32)
    >>> [part.shape for part in next(as_stream(lambda n_devices: iter([(x, x)])))]
    [(4, 2), (4, 2)]
    """
    check_source(source, "as_stream")
    if isinstance(source, Stream):
        return source if shard[1] == 1 else source.sharded(shard)
    if isinstance(source, list):
        return ListStream(source)
    if isinstance(source, Iterator):
        return _wrap(source)
    if _is_reiterable(source):
        return GeneratorStream(lambda: source)
    if _takes_shard(source):
        stream = as_stream(functools.partial(source, shard=shard), n_devices)
        return stream if shard[1] == 1 else ShareStream(stream, shard)
    make = _bind_devices(source, n_devices)
    made = make()
    if isinstance(made, Stream) or not isinstance(made, Iterator):
        if callable(made) and not _is_reiterable(made):
            raise TypeError(f"{source!r:.80} must return batches, got {made!r:.80}")
        return as_stream(made, n_devices, shard)
    return _wrap(made, make)


def check_source(source: Any, what: str) -> None:
    """Raises TypeError, or ValueError for an empty list, for no source of batches."""
    if isinstance(source, list) and not source:
        raise ValueError(f"{what} needs at least one batch, got an empty list")
    if isinstance(source, Iterator) or _is_reiterable(source) or callable(source):
        return
    raise TypeError(
        f"{what} cannot read batches from {type(source).__name__} {source!r:.80}; pass "
        "a Stream, an iterator or generator of batches, a function that returns one, "
        "or a list of batches (arrays in memory: ArrayStream((x, y), batch_size))"
    )


def _wrap(made: Iterator[Any], make: Callable[[], Any] | None = None) -> Stream:
    """Wraps an iterator; the function, if any, serves to make it once more."""
    if hasattr(made, "state") and hasattr(made, "restore"):
        return _PositionedStream(made)
    stream = GeneratorStream(made)
    if make is not None:
        stream._make = lambda: _another(make(), made)
    return stream


def _another(new: Any, old: Iterator[Any]) -> Any:
    if new is old:
        raise ValueError(
            "cannot go back: the function returns the same iterator at every call; "
            "make the generator inside the function"
        )
    return new


def _takes_shard(fn: Callable[..., Any]) -> bool:
    if isinstance(fn, functools.partial) and "shard" in fn.keywords:
        return False
    try:
        return "shard" in inspect.signature(fn).parameters
    except ValueError:  # some functions written in C have no signature
        return False


def _bind_devices(fn: Callable[..., Any], n_devices: int) -> Callable[[], Any]:
    try:
        parameters = inspect.signature(fn).parameters
    except ValueError:  # some functions written in C have no signature
        return fn
    if "n_devices" in parameters:
        return lambda: fn(n_devices=n_devices)
    needed = [
        p
        for p in parameters.values()
        if p.default is p.empty
        and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
    ]
    if len(needed) > 1:
        raise TypeError(
            f"a function that makes a stream takes n_devices or nothing, got {fn!r} "
            f"with the arguments {[p.name for p in needed]}"
        )
    return (lambda: fn(n_devices)) if needed else fn


def _is_reiterable(source: Any) -> bool:
    refused = (str, bytes, dict, set, tuple, type)
    return (
        hasattr(source, "__iter__")
        and not isinstance(source, refused)
        and not hasattr(source, "__array__")
    )


def _iterate(make: Callable[[], Iterable[Any]] | None) -> Iterator[Any]:
    if make is None:
        raise StopIteration
    return iter(make())


def _close(iterator: Any) -> None:
    close = getattr(iterator, "close", None)
    if callable(close):
        close()
