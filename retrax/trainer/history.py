"""What a run measured: for each mode and metric, values by step.

Plain Python inside, so that it goes into a checkpoint as it is.
"""

from __future__ import annotations

import math
import operator
from typing import Any

from absl import logging

__all__ = ["History"]


class History:
    """Holds (step, value) pairs by mode ('train', 'eval') and metric.

    Example:
      >>> history = History()
      >>> history.append("eval", "metrics/loss", 10, 0.5)
      >>> history.append("eval", "metrics/loss", 20, 0.25)
      >>> history.get("eval", "metrics/loss")
      [(10, 0.5), (20, 0.25)]
      >>> history.best("eval", "metrics/loss", "low")
      (20, 0.25)
    """

    def __init__(self) -> None:
        self._values: dict[str, dict[str, list[tuple[int, float]]]] = {}

    def append(self, mode: str, metric: str, step: int, value: Any) -> None:
        """Adds one value; any scalar that `float` takes, NaN included.

        Raises:
          TypeError: `step` is no integer, or `value` no number.
        """
        pair = (operator.index(step), float(value))
        self._values.setdefault(mode, {}).setdefault(metric, []).append(pair)

    def get(self, mode: str, metric: str) -> list[tuple[int, float]]:
        """Returns [(step, value), ...] in the order added; [] if there is none."""
        values = self._values.get(mode, {}).get(metric)
        if values is None:
            logging.info("History has no metric %r in mode %r", metric, mode)
        return list(values or ())

    @property
    def modes(self) -> list[str]:
        """The modes that have values, sorted."""
        return sorted(self._values)

    def metrics_for_mode(self, mode: str) -> list[str]:
        """Returns the metrics that have values in `mode`, sorted."""
        return sorted(self._values.get(mode, ()))

    def last(self, mode: str, metric: str) -> tuple[int, float] | None:
        """Returns the newest (step, value), or None."""
        values = self.get(mode, metric)
        return values[-1] if values else None

    def best(
        self, mode: str, metric: str, which: str = "low"
    ) -> tuple[int, float] | None:
        """Returns the (step, value) with the lowest or highest value, or None.

        NaN is never the best; of equal values the first is.

        Raises:
          ValueError: `which` is neither 'low' nor 'high'.
        """
        if which not in ("low", "high"):
            raise ValueError(f"which is {which!r}; use 'low' or 'high'")
        values = [pair for pair in self.get(mode, metric) if not math.isnan(pair[1])]
        pick = min if which == "low" else max
        return pick(values, key=lambda pair: pair[1]) if values else None

    def truncate_after(self, step: int) -> None:
        """Drops the values of steps above `step`, as a run resumed there needs."""
        kept: dict[str, dict[str, list[tuple[int, float]]]] = {}
        for mode, metrics in self._values.items():
            for metric, values in metrics.items():
                left = [pair for pair in values if pair[0] <= step]
                if left:
                    kept.setdefault(mode, {})[metric] = left
        self._values = kept

    def to_dict(self) -> dict[str, dict[str, list[tuple[int, float]]]]:
        """Returns a copy as {mode: {metric: [(step, value), ...]}}."""
        return {
            mode: {metric: list(values) for metric, values in metrics.items()}
            for mode, metrics in self._values.items()
        }

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> History:
        """Makes a History from what `to_dict` gave; nothing is shared.

        Trax wraps the same in {'_values': ...}, which is taken too.

        Raises:
          ValueError: `values` does not have that form.
        """
        history = cls()
        if set(values) == {"_values"}:
            values = values["_values"]
        try:
            for mode, metrics in values.items():
                for metric, pairs in metrics.items():
                    for step, value in pairs:
                        history.append(mode, metric, step, value)
        except (AttributeError, TypeError, ValueError) as error:
            raise ValueError(
                "a history is {mode: {metric: [(step, value), ...]}}, "
                f"got {str(values)[:80]}: {error}"
            ) from error
        return history

    def __eq__(self, other: object) -> bool:
        """True if all values are the same; NaN equals NaN, as resumed runs need."""
        if not isinstance(other, History):
            return NotImplemented
        return _comparable(self) == _comparable(other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        parts = [
            f"{mode}/{metric}: {len(self._values[mode][metric])}"
            for mode in self.modes
            for metric in self.metrics_for_mode(mode)
        ]
        return f"History({', '.join(parts)})"


def _comparable(history: History) -> dict[str, Any]:
    return {
        mode: {
            metric: [(s, "NaN" if math.isnan(v) else v) for s, v in values]
            for metric, values in metrics.items()
        }
        for mode, metrics in history.to_dict().items()
    }
