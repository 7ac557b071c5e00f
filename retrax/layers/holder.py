"""What a layer holds: its place in a tree, its weights, state and key.

Under `base`, which adds how a layer runs. While a layer runs, its values are those of
the run's frame (`running`); otherwise they are stored here, by leaf layers only:
a layer with sublayers makes its trees of theirs.
"""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Sequence
from typing import Any

import jax

from retrax.layers.running import Frame, current_run

__all__ = [
    "EMPTY_STATE",
    "EMPTY_WEIGHTS",
    "GET_STATE_FROM_CACHE",
    "GET_WEIGHTS_FROM_CACHE",
    "Holder",
    "State",
    "Weights",
    "fresh_key",
    "is_marker",
]

Weights = Any  # pytree of arrays
State = Any  # pytree of arrays

EMPTY_WEIGHTS: tuple[()] = ()
EMPTY_STATE: tuple[()] = ()
# Stand at the second and later places of a shared layer in the weights and state trees.
GET_WEIGHTS_FROM_CACHE: dict[str, Any] = {"__marker_for_cached_weights_": ()}
GET_STATE_FROM_CACHE: dict[str, Any] = {"__marker_for_cached_state_": ()}

_LAYERS_DIR = os.path.dirname(os.path.abspath(__file__))


class Holder:
    """A node in a tree of layers, with the values it holds.

    Class attributes:
      state_sync: how replicas agree on state that changes in training: 'mean', 'sum'
        (of the changes) or 'same' (equal by construction). None means undeclared.
      has_own_state: a layer with sublayers that keeps state of its own beside theirs;
        its state is then (sublayer states..., own state).
    """

    state_sync: str | None = None
    has_own_state = False

    def __init__(
        self,
        n_in: int = 1,
        n_out: int = 1,
        name: str | None = None,
        sublayers_to_print: Sequence[Any] | None = None,
    ) -> None:
        """Makes a layer.

        Args:
          n_in: number of inputs taken from the data stack.
          n_out: number of outputs put back.
          name: name in prints, paths and errors; the class name if None.
          sublayers_to_print: what `repr` shows instead of all sublayers.
        """
        self._n_in = n_in
        self._n_out = n_out
        self._name = name or type(self).__name__
        self._sublayers: Sequence[Any] = ()
        self._sublayers_to_print = sublayers_to_print
        self._weights: Weights = EMPTY_WEIGHTS
        self._state: State = EMPTY_STATE
        self._rng: Any = None
        self._trainable = True
        self._init_signature: Any = None
        self._owner: Any = None
        self._created_at = _caller(self)

    @property
    def name(self) -> str:
        """The layer's name."""
        return self._name

    @property
    def n_in(self) -> int:
        """Number of inputs taken from the data stack."""
        return self._n_in

    @property
    def n_out(self) -> int:
        """Number of outputs put on the data stack."""
        return self._n_out

    @property
    def sublayers(self) -> Sequence[Any]:
        """The layers this one is made of."""
        return self._sublayers

    @property
    def created_at(self) -> str:
        """'file.py:line' of the code that made the layer."""
        return self._created_at

    @property
    def trainable(self) -> bool:
        """False keeps the weights of this layer and all under it as they are.

        Trainers read it when they are made: such weights get no gradient, no decay and
        no optimizer slot.
        """
        return self._trainable

    @trainable.setter
    def trainable(self, value: bool) -> None:
        self._trainable = bool(value)

    @property
    def weights(self) -> Weights:
        """The weights: a pytree; for a layer with sublayers one entry for each.

        While a trainer trains the model, reading gives a copy of the current values.
        """
        frame = self._frame()
        if frame is not None:
            return frame.weights
        if self._owner is not None:
            self._owner.pull()
        return self._stored("weights", set())

    @weights.setter
    def weights(self, value: Weights) -> None:
        frame = self._frame()
        if frame is not None:
            frame.weights = value
            return
        if self._owner is not None:
            self._owner.pull(about_to_change=True)
        self._store("weights", value)

    @property
    def state(self) -> State:
        """The non-trainable state, structured like the weights."""
        frame = self._frame()
        if frame is not None:
            return frame.state
        if self._owner is not None:
            self._owner.pull()
        return self._stored("state", set())

    @state.setter
    def state(self, value: State) -> None:
        frame = self._frame()
        if frame is not None:
            frame.state = value
            return
        if self._owner is not None:
            self._owner.pull(about_to_change=True)
        self._store("state", value)

    @property
    def rng(self) -> Any:
        """The random key: of this call while the layer runs, else the layer's own.

        A layer that was never given one draws it from Python's `random`, so that
        `random.seed` makes it repeatable.
        """
        frame = self._frame()
        if frame is not None:
            return frame.rng
        if self._rng is None:
            with jax.ensure_compile_time_eval():  # A value, even under a trace.
                self.rng = fresh_key()
        return self._rng

    @rng.setter
    def rng(self, rng: Any) -> None:
        frame = self._frame()
        if frame is not None:
            frame.rng = rng
            return
        self._rng = rng
        for child, key in zip(
            self.sublayers,
            jax.random.split(rng, len(self.sublayers) or 1),
            strict=False,
        ):
            child.rng = key

    def _settable_attrs(self) -> tuple[str, ...]:
        return ("weights", "state", "rng", "trainable", "state_sync")

    def __setattr__(self, name: str, value: Any) -> None:
        if not name.startswith("_") and name not in self._settable_attrs():
            raise ValueError(
                f"A layer's public attributes are fixed: {self._settable_attrs()} can "
                f"be set, {name!r} cannot. Name it '_{name}' if it is internal."
            )
        super().__setattr__(name, value)

    def __getstate__(self) -> dict[str, Any]:
        # A copy or a pickle holds the values, not the trainer that made them.
        if self._owner is not None:
            self._owner.pull()
        return {**self.__dict__, "_owner": None}

    def __repr__(self) -> str:
        text = self._name
        if self.n_in != 1:
            text += f"_in{self.n_in}"
        if self.n_out != 1:
            text += f"_out{self.n_out}"
        shown = self._sublayers_to_print
        shown = self.sublayers if shown is None else shown
        lines = [line for s in shown if (t := str(s)) for line in t.split("\n")]
        if lines:
            text += "[\n" + "".join(f"  {line}\n" for line in lines) + "]"
        return text

    # --- Storing --------------------------------------------------------------------

    def _frame(self) -> Frame | None:
        run = current_run()
        return None if run is None else run.find(self)

    def _stored(self, what: str, seen: set[int]) -> Any:
        if id(self) in seen:
            return GET_WEIGHTS_FROM_CACHE if what == "weights" else GET_STATE_FROM_CACHE
        seen.add(id(self))
        own = self._weights if what == "weights" else self._state
        if not self.sublayers:
            return own
        tree = tuple(s._stored(what, seen) for s in self.sublayers)
        return (*tree, own) if what == "state" and self.has_own_state else tree

    def _store(self, what: str, value: Any) -> None:
        if is_marker(value):
            return
        if not self.sublayers:
            object.__setattr__(self, "_" + what, value)
            return
        n = len(self.sublayers)
        n_expected = n + (what == "state" and self.has_own_state)
        if not isinstance(value, (tuple, list)) or len(value) != n_expected:
            n_got = len(value) if isinstance(value, (tuple, list)) else 1
            noun = "weight" if what == "weights" else "state"
            raise ValueError(
                f"Number of {noun} elements ({n_got}) does not equal the number of "
                f"sublayers ({n_expected}) in: {self.name}."
            )
        for child, item in zip(self.sublayers, value, strict=False):
            child._store(what, item)
        if n_expected > n:
            self._state = value[-1]


def is_marker(tree: Any) -> bool:
    """Says whether a tree is the marker at a later place of a shared layer."""
    return isinstance(tree, dict) and (
        tree.keys() == GET_WEIGHTS_FROM_CACHE.keys()
        or tree.keys() == GET_STATE_FROM_CACHE.keys()
    )


def fresh_key() -> Any:
    """Returns a key drawn from Python's `random`, concrete also while tracing."""
    with jax.ensure_compile_time_eval():
        return jax.random.key(random.randint(0, 2**31 - 1))


def _caller(layer: Holder) -> str:
    """Finds the line that made the layer: outside of this package and of gin."""
    frame = sys._getframe(2)
    while frame.f_back is not None:
        code = frame.f_code
        folder = os.path.dirname(code.co_filename)
        own_init = code.co_name == "__init__" and frame.f_locals.get("self") is layer
        if folder != _LAYERS_DIR and os.path.basename(folder) != "gin" and not own_init:
            break
        frame = frame.f_back
    parts = frame.f_code.co_filename.split(os.sep)
    return f"{os.sep.join(parts[-3:])}:{frame.f_lineno}"
