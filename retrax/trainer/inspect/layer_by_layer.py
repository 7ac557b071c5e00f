"""What `ReversibleSerialTrainer` needs for a step, found without any values.

Beside `costs`. It goes through the passes of `BlockStep` with shapes in place of
arrays, and counts at each program what is alive: the values that are there and those
that come, the data stack, what is kept for the backward pass, and what the compiled
program takes for itself.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.extend import core

from retrax import trees
from retrax.layers import tree as layer_tree
from retrax.layers.base import Layer
from retrax.layers.stack import packed
from retrax.optimizers.base import Optimizer
from retrax.trainer.block_programs import Shared, UnitPrograms, where
from retrax.trainer.blocks import Unit, extract_reversible_blocks
from retrax.trainer.inspect.costs import n_bytes
from retrax.trainer.inspect.walk import structs
from retrax.trainer.precision import Policy, as_loss_scale, as_policy
from retrax.trainer.reduce import Reduce
from retrax.trainer.step import Carry

__all__ = ["Need", "needs"]


@dataclasses.dataclass(frozen=True)
class Need:
    """What layer-by-layer training needs.

    Attributes:
      held: bytes on the device between steps: the batch.
      peak: most bytes on the device.
      live: most bytes of arrays there, what programs take for themselves not counted.
      host: bytes on the host: weights, state and slots, old and new.
    """

    held: int
    peak: int
    live: int
    host: int


def needs(
    model_with_loss: Layer,
    signature: Any,
    optimizer: Optimizer,
    precision: str | Policy | None = None,
) -> Need:
    """Follows one step.

    Raises:
      ConfigError: the model cannot be trained layer by layer; says why.
      ValueError: it does not end with a loss.
    """
    blocks, _ = extract_reversible_blocks(model_with_loss)
    batch = list(map(structs, signature))
    sigs = model_with_loss.weights_and_state_signature(packed(batch))
    weights, state = map(structs, sigs)
    policy = as_policy(precision)
    step = _AbstractStep(blocks.units, weights, state, optimizer, policy)
    step.forward(batch)
    step.backward()
    host = 2 * n_bytes([step.values, step.slots])
    return Need(n_bytes(batch), step.peak, step.live, host)


class _AbstractStep:
    """The passes of `BlockStep` with shapes; the same order, the same arrays alive."""

    def __init__(
        self,
        units: Sequence[Unit],
        weights: Any,
        state: Any,
        optimizer: Optimizer,
        policy: Policy,
    ) -> None:
        self._units = units
        self.values = [(_part(u, weights), _part(u, state)) for u in units]
        self.slots, self._makers, self._programs = [], [], {}
        self.peak = self.live = 0
        self._kept: list[Any] = []
        self._stack: list[Any] = []
        self._wanted: list[Any] = []
        reduce = Reduce()
        self._loss_scale = jax.eval_shape(lambda: as_loss_scale(None, policy))
        for unit, (own, own_state) in zip(units, self.values, strict=True):
            trainable = unit.trainable_list(own)
            syncs = [
                sync
                for place, s in zip(unit.places, own_state, strict=True)
                for _, sync in layer_tree.state_sync_list(place.layer, s)
            ]
            trained = trees.partition(own, trainable)[0]
            slots, self._opt_params = jax.eval_shape(optimizer.tree_init, trained)
            self.slots.append(slots)
            maker = UnitPrograms(
                unit, reduce, _without_storing(optimizer), trainable, syncs, policy
            )
            self._makers.append(maker)

    def forward(self, stack: list[Any]) -> None:
        """As `BlockStep.forward`."""
        self._wanted = [None] * len(stack)
        n = len(self._units) - 1
        for i in range(n):
            unit, values = self._units[i], self.values[i]
            n_in = unit.n_in
            inputs = tuple(stack[:n_in])
            coming = self.values[i + 1] if i + 1 < n else ()
            args = ((), (values, self._shared(i)), (inputs, None))
            _, ((outputs, new_state), _) = self._call(
                i, "forward", args, [stack, self._kept], coming
            )
            is_reversible = unit.kind == "reversible"
            self._kept.append(new_state if is_reversible else inputs)
            stack = [*outputs, *stack[n_in:]]
            self._wanted = [()] * len(outputs) + self._wanted[n_in:]
        self._stack = stack

    def backward(self) -> None:
        """As `BlockStep.backward`."""
        n = len(self._units) - 1
        stack, grads = list(self._stack), [None] * len(self._stack)
        left: Any = ()
        for i in range(n, -1, -1):
            unit = self._units[i]
            carry = Carry(
                *self.values[i],
                self.slots[i],
                jax.ShapeDtypeStruct((), np.int32),
                jax.ShapeDtypeStruct((), np.float32),
            )
            coming = (self.values[i - 1], self.slots[i - 1]) if i else ()
            n_out = len(stack) if unit.kind == "loss" else unit.n_out
            given = tuple(grads[:n_out])
            if unit.kind == "loss":
                xs: Any = (tuple(stack), tuple(self._wanted), None)
            elif unit.kind == "standard":
                xs = (self._kept[i], given, None)
            else:
                xs = (tuple(stack[:n_out]), given, self._kept[i], None)
            args = (carry, self._shared(i), xs)
            alive = [stack, grads, self._kept]
            left, (kept, _) = self._call(i, "update", args, alive, coming, left)
            inputs, new_grads = kept
            if unit.kind == "loss":
                inputs = stack
            elif unit.kind == "standard":
                inputs = self._kept[i]
            if i < n:
                self._kept[i] = None
            stack = [*inputs, *stack[n_out:]]
            grads = [*new_grads, *grads[n_out:]]

    def _shared(self, i: int) -> Shared:
        key = jax.eval_shape(lambda: jax.random.key(0))
        step, scale = (jax.ShapeDtypeStruct((), t) for t in (np.int32, np.float32))
        place = structs(where(self._units[i]))
        return Shared(self._opt_params, key, step, place, scale, self._loss_scale)

    def _call(
        self, i: int, what: str, args: Any, alive: Any, coming: Any, left: Any = ()
    ) -> Any:
        """Returns the shapes that a program gives, and counts what is alive.

        That is `alive`, and what comes or what is left of the unit before: never both,
        as one worker copies in order. Arguments that are passed on are the same arrays
        afterwards, unless the program is given their memory.
        """
        maker = self._makers[i]
        donated = what == "update"
        key = (what, maker.key, repr(jax.tree.map(lambda x: (x.shape, x.dtype), args)))
        if key not in self._programs:
            fn = getattr(maker, what)
            traced, shapes = jax.make_jaxpr(fn, return_shape=True)(*args)
            jitted = jax.jit(fn, donate_argnums=(0,) if donated else ())
            memory = jitted.lower(*args).compile().memory_analysis()
            places = {id(var): k for k, var in enumerate(traced.jaxpr.invars)}
            passed = [
                places.get(id(var)) if isinstance(var, core.Var) else None
                for var in traced.jaxpr.outvars
            ]
            self._programs[key] = shapes, passed, memory
        shapes, passed, memory = self._programs[key]
        given = jax.tree.leaves(args)
        n_given_away = len(jax.tree.leaves(args[0])) if donated else 0
        fresh, treedef = jax.tree.flatten(shapes)
        out = [
            given[k]
            if k is not None and k >= n_given_away
            else jax.ShapeDtypeStruct(x.shape, x.dtype)
            for x, k in zip(fresh, passed, strict=True)
        ]
        result = jax.tree.unflatten(treedef, out)
        # Of what it takes over its results have the memory.
        kept_args = jax.tree.leaves(args)[n_given_away:]
        for others in (coming, left):
            before = _unique_bytes([alive, others, args])
            after = _unique_bytes([alive, others, kept_args, result])
            self.live = max(self.live, before, after)
            self.peak = max(self.peak, before, after + memory.temp_size_in_bytes)
        return result


def _unique_bytes(tree: Any) -> int:
    return n_bytes(list({id(x): x for x in jax.tree.leaves(tree)}.values()))


def _without_storing(optimizer: Optimizer) -> Any:
    def update(step: Any, grads: Any, *args: Any) -> Any:
        return optimizer.tree_update(step, grads, *args, store_slots=False)

    return update


def _part(unit: Unit, tree: Any) -> tuple[Any, ...]:
    """What `Unit.take` gives, for shapes."""
    parts = []
    for place in unit.places:
        own = tree
        steps = place.steps[:-1] if place.in_repeat else place.steps
        for _, i in steps:
            own = own[i]
        if place.in_repeat:
            own = jax.tree.map(
                lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), own
            )
        parts.append(own)
    # Each an array of its own, so that it is counted once.
    return tuple(jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), parts))
