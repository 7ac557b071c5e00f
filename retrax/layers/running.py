"""What is true while layers run: who holds which weights, under which key.

Layers are ordinary objects, yet `init` and `pure_fn` must leave no trace in them when
they raise, and no traced value ever. So while a layer runs, its weights, state and key
live in a `Frame` of the current `Run`, not in the layer; the frames vanish with the
run. Only a successful `init` writes frames back. `base.py` is the only caller.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

import jax
import jax.numpy as jnp

from retrax.errors import LayerError
from retrax.layers.failure import facts_of

__all__ = [
    "MEMORY_MODES",
    "PER_EXAMPLE_PREFIX",
    "SUMMARY_PREFIX",
    "Frame",
    "Run",
    "batch_context",
    "current_run",
    "data_axis",
    "emit",
    "emit_named",
    "emit_of_steps",
    "memory_context",
    "memory_mode",
    "named_values",
    "open_run",
    "precision_context",
    "rounded",
    "row_mask",
]


# What the names of summaries of the forward pass begin with, and those of outputs that
# have one entry for each row of the batch.
SUMMARY_PREFIX, PER_EXAMPLE_PREFIX = "forward/", "per_example/"

# How layers that can be reversed or computed again are differentiated.
MEMORY_MODES = ("reversible", "remat", "plain")


class Frame:
    """Weights, state and key of one layer during one run."""

    __slots__ = ("_child_rngs", "init_signature", "layer", "rng", "state", "weights")

    def __init__(self, layer: Any, weights: Any, state: Any, rng: Any) -> None:
        self.layer = layer
        self.weights = weights
        self.state = state
        self.rng = rng
        self.init_signature: Any = None
        self._child_rngs: tuple[Any, ...] | None = None

    def child_rngs(self) -> tuple[Any, ...]:
        """Splits the key once over all sublayers; Nones when there is no key."""
        n = len(self.layer.sublayers)
        if self.rng is None:
            return (None,) * n
        if self._child_rngs is None:
            self._child_rngs = split_rng(self.rng, n)
        return self._child_rngs


class _Trace:
    """What nested runs share: the stack of running layers and the first failure."""

    def __init__(self, observer: Any = None) -> None:
        self.stack: list[tuple[Any, int | str | None]] = []
        self.seen: list[dict[tuple[int, str], int]] = [{}]
        self.failure: tuple[BaseException, dict[str, Any]] | None = None
        self.observer = observer


class Run:
    """One call of `init` or `pure_fn` from outside, or one nested trace inside it."""

    def __init__(self, kind: str, parent: Run | None, context: dict[str, Any]) -> None:
        self.kind = kind
        self.parent = parent
        self.frames: dict[int, Frame] = {}
        self.output_signatures: dict[int, tuple[Any, Any]] = {}
        self.rerun: set[int] = set()
        # State of layers found around this run, as it was when they were found.
        self.outside: dict[int, Any] = {}
        self.emitted: list[tuple[str, Any]] = []
        observer = context.pop("observer", None)
        if parent is None:
            self.context = context
            self.trace = _Trace(observer)
        else:
            self.context = {**parent.context, **context}
            self.trace = parent.trace

    def find(self, layer: Any) -> Frame | None:
        """Returns the frame of `layer` in this run or else the runs around it."""
        run: Run | None = self
        while run is not None:
            frame = run.frames.get(id(layer)) or run._from_ancestors(layer)
            if frame is not None:
                if run is not self:
                    self.outside.setdefault(id(layer), frame.state)
                return frame
            run = run.parent
        return None

    def _from_ancestors(self, layer: Any) -> Frame | None:
        """Makes a frame for a layer that only its ancestors' trees have met so far."""
        for ancestor, _ in reversed(self.trace.stack):
            held = self.frames.get(id(ancestor))
            if held is None or not ancestor.sublayers:
                continue
            found = _descend(ancestor, layer, held.weights, held.state, held.rng)
            if found is not None:
                frame = Frame(layer, *found)
                self.frames[id(layer)] = frame
                return frame
        return None

    def check_no_lost_state(self) -> None:
        """Refuses state changes of a shared layer that would end with this run."""
        if self.parent is None:
            return
        for key in self.rerun & self.outside.keys():
            frame = self.frames[key]
            old, new = jax.tree.leaves(self.outside[key]), jax.tree.leaves(frame.state)
            if [id(x) for x in old] != [id(x) for x in new]:
                raise ValueError(
                    f"the shared layer {frame.layer.name} changes its state inside a "
                    "traced body (Scan, Cond, Chunk, Repeat) but is first used outside "
                    "of it; use it only inside, or only outside."
                )

    def as_loss_input(self, layer: Any, x: Any) -> Any:
        """Returns inputs of a layer, in the dtype of losses if it is the loss."""
        loss, convert = self.context.get("loss") or (None, None)
        return convert(x) if loss is layer and convert is not None else x

    def rounded_outputs(self, y: Any) -> Any:
        """Returns outputs of a layer, rounded if the run asks for it."""
        if self.context.get("rounding") is None:
            return y
        return jax.tree.map(rounded, y)

    def _direct(self, layer: Any) -> Frame | None:
        run: Run | None = self
        while run is not None:
            if id(layer) in run.frames:
                return run.frames[id(layer)]
            run = run.parent
        return None

    @contextlib.contextmanager
    def guard(self, layer: Any, function_name: str, inputs: Any) -> Iterator[None]:
        """Turns an exception into one LayerError, raised at the outermost layer."""
        trace = self.trace
        trace.stack.append((layer, self._place(layer, function_name)))
        trace.seen.append({})
        try:
            yield
        except LayerError:
            raise
        except Exception as e:
            if trace.failure is None or trace.failure[0] is not e:
                frame = self._direct(layer)
                weights = frame.weights if frame is not None else None
                trace.failure = (
                    e,
                    facts_of(trace.stack, function_name, inputs, weights, e),
                )
            if len(trace.stack) == 1:
                raise LayerError(**trace.failure[1]) from e
            raise
        finally:
            trace.stack.pop()
            trace.seen.pop()

    def _place(self, layer: Any, function_name: str) -> int | str | None:
        """Which child of the running layer this is; a shared one counts its calls."""
        if not self.trace.stack:
            return None
        parent = self.trace.stack[-1][0]
        if parent._template is layer:
            return "block"
        places = [i for i, s in enumerate(parent.sublayers) if s is layer]
        calls = self.trace.seen[-1]
        count = calls.get((id(layer), function_name), 0)
        calls[id(layer), function_name] = count + 1
        return places[min(count, len(places) - 1)] if places else None


