"""Checkpoints compared part by part and leaf by leaf, bit for bit.

Shared by `retrax verify-resume` and `retrax compare`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

__all__ = ["Comparison", "compare_parts", "first_difference", "n_leaves"]

# What says which run it is, and not where it stands.
_NOT_COMPARED = ("kind", "gin", "layers", "input_signature")
_FIRST = ("step", "weights", "state", "slots", "history", "data", "run_key")


class Comparison(NamedTuple):
    """One part of two checkpoints.

    Attributes:
      part: its name, such as 'weights'.
      n_leaves: number of arrays and values in it.
      difference: path and values of the first leaf that differs, or None.
    """

    part: str
    n_leaves: int
    difference: str | None


def compare_parts(a: dict[str, Any], b: dict[str, Any]) -> list[Comparison]:
    """Compares two payloads of runs; parts that are empty in both are left out."""
    names = [n for n in (*a, *b) if n not in _NOT_COMPARED]
    order = sorted(
        dict.fromkeys(names),
        key=lambda n: (_FIRST.index(n) if n in _FIRST else len(_FIRST), n),
    )
    found = []
    for name in order:
        one, other = _named(a, name), _named(b, name)
        n = n_leaves(one)
        if n or n_leaves(other):
            found.append(Comparison(name, n, first_difference(one, other)))
    return found


def first_difference(a: Any, b: Any) -> str | None:
    """Returns path and values of the first leaf that differs, or None.

    Example:
      >>> first_difference({"0.Dense/0": np.ones(2)}, {"0.Dense/0": np.zeros(2)})
      '0.Dense/0: 2 of 2 numbers, by up to 1'
    """
    ours, theirs = dict(_leaves(a)), dict(_leaves(b))
    for path, value in ours.items():
        if path not in theirs:
            return f"{path or '(all)'}: only in the first"
        text = _difference(value, theirs[path])
        if text:
            return f"{path or '(all)'}: {text}"
    more = [path for path in theirs if path not in ours]
    return f"{more[0]}: only in the second" if more else None


def n_leaves(value: Any) -> int:
    """Returns how many arrays and values are in nested containers."""
    return sum(1 for _ in _leaves(value))


def _named(payload: dict[str, Any], part: str) -> Any:
    """A part of a payload, slots by the paths of the weights they belong to."""
    value, paths = payload.get(part, {}), payload.get("slot_paths")
    if part == "slots" and isinstance(value, list | tuple) and paths:
        if len(value) == len(paths):
            return dict(zip(paths, value, strict=True))
    return value


def _leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        items = list(value.items())
    elif isinstance(value, list | tuple):
        items = list(enumerate(value))
    else:
        yield path, value
        return
    for key, child in items:
        yield from _leaves(child, f"{path}/{key}" if path else str(key))


def _difference(a: Any, b: Any) -> str | None:
    if not isinstance(a, np.ndarray) or not isinstance(b, np.ndarray):
        # repr, so that NaN is like NaN, and 1 unlike True.
        same = type(a) is type(b) and repr(a) == repr(b)
        return None if same else f"{str(a)[:60]} against {str(b)[:60]}"
    if a.dtype != b.dtype or a.shape != b.shape:
        return f"{a.dtype}{a.shape} against {b.dtype}{b.shape}"
    if a.tobytes() == b.tobytes():
        return None
    bits = np.dtype((np.void, a.dtype.itemsize))
    flat_a, flat_b = (np.ascontiguousarray(x).reshape(-1) for x in (a, b))
    n = int(np.sum(flat_a.view(bits) != flat_b.view(bits)))
    text = f"{n} of {a.size} numbers"
    if a.dtype.kind in "SUMmV" and a.dtype.type.__module__ == "numpy":
        return text
    with np.errstate(all="ignore"):
        gap = np.abs(flat_a.astype(np.complex128) - flat_b.astype(np.complex128))
    # Not for other bits of NaN, or another sign of 0.
    return f"{text}, by up to {np.nanmax(gap):.3g}" if np.any(gap > 0) else text
