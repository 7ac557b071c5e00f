"""The base of all layers: `Layer`, and `PureLayer`/`Fn` for those without weights.

A layer is a function from tensors to tensors with trainable weights and non-trainable
state, both pytrees that mirror the layer's tree of sublayers. `pure_fn` is that
function in pure form; everything that differentiates or compiles goes through it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from retrax import trees
from retrax.layers.holder import (
    EMPTY_STATE,
    EMPTY_WEIGHTS,
    GET_STATE_FROM_CACHE,
    GET_WEIGHTS_FROM_CACHE,
    Holder,
    State,
    Weights,
    fresh_key,
    is_marker,
)
from retrax.layers.running import Frame, Run, current_run, open_run, outside_of_runs
from retrax.shapes import signature

__all__ = [
    "EMPTY_STATE",
    "EMPTY_WEIGHTS",
    "GET_STATE_FROM_CACHE",
    "GET_WEIGHTS_FROM_CACHE",
    "Fn",
    "Layer",
    "PureLayer",
    "State",
    "Weights",
    "is_marker",
    "to_list",
]


class Layer(Holder):
    """Base class of layers.

    Subclasses write `forward(self, inputs)` and, if they have weights or state,
    `init_weights_and_state(self, input_signature)`; both read and set `self.weights`
    and `self.state`, and read `self.rng`. State that changes in training declares
    `state_sync`, see `Holder`.

    One instance used in two places of a model has one set of weights there.
    """

    _accepts_longer_stack = False
    _template: Any = None  # Of a Repeat: the layer that its blocks are like.

    # --- What subclasses write ------------------------------------------------------

    def forward(self, inputs: Any) -> Any:
        """Computes the outputs; to be written by subclasses.

        Args:
          inputs: one tensor if n_in is 1, else a tuple of n_in tensors.

        Returns:
          One tensor if n_out is 1, else a tuple of n_out tensors.
        """
        raise NotImplementedError(f"{type(self).__name__} does not define forward().")

    def init_weights_and_state(self, input_signature: Any) -> None:
        """Sets self.weights and self.state; layers without either need not write it."""

    def start_state(self, state: State) -> State:
        """Returns the layer's own state as it is before a sequence's first token.

        To be written by layers whose state belongs to one sequence (caches, positions).
        `state` may have further first axes (`Repeat`); sublayers are not its business.
        """
        return state

    def check_own_state(self, state: State) -> None:
        """Raises ValueError if concrete own state says that a sequence was too long."""

    def own_limit(self) -> int | None:
        """Returns how many positions of a sequence the layer can keep; None for any."""
        return None

    # --- What users call ------------------------------------------------------------

    def init(
        self, input_signature: Any, rng: Any = None, use_cache: bool = False
    ) -> tuple[Weights, State]:
        """Makes new weights and state for inputs of the given signature.

        Args:
          input_signature: a ShapeDtype if n_in is 1, else a tuple of them. Arrays are
            taken for their signatures.
          rng: a JAX random key; by default the layer's own key.
          use_cache: True where a combinator initialises its sublayers: a layer that
            was met before in the same model then returns the two cache markers.

        Returns:
          (weights, state).

        Raises:
          LayerError: with the path to the layer that failed; nothing is changed then.
        """
        input_signature = signature(input_signature)
        run = current_run()
        if run is not None and run.kind == "init":
            return self._init_in(run, input_signature, rng, use_cache)
        with open_run("init") as run:
            result = self._init_in(run, input_signature, rng, use_cache)
        if trees.is_concrete((result, [f.rng for f in run.frames.values()])):
            self._commit(run)
        return result

    def pure_fn(
        self, x: Any, weights: Weights, state: State, rng: Any, use_cache: bool = False
    ) -> tuple[Any, State]:
        """Computes outputs and new state from explicit weights, state and key.

        Nothing outside is read or changed, also when it raises.

        Args:
          x: inputs, as in `forward`.
          weights: weights in the structure `init` returned.
          state: state in that structure.
          rng: a random key, or None if no layer draws random numbers.
          use_cache: True where a combinator runs its sublayers.

        Returns:
          (outputs, new_state).
        """
        run = current_run()
        if run is not None and use_cache:
            return self._run_in(run, x, weights, state, rng)
        with open_run("forward") as run:
            y, new_state = self._run_in(run, x, weights, state, rng)
            run.check_no_lost_state()
            return y, _with_late_updates(run, self, new_state)

    def apply(
        self, x: Any, weights: Weights, state: State, rng: Any
    ) -> tuple[Any, State, list[tuple[str, Any]]]:
        """Does what `pure_fn` does and also returns what layers emitted.

        Returns:
          (outputs, new_state, [(name, value), ...]).
        """
        with open_run("forward") as run:
            y, new_state = self._run_in(run, x, weights, state, rng)
            run.check_no_lost_state()
            return y, _with_late_updates(run, self, new_state), run.emitted

    def __call__(
        self, x: Any, weights: Weights = None, state: State = None, rng: Any = None
    ) -> Any:
        """Computes outputs with the layer's own weights, and keeps the new state.

        Args:
          x: inputs, as in `forward`.
          weights: used instead of the layer's own for this call only.
          state: set as the layer's state first.
          rng: a key; by default the layer's own, the same one at each call.
        """
        run = current_run()
        frame = run.find(self) if run is not None else None
        if run is not None and frame is not None:
            rng = frame.rng if rng is None else rng
            y, new_state = self._run_in(
                run,
                x,
                frame.weights if weights is None else weights,
                frame.state if state is None else state,
                rng,
            )
            run.frames[id(self)].state = new_state
            run.rerun.add(id(self))
            return y
        if state is not None:
            self.state = state
        y, new_state = self.pure_fn(
            x,
            self.weights if weights is None else weights,
            self.state,
            self.rng if rng is None else rng,
        )
        if trees.is_concrete(new_state):
            self.state = new_state
        return y

    def reset_state(self) -> None:
        """Puts the state of sequences back to its beginning, in all sublayers too.

        In mode 'predict' that empties attention caches and sets positions and carries
        to their start. What was learned, like BatchNorm's averages, stays.
        """
        from retrax.layers import sequences  # It builds on this module.

        self.state = sequences.initial_state(self, self.state)

    def output_signature(self, input_signature: Any) -> Any:
        """Returns the signature of the outputs; the layer must be initialised.

        Raises:
          LayerError: the layer cannot take such inputs.
        """
        input_signature = signature(input_signature)
        run = current_run()
        if run is not None:
            known = run.output_signatures.get(id(self))
            if known is not None and known[0] == input_signature:
                return known[1]
        frame = run.find(self) if run is not None else None
        weights = self.weights if frame is None else frame.weights
        state = self.state if frame is None else frame.state
        outputs, _ = jax.eval_shape(
            lambda x, w, s, k: self.pure_fn(x, w, s, k),
            _to_jax(input_signature),
            weights,
            state,
            self.rng,
        )
        outputs = signature(outputs)
        if run is not None and run.kind == "init":
            run.output_signatures[id(self)] = (input_signature, outputs)
        return outputs

    def weights_and_state_signature(self, input_signature: Any) -> tuple[Any, Any]:
        """Returns the signatures `init` would give, without making any array."""
        sigs = jax.eval_shape(
            lambda k: self.init(input_signature, rng=k), jax.random.key(0)
        )
        return signature(sigs[0]), signature(sigs[1])

    def summary(self, input_signature: Any) -> str:
        """Returns a table of all layers: path, output shape, weights, bytes."""
        from retrax.layers import summary  # The table builds on this module.

        return summary.table(self, input_signature)

    def save_to_file(
        self, file_name: str, weights_only: bool = False, input_signature: Any = None
    ) -> None:
        """Saves weights (and state) by path; see `init_from_file`."""
        from retrax.layers import files  # The file functions build on this module.

        files.save_to_file(self, file_name, weights_only, input_signature)

    def init_from_file(
        self,
        file_name: str,
        weights_only: bool = False,
        input_signature: Any = None,
        strict: bool = True,
        rename: Any = None,
    ) -> tuple[Weights, State]:
        """Initialises the layer from a file of `save_to_file` or of a trainer.

        Args:
          file_name: the file.
          weights_only: keep the state `init` gives instead of the saved one.
          input_signature: needed unless the file holds one or the layer is
            initialised already.
          strict: False takes what matches and keeps initial values for the rest.
          rename: dict of path prefixes, or function, from the file's paths to ours.

        Raises:
          CheckpointError: the file is damaged or belongs to another model; missing,
            extra and reshaped weights are listed by path.
        """
        from retrax.layers import files

        return files.init_from_file(
            self, file_name, weights_only, input_signature, strict, rename
        )

    @property
    def has_weights(self) -> bool:
        """Whether the layer or one under it defines how to make weights or state."""
        own = type(self).init_weights_and_state is not Layer.init_weights_and_state
        if self.sublayers:
            return any(s.has_weights for s in self.sublayers)
        return own

    # --- Running --------------------------------------------------------------------

    def _init_in(
        self, run: Run, input_signature: Any, rng: Any, use_cache: bool
    ) -> tuple[Weights, State]:
        if use_cache and id(self) in run.frames:
            return GET_WEIGHTS_FROM_CACHE, GET_STATE_FROM_CACHE
        if rng is None:
            rng = _rng_from_parent(run, self)
        if rng is None:
            rng = fresh_key() if self._rng is None else self._rng
        frame = Frame(self, EMPTY_WEIGHTS, EMPTY_STATE, rng)
        frame.init_signature = input_signature
        run.frames[id(self)] = frame
        with run.guard(self, "init", input_signature):
            self.init_weights_and_state(input_signature)
        return frame.weights, frame.state

    def _run_in(
        self, run: Run, x: Any, weights: Weights, state: State, rng: Any
    ) -> tuple[Any, State]:
        with run.guard(self, "pure_fn", x):
            cached = is_marker(weights)
            if cached:
                frame = run.find(self)
                if frame is None:
                    with outside_of_runs():
                        frame = Frame(self, self.weights, self.state, rng)
                frame = Frame(self, frame.weights, frame.state, rng)
                run.rerun.add(id(self))
            else:
                frame = Frame(self, weights, state, rng)
            run.frames[id(self)] = frame
            x = run.as_loss_input(self, x)
            self._check_inputs(x)
            self._check_weights(frame.weights)
            before = frame.state
            y = self.forward(x)
            if frame.state is before and run.rerun:
                frame.state = _children_updates(run, self, before)
            self._check_outputs(y)
            if not self.sublayers:
                y = run.rounded_outputs(y)
            if run.trace.observer is not None:
                run.trace.observer(run.trace.stack, y)
        return y, GET_STATE_FROM_CACHE if cached else frame.state

    def _check_inputs(self, x: Any) -> None:
        if self._n_in == 1 or (self._n_in == 0 and not isinstance(x, (tuple, list))):
            return
        if not isinstance(x, (tuple, list)):
            raise TypeError(
                f"{self.name} takes {self._n_in} inputs in a tuple or list, got "
                f"one {type(x).__name__}."
            )
        n = len(x)
        if n < self._n_in or (n > self._n_in and not self._accepts_longer_stack):
            raise ValueError(
                f"{self.name} takes {self._n_in} inputs, got {n}: a batch or the "
                f"layers before it leave {n} items on the data stack."
            )

    def _check_outputs(self, y: Any) -> None:
        if self._n_out == 1 or self._accepts_longer_stack:
            return
        if not isinstance(y, (tuple, list)) or len(y) != self._n_out:
            got = f"{len(y)} in a {type(y).__name__}" if hasattr(y, "__len__") else y
            raise ValueError(
                f"{self.name} declares n_out={self._n_out} but forward() returned "
                f"{got}."
            )

    def _check_weights(self, weights: Weights) -> None:
        n = len(self.sublayers)
        if not n or (isinstance(weights, (tuple, list)) and len(weights) == n):
            return
        n_got = len(weights) if isinstance(weights, (tuple, list)) else 1
        raise ValueError(
            f"Number of weight elements ({n_got}) does not equal the number of "
            f"sublayers ({n}) in: {self.name}."
            + (" Call init(signature) first." if n_got == 0 else "")
        )

    def _commit(self, run: Run) -> None:
        """Writes the frames of a finished init into the layers."""
        owners = {id(f.layer._owner): f.layer._owner for f in run.frames.values()}
        for owner in owners.values():
            if owner is not None:
                owner.pull(about_to_change=True)
        for frame in run.frames.values():
            layer = frame.layer
            layer._rng = frame.rng
            if not layer.sublayers:
                layer._weights, layer._state = frame.weights, frame.state
            elif layer.has_own_state:
                layer._state = frame.state[-1]
            layer._init_signature = frame.init_signature


class PureLayer(Layer):
    """Layer without weights and state, made from a function.

    Example:
      >>> PureLayer(lambda x: x * x, name='Square')
      Square
    """

    def __init__(
        self,
        forward_fn: Callable[[Any], Any],
        n_in: int = 1,
        n_out: int = 1,
        name: str = "PureLayer",
    ) -> None:
        """Makes a layer of `forward_fn`, which takes all inputs as one argument."""
        super().__init__(n_in, n_out, name)
        self._forward_fn = forward_fn

    def forward(self, inputs: Any) -> Any:
        """Applies the function."""
        return self._forward_fn(inputs)


def Fn(name: str, f: Callable[..., Any], n_out: int = 1) -> PureLayer:
    """Returns a layer that applies `f`, one argument for each input.

    Args:
      name: the layer's name.
      f: function of a fixed number of positional arguments, without defaults.
      n_out: number of outputs; `f` returns a tuple of that many if it is not 1.

    Raises:
      ValueError: `f` has defaults, *args or keyword arguments.

    Example:
      >>> Fn('SumAndMax', lambda x0, x1: (x0 + x1, max(x0, x1)), n_out=2)
      SumAndMax_in2_out2
    """
    parameters = inspect.signature(f).parameters.values()
    for p in parameters:
        positional = p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
        if not positional or p.default is not p.empty:
            raise ValueError(
                f"Fn({name!r}) needs a function of a fixed number of positional "
                f"arguments; this one has '{p}'. Wrap it: lambda x: f(x, ...)."
            )
    n_in = len(parameters)
    if n_in == 1:
        return PureLayer(f, n_in=n_in, n_out=n_out, name=name)
    return PureLayer(lambda xs: f(*xs), n_in=n_in, n_out=n_out, name=name)


def to_list(outputs: Any) -> list[Any]:
    """Returns layer outputs as a list, whether one or several."""
    return list(outputs) if isinstance(outputs, (tuple, list)) else [outputs]


# --- Helpers ------------------------------------------------------------------------


def _to_jax(sig: Any) -> Any:
    if isinstance(sig, (tuple, list)):
        return tuple(_to_jax(s) for s in sig)
    dtype = sig.dtype
    if isinstance(dtype, np.dtype):  # Else a typed random key.
        dtype = jax.dtypes.canonicalize_dtype(dtype)
    return jax.ShapeDtypeStruct(sig.shape, dtype)


def _rng_from_parent(run: Run, layer: Layer) -> Any:
    """The key a combinator's key tree gives to a sublayer it initialises."""
    if not run.trace.stack:
        return None
    parent = run.trace.stack[-1][0]
    frame = run.frames.get(id(parent))
    if frame is None:
        return None
    for child, rng in zip(parent.sublayers, frame.child_rngs(), strict=True):
        if child is layer:
            return rng
    return None


def _children_updates(run: Run, layer: Layer, state: State) -> State:
    """State of a layer whose sublayers were called directly, as `self.dense(x)`."""
    if not any(id(s) in run.rerun for s in layer.sublayers):
        return state
    own = list(state[len(layer.sublayers) :])
    updated = [
        run.frames[id(child)].state
        if id(child) in run.rerun and not is_marker(old)
        else old
        for child, old in zip(layer.sublayers, state, strict=False)
    ]
    return (*updated, *own)


def _with_late_updates(run: Run, layer: Layer, state: State) -> State:
    """Puts the last state of layers that ran again at their first place."""
    if not run.rerun or is_marker(state):
        return state
    if id(layer) in run.rerun and id(layer) in run.frames:
        return run.frames[id(layer)].state
    n = len(layer.sublayers)
    if not n or not isinstance(state, (tuple, list)) or len(state) < n:
        return state
    fixed = [
        _with_late_updates(run, child, s)
        for child, s in zip(layer.sublayers, state, strict=False)
    ]
    return (*fixed, *state[n:])