_CURRENT: ContextVar[Run | None] = ContextVar("retrax_run", default=None)


def current_run() -> Run | None:
    """Returns the innermost run of this thread, or None outside of all layers."""
    return _CURRENT.get()


@contextlib.contextmanager
def open_run(kind: str, **context: Any) -> Iterator[Run]:
    """Opens a run inside the current one, if any; its frames end with the block."""
    run = Run(kind, _CURRENT.get(), context)
    token = _CURRENT.set(run)
    try:
        yield run
    finally:
        _CURRENT.reset(token)


def batch_context(
    axis_name: str | None = None, row_mask: Any = None
) -> contextlib.AbstractContextManager[Run]:
    """Tells the layers that run in this block how the batch is laid out.

    Args:
      axis_name: name of the device axis that the batch is split over; None if whole.
      row_mask: (batch,) float, 0 for rows that are padding; None if all are real.
    """
    return open_run("forward", axis_name=axis_name, row_mask=row_mask)


def memory_context(mode: str) -> contextlib.AbstractContextManager[Run]:
    """Tells the layers that run in this block what may be kept for the backward pass.

    Args:
      mode: 'reversible': reversible layers keep nothing, they are reversed; 'remat':
        they, and the blocks of `Repeat`, keep their inputs and are computed again;
        'plain': all is kept.
    """
    return open_run("forward", memory=mode)


def memory_mode() -> str:
    """Returns the memory mode of the current run; 'reversible' if none was set."""
    run = _CURRENT.get()
    mode = None if run is None else run.context.get("memory")
    return mode or MEMORY_MODES[0]


def precision_context(
    rounding: Any = None, loss: Any = None, loss_input: Any = None
) -> contextlib.AbstractContextManager[Run]:
    """Tells the layers that run in this block in which precision they compute.

    Args:
      rounding: dtype that results of layers are rounded to, also where a compiler may
        keep more digits; None leaves that to the compiler.
      loss: layer whose inputs go through `loss_input` first.
      loss_input: function of a tree.
    """
    boundary = None if loss is None else (loss, loss_input)
    return open_run("forward", rounding=rounding, loss=boundary)


