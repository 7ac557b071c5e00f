"""Which saved arrays belong to which wanted ones: by path and shape, never by order.

Knows paths, shapes and dtypes only; `checkpoint` offers `match` to those who load.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from retrax.errors import CheckpointError
from retrax.storage.plain import is_float

__all__ = ["MatchReport", "Matched", "match"]

Rename = Mapping[str, str | None] | Callable[[str], str | None]

_N_SHOWN = 8


@dataclass
class MatchReport:
    """What `match` found, by path; `str(report)` is text for a person.

    Attributes:
      missing: wanted paths that are not in the file.
      extra: paths in the file (after renaming) that nobody wants.
      reshaped: (path, shape in the file, wanted shape).
      other_dtype: (path, dtype in the file, wanted dtype), not loaded.
      cast: (path, dtype in the file, wanted dtype), loaded and cast.
      n_matched: how many arrays are used.
      n_wanted: how many were wanted.
      suggestion: a `rename=` that would make more of them fit, or None.
    """

    missing: list[str] = field(default_factory=list)
    extra: list[str] = field(default_factory=list)
    reshaped: list[tuple[str, tuple[int, ...], tuple[int, ...]]] = field(
        default_factory=list
    )
    other_dtype: list[tuple[str, str, str]] = field(default_factory=list)
    cast: list[tuple[str, str, str]] = field(default_factory=list)
    n_matched: int = 0
    n_wanted: int = 0
    suggestion: dict[str, str] | None = None

    @property
    def exact(self) -> bool:
        """True when file and model agree in every path, shape and dtype."""
        return not (
            self.missing or self.extra or self.reshaped or self.other_dtype or self.cast
        )

    def __str__(self) -> str:
        lines = [f"{self.n_matched} of {self.n_wanted} arrays match"]
        lines += _section("missing from the checkpoint", self.missing)
        lines += _section("in the checkpoint only", self.extra)
        for title, rows in (
            ("reshaped", self.reshaped),
            ("of another dtype", self.other_dtype),
            ("cast", self.cast),
        ):
            texts = [f"{path}: got {got}, wanted {want}" for path, got, want in rows]
            lines += _section(title, texts)
        if self.suggestion:
            lines.append(f"  perhaps renamed? try rename={self.suggestion}")
        return "\n".join(lines)


class Matched(dict[str, Any]):
    """The arrays to use, by wanted path, with the `report` on how they were found."""

    def __init__(self, arrays: Mapping[str, Any], report: MatchReport) -> None:
        super().__init__(arrays)
        self.report = report


def match(
    wanted: Mapping[str, Any],
    found: Mapping[str, Any],
    strict: bool = True,
    rename: Rename | None = None,
) -> Matched:
    """Picks from `found` the array for each path in `wanted`.

    Args:
      wanted: path -> (shape, dtype), or anything with `.shape` and `.dtype`.
      found: path -> array, as loaded.
      strict: every wanted path must be there with its shape and dtype, and nothing
        else. False takes what fits: other shapes are left out, floats are cast to the
        wanted float dtype, other dtypes are left out.
      rename: old path, or leading part of it, -> new one; the longest that fits wins,
        '' fits all, None drops. Or a function from path to path or None.

    Returns:
      A dict of wanted path -> array with a `report`; in the order of `wanted`.

    Raises:
      CheckpointError: with `strict`, anything does not fit; the text lists it. Always,
        if an entry of `rename` fits no path or two paths get the same name.

    Example:
      >>> wanted = {"encoder/w": ((2,), "float32")}
      >>> saved = {"enc/w": np.zeros(2, np.float32)}
      >>> match(wanted, saved, rename={"enc": "encoder"})
      {'encoder/w': array([0., 0.], dtype=float32)}
    """
    if rename is not None:
        found = _renamed(found, rename)
    report = MatchReport(n_wanted=len(wanted))
    report.extra = [path for path in found if path not in wanted]
    arrays = {}
    for path, spec in wanted.items():
        if path not in found:
            report.missing.append(path)
            continue
        array = _fit(path, found[path], _shape_dtype(spec), strict, report)
        if array is not None:
            arrays[path] = array
    report.n_matched = len(arrays)
    report.suggestion = _suggest(wanted, found, report) or None
    if strict and not report.exact:
        raise CheckpointError(
            f"the checkpoint does not fit this model: {report}\n"
            "  strict=False loads what matches"
        )
    return Matched(arrays, report)


def _fit(
    path: str,
    array: Any,
    wanted: tuple[tuple[int, ...], np.dtype[Any]],
    strict: bool,
    report: MatchReport,
) -> Any:
    """Returns the array to use, or None; notes in `report` what differs."""
    shape, dtype = wanted
    got = np.shape(array), np.asarray(array).dtype
    if got[0] != shape:
        report.reshaped.append((path, got[0], shape))
        return None
    if got[1] == dtype:
        return array
    names = path, str(got[1]), str(dtype)
    if strict or not (is_float(got[1]) and is_float(dtype)):
        report.other_dtype.append(names)
        return None
    report.cast.append(names)
    return np.asarray(array).astype(dtype)


def _shape_dtype(spec: Any) -> tuple[tuple[int, ...], np.dtype[Any]]:
    shape, dtype = (spec.shape, spec.dtype) if hasattr(spec, "shape") else spec
    return tuple(int(n) for n in shape), np.dtype(dtype)


def _renamed(found: Mapping[str, Any], rename: Rename) -> dict[str, Any]:
    used: set[str] = set()
    origin: dict[str, str] = {}
    for path in found:
        if isinstance(rename, Mapping):
            old = max(
                (key for key in rename if _starts_with(path, key)),
                key=len,
                default=None,
            )
            if old is None:
                new: str | None = path
            else:
                used.add(old)
                target = rename[old]
                rest = path[len(old) :].strip("/")
                new = None if target is None else f"{target}/{rest}".strip("/")
        else:
            new = rename(path)
        if new is None:
            continue
        if new in origin:
            raise CheckpointError(
                f"rename gives {origin[new]!r} and {path!r} the same name {new!r}"
            )
        origin[new] = path
    unused = (
        [key for key in rename if key not in used]
        if isinstance(rename, Mapping)
        else []
    )
    if unused:
        near = difflib.get_close_matches(unused[0], list(found), n=3, cutoff=0.3)
        raise CheckpointError(
            f"rename names {unused[0]!r}, which no path in the checkpoint starts with; "
            f"near paths: {near or list(found)[:3]}"
        )
    return {new: found[path] for new, path in origin.items()}


def _starts_with(path: str, part: str) -> bool:
    return not part or path == part or path.startswith(part + "/")


def _suggest(
    wanted: Mapping[str, Any], found: Mapping[str, Any], report: MatchReport
) -> dict[str, str]:
    """Pairs missing with extra paths of the same shape that differ least."""
    rename: dict[str, str] = {}
    free: dict[tuple[int, ...], list[str]] = {}
    for path in report.extra[:500]:
        free.setdefault(np.shape(found[path]), []).append(path)
    for path in report.missing[:_N_SHOWN]:
        candidates = free.get(_shape_dtype(wanted[path])[0], [])
        near = difflib.get_close_matches(path, candidates, n=1, cutoff=0.5)
        if near:
            candidates.remove(near[0])
            old, new = _without_common_end(near[0], path)
            rename[old] = new
    return rename


def _without_common_end(old: str, new: str) -> tuple[str, str]:
    """Returns the shortest leading parts that differ: 'a/0/w', 'b/0/w' -> 'a', 'b'."""
    olds, news = old.split("/"), new.split("/")
    while len(olds) > 1 and len(news) > 1 and olds[-1] == news[-1]:
        olds.pop()
        news.pop()
    return "/".join(olds), "/".join(news)


def _section(title: str, texts: list[str]) -> list[str]:
    if not texts:
        return []
    shown = [f"    {text}" for text in texts[:_N_SHOWN]]
    if len(texts) > _N_SHOWN:
        shown.append(f"    and {len(texts) - _N_SHOWN} more")
    return [f"  {len(texts)} {title}:", *shown]
