"""`Callback`: what a run calls at its milestones, and the list that calls them.

`Session` holds one CallbackList, so Trainer and Loop call alike. Ready-made callbacks
are in `retrax.supervised.callbacks`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from retrax.errors import ConfigError

__all__ = ["Callback", "CallbackList", "StepValues"]


class StepValues(Mapping[str, float]):
    """The values of one training step by name, 'loss' among them.

    A value is read from the device when it is asked for, and not before; asking for
    those of the step that is running waits for it.

    Attributes:
      step: number of the step.
    """

    def __init__(self, step: int, stats: Mapping[str, Any]) -> None:
        self.step = step
        self._stats = stats

    def __getitem__(self, name: str) -> float:
        return float(self._stats[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self._stats)

    def __len__(self) -> int:
        return len(self._stats)

    def __repr__(self) -> str:
        return f"StepValues(step={self.step}, {', '.join(self)})"


class Callback:
    """Watches a run and acts on it; subclasses override what they need.

    A callback belongs to one run. What it must remember over a restart it returns from
    `state` as plain containers, numbers, texts and arrays; it is saved with every
    checkpoint and given back to `restore`.

    Attributes:
      run: the run as a `retrax.trainer.Session`: `step`, `history`, `values` (of the
        last step), `batch`, `learning_rate`, `model`, `step_trainer`, `stop(reason)`,
        `say(text)`, `record(metrics)` and more.

    Example:
      >>> class Loud(Callback):
      ...     def on_step_end(self, step):
      ...         if step % 100 == 0:
      ...             self.run.say(f"the loss is {self.run.values['loss']:.3f}")
    """

    run: Any = None

    @property
    def name(self) -> str:
        """Name in checkpoints and messages: that of the class."""
        return type(self).__name__

    def attach(self, run: Any) -> None:
        """Called once, before anything else of the run is called.

        Raises:
          ConfigError: this callback cannot work with the run; says why.
        """
        self.run = run

    def added_metrics(self, names: Sequence[str]) -> list[str]:
        """Returns names of evaluation metrics this callback adds to those there are."""
        del names
        return []

    def on_run_begin(self) -> None:
        """Called when `run` begins."""

    def on_run_end(self) -> None:
        """Called when `run` ends, after an error or an interrupt as well."""

    def on_step_begin(self, step: int) -> None:
        """Called before training step `step`, counted from 1."""

    def on_step_end(self, step: int) -> None:
        """Called after training step `step`, before it is evaluated or saved."""

    def on_eval_end(self, step: int) -> None:
        """Called after an evaluation; `self.run.history` holds its metrics."""

    def on_checkpoint(self, step: int, name: str) -> None:
        """Called after a checkpoint is handed to its writer; its file is {name}.pkl."""

    def learning_rate(self, step: int, rate: float) -> float:
        """Returns the learning rate of a step, given the schedule's."""
        del step
        return rate

    def state(self) -> dict[str, Any]:
        """Returns what has to be saved."""
        return {}

    def restore(self, state: dict[str, Any]) -> None:
        """Takes back what `state` returned."""

    def before_restore(self, step: int) -> None:
        """Called before weights and slots of a step are put back; 0 is the start."""


