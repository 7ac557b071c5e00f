"""Composition of pipeline functions: `Serial` and `Parallel`.

First of the pipeline modules, which stand fourth in the order of `retrax.data`.
"""

import inspect
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any


def Serial(*fns: Any) -> Callable[..., Iterator[Any]]:
    """Returns a function that runs pipeline functions one after the other.

    Lists and tuples of functions are flattened. Called without a generator, the
    result calls the first function with None, or without arguments if it takes none;
    the first may also be a source itself: an iterator, or any iterable but a list.

    >>> odd = Serial(range(9), lambda numbers: (n for n in numbers if n % 2))
    >>> list(odd())
    [1, 3, 5, 7]

    Raises:
      TypeError: something other than the first is no function.
    """
    flat = list(_flatten(fns))
    for i, fn in enumerate(flat):
        if not callable(fn) and (i or not hasattr(fn, "__iter__")):
            raise TypeError(
                f"data.Serial takes functions from generator to generator, got {fn!r} "
                f"in position {i}"
            )

    def serial(generator: Iterable[Any] | None = None) -> Any:
        for i, fn in enumerate(flat):
            generator = _start(fn, generator) if i == 0 else fn(generator)
        return generator

    return serial


def Parallel(
    fns: Sequence[Any] | None = None,
    counters: Sequence[int] | None = None,
    reweight_by_minimum: bool = False,
    gradually_reweight: bool = False,
    use_remainders: bool = False,
) -> Callable[..., Iterator[Any]]:
    """Returns a function that mixes the examples of several sources.

    In every round source i gives counters[i] examples, one at a time in turn. A
    source that ends is left out from then on; the mixture ends with the last one.

    Args:
      fns: the sources: functions as in `Serial`, all given the same generator if
        there is one.
      counters: examples of each source in a round; None: one of each. Sources with 0
        are left out.
      reweight_by_minimum: whether to divide counters by the smallest, rounding down.
      gradually_reweight: whether to nest the sources instead, by counter: for
        counters 1, 20, 40 a round is (a (b c c) * 20).
      use_remainders: whether a nested round ends with the examples that nesting
        leaves out because counters are not multiples of each other.

    Raises:
      ValueError: no source, a negative counter, or lengths that differ.
    """
    sources = list(fns or [])
    counts = [1] * len(sources) if counters is None else list(counters)
    if len(counts) != len(sources) or min(counts, default=0) < 0 or not any(counts):
        raise ValueError(
            "data.Parallel needs one counter for each source, none negative and not "
            f"all 0; got {len(sources)} sources and counters {counts}"
        )
    sources = [fn for fn, count in zip(sources, counts, strict=True) if count]
    counts = [count for count in counts if count]
    if reweight_by_minimum:
        counts = [count // min(counts) for count in counts]

    def parallel(generator: Iterable[Any] | None = None) -> Iterator[Any]:
        mixed = [_Source(iter(_start(fn, generator))) for fn in sources]
        if gradually_reweight:
            return _nested(mixed, counts, use_remainders)
        return _in_turn(mixed, counts)

    return parallel


class _Source:
    """An iterator that knows whether it has ended."""

    def __init__(self, iterator: Iterator[Any]):
        self._iterator = iterator
        self.ended = False

    def draw(self, n: int = 1) -> Iterator[Any]:
        """Yields up to n items."""
        for _ in range(n):
            try:
                item = next(self._iterator)
            except StopIteration:
                self.ended = True
                return
            yield item


def _in_turn(sources: list[_Source], counts: list[int]) -> Iterator[Any]:
    left = list(counts)
    for i in itertools.cycle(range(len(sources))):
        if left[i] and not sources[i].ended:
            left[i] -= 1
            yield from sources[i].draw()
        if not any(n and not s.ended for n, s in zip(left, sources, strict=True)):
            left = list(counts)
        if all(source.ended for source in sources):
            return


def _nested(
    sources: list[_Source], counts: list[int], use_remainders: bool
) -> Iterator[Any]:
    order = sorted(range(len(counts)), key=lambda i: counts[i])
    sources, counts = [sources[i] for i in order], [counts[i] for i in order]

    def rounds(k: int, times: int) -> Iterator[Any]:
        for _ in range(times):
            yield from sources[k].draw()
            if k + 1 < len(sources):
                yield from rounds(k + 1, counts[k + 1] // counts[k])

    while not all(source.ended for source in sources):
        yield from rounds(0, 1)
        if use_remainders:
            given = 1
            for k, source in enumerate(sources):
                if k:
                    given *= counts[k] // counts[k - 1]
                yield from source.draw(counts[k] - given)


def _start(fn: Any, generator: Iterable[Any] | None) -> Any:
    if not callable(fn):
        return iter(fn)
    return fn(generator) if generator is not None or _takes_argument(fn) else fn()


def _takes_argument(fn: Callable[..., Any]) -> bool:
    try:
        inspect.signature(fn).bind(None)
    except TypeError:
        return False
    except ValueError:  # some functions written in C have no signature
        return True
    return True


def _flatten(fns: Any) -> Iterator[Any]:
    for fn in fns:
        if isinstance(fn, (list, tuple)):
            yield from _flatten(fn)
        else:
            yield fn