def rounded(x: Any, dtype: Any = None) -> Any:
    """Rounds a result, and its gradient, as the precision of the current run asks.

    Args:
      x: float array.
      dtype: rounds to the digits of this dtype, whatever runs.
    """
    if dtype is None:
        run = _CURRENT.get()
        dtype = None if run is None else run.context.get("rounding")
        if dtype is None or getattr(x, "dtype", None) != dtype:
            return x
    info = jnp.finfo(dtype)
    return jax.lax.reduce_precision(x, info.nexp, info.nmant)


@contextlib.contextmanager
def outside_of_runs() -> Iterator[None]:
    """Lets the block see what layers store, as from outside of all runs."""
    token = _CURRENT.set(None)
    try:
        yield
    finally:
        _CURRENT.reset(token)


def split_rng(rng: Any, n: int) -> tuple[Any, ...]:
    """Splits a key into a tuple of n keys."""
    return tuple(jax.random.split(rng, n)) if n else ()


def emit(name: str, value: Any) -> None:
    """Hands a value out of the running model, beside its outputs.

    `Layer.apply` returns what was emitted; other callers do not see it. Out of a loop
    come the values of all its steps (`emit_of_steps`), out of a branch none.
    """
    run = _CURRENT.get()
    if run is not None:
        run.emitted.append((name, value))


def named_values(emitted: list[tuple[str, Any]]) -> dict[str, Any]:
    """Writes what was emitted in a nested trace as a dict, which may leave the trace.

    The keys of a dict are structure and no values; a number before each name keeps
    apart what has one name, and the order.
    """
    return {f"{i:06d}{name}": value for i, (name, value) in enumerate(emitted)}


def emit_named(named: dict[str, Any]) -> None:
    """Emits again what `named_values` wrote."""
    for name, value in named.items():
        emit(name[6:], value)


def emit_of_steps(named: dict[str, Any]) -> None:
    """Emits what the steps of a loop emitted, each value with the steps as first axis.

    Summaries keep that axis, values of rows have it after the rows. Others come out as
    their mean, pairs (mean, weight) as that by weight. What parts of a batch weigh is
    only said outside of loops.
    """
    for name, value in named.items():
        name = name[6:]
        if name.startswith(PER_EXAMPLE_PREFIX):
            value = jnp.moveaxis(value, 0, 1)
        elif isinstance(value, tuple):
            means, weights = value
            total = jnp.sum(weights)
            mean = jnp.sum(means * weights) / jnp.where(total == 0, 1, total)
            value = mean, total
        elif not name.startswith(SUMMARY_PREFIX):
            value = jnp.mean(value, axis=0)
        if name != "weight":
            emit(name, value)


def data_axis() -> str | None:
    """Returns the name of the device axis that the batch is split over, if any."""
    run = _CURRENT.get()
    return None if run is None else run.context.get("axis_name")


def row_mask() -> Any:
    """Returns the mask of real rows, (batch,) float of 0s and 1s; None if all are real.

    Rows are masked when a batch was padded to divide over devices or micro-batches.
    A layer that mixes rows of the batch has to heed it.
    """
    run = _CURRENT.get()
    return None if run is None else run.context.get("row_mask")


def _descend(
    layer: Any, wanted: Any, weights: Any, state: Any, rng: Any
) -> tuple[Any, Any, Any] | None:
    """Finds the first place of `wanted` under `layer`: (weights, state, rng)."""
    n = len(layer.sublayers)
    if not isinstance(weights, (tuple, list)) or len(weights) < n:
        return None
    if not isinstance(state, (tuple, list)) or len(state) < n:
        return None
    rngs = (None,) * n if rng is None else split_rng(rng, n)
    for i, child in enumerate(layer.sublayers):
        if child is wanted and not _is_marker(weights[i]):
            return weights[i], state[i], rngs[i]
        found = _descend(child, wanted, weights[i], state[i], rngs[i])
        if found is not None:
            return found
    return None


def _is_marker(weights: Any) -> bool:
    """Whether the wanted layer's values are at another, earlier place."""
    return isinstance(weights, dict) and any(
        str(key).startswith("__marker_for_cached") for key in weights
    )