class CallbackList:
    """Calls the callbacks of one run, those alone that override what is called."""

    def __init__(self, given: Any, run: Any) -> None:
        """Makes a list of what a user gave.

        Args:
          given: callbacks, or Trax's form: functions (classes) that make one of the
            trainer or loop, with `call_at`, `on_step_begin` and `on_step_end`.
          run: the session they watch.

        Raises:
          TypeError: one of them is no callback.
          ConfigError: one of them cannot work with this run, or watches another one.
        """
        if not isinstance(given, (list, tuple, type(None))):
            given = [given]
        self._callbacks = [_made(item, run) for item in given or ()]
        for callback in self._callbacks:
            if callback.run is not None and callback.run is not run:
                raise ConfigError(
                    f"{type(callback).__name__} watches another run already: make a "
                    "callback for each run."
                )
            callback.attach(run)
        self._names = _unique([c.name for c in self._callbacks])
        self._initial = [copy.deepcopy(c.state()) for c in self._callbacks]
        self.run_begin = self._calls("on_run_begin")
        self.run_end = self._calls("on_run_end")
        self.step_begin = self._calls("on_step_begin")
        self.step_end = self._calls("on_step_end")
        self.eval_end = self._calls("on_eval_end")
        self.checkpoint = self._calls("on_checkpoint")
        self._rates = self._overriding("learning_rate")

    def __iter__(self) -> Iterator[Callback]:
        return iter(self._callbacks)

    @property
    def changes_rate(self) -> bool:
        """Whether a callback changes learning rates."""
        return bool(self._rates)

    def rate(self, step: int, rate: float) -> float:
        """Returns the learning rate after all callbacks have seen it."""
        for change in self._rates:
            rate = change(step, rate)
        return rate

    def metric_names(self, names: Sequence[str]) -> list[str]:
        """Returns `names` and those of the metrics that callbacks add."""
        found = list(names)
        for callback in self._callbacks:
            found += callback.added_metrics(list(names))
        return found

    def state(self) -> dict[str, Any]:
        """Returns name -> state of the callbacks that have any."""
        states = {
            n: c.state() for n, c in zip(self._names, self._callbacks, strict=True)
        }
        return {name: state for name, state in states.items() if state}

    def before_restore(self, step: int) -> None:
        """Puts all callbacks back to their start, and says what will be restored."""
        for callback, state in zip(self._callbacks, self._initial, strict=True):
            callback.restore(copy.deepcopy(state))
            callback.before_restore(step)

    def restore(self, states: Mapping[str, Any]) -> list[str]:
        """Restores the callbacks; returns the names of states that belong to none."""
        for name, callback in zip(self._names, self._callbacks, strict=True):
            if name in states:
                callback.restore(states[name])
        return sorted(set(states) - set(self._names))

    def _overriding(self, what: str) -> list[Callable[..., Any]]:
        base = getattr(Callback, what)
        return [
            getattr(c, what) for c in self._callbacks if getattr(type(c), what) != base
        ]

    def _calls(self, what: str) -> Callable[..., None]:
        methods = self._overriding(what)

        def call(*args: Any) -> None:
            for method in methods:
                method(*args)

        return call


class _StepCallback(Callback):
    """Trax's form of a callback, called at the steps it chooses."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    @property
    def name(self) -> str:
        return type(self._inner).__name__

    def on_step_begin(self, step: int) -> None:
        if self._inner.call_at(step):
            self._inner.on_step_begin(step)

    def on_step_end(self, step: int) -> None:
        if self._inner.call_at(step):
            self._inner.on_step_end(step)

    def state(self) -> dict[str, Any]:
        inner: Any = self._inner
        return inner.state() if hasattr(inner, "state") else {}

    def restore(self, state: dict[str, Any]) -> None:
        inner: Any = self._inner
        if hasattr(inner, "restore"):
            inner.restore(state)


_STEP_METHODS = ("call_at", "on_step_begin", "on_step_end")


def _made(item: Any, run: Any) -> Any:
    if isinstance(item, Callback):
        return item
    if isinstance(item, type) and issubclass(item, Callback):
        raise TypeError(
            f"callbacks holds the class {item.__name__}: make an instance of it, "
            f"{item.__name__}(...)."
        )
    made = item
    if callable(item) and not _is_step_callback(item):
        made = item(run.owner)
    elif isinstance(item, type):
        made = item(run.owner)
    if isinstance(made, Callback):
        return made
    if not _is_step_callback(made):
        raise TypeError(
            "callbacks must be Callback objects, or functions (classes) that make one "
            f"of the loop, with {', '.join(_STEP_METHODS)}; got {item!r}."
        )
    return _StepCallback(made)


def _is_step_callback(x: Any) -> bool:
    return all(callable(getattr(x, name, None)) for name in _STEP_METHODS)


def _unique(names: Sequence[str]) -> list[str]:
    found: list[str] = []
    for name in names:
        n = sum(other.partition(":")[0] == name for other in found)
        found.append(f"{name}:{n}" if n else name)
    return found
