"""One step of layer-by-layer training, in order.

Forward through all units, keeping inputs of standard ones only; then the loss and
backward, each unit updated as soon as its gradients are there. New values are set
beside the old ones and put in their place by `commit`, when it is known that all
gradients were finite. `reversible_trainer` holds the values.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import jax
import numpy as np
import psutil

from retrax import trees
from retrax.optimizers import l2_norm
from retrax.trainer.block_programs import Shared, where
from retrax.trainer.blocks import Unit
from retrax.trainer.loss_scale import LossScale
from retrax.trainer.step import Carry
from retrax.trainer.visits import Visits

__all__ = ["BlockStep", "UnitValues"]


@dataclasses.dataclass
class UnitValues:
    """What the host holds of a unit.

    Attributes:
      weights: of each layer.
      state: of each layer.
      slots: the optimizer's, of the trained weights.
      weights_l2: norm of the trained weights.
    """

    weights: Any
    state: Any
    slots: Any = None
    weights_l2: float = 0.0

    def trained(self, mask: list[bool]) -> Any:
        """Returns the trained weights."""
        return trees.partition(self.weights, mask)[0]

    def measure(self, trained: Any) -> None:
        """Computes the norm of the trained weights."""
        leaves = [np.asarray(x) for x in jax.tree.leaves(trained)]
        self.weights_l2 = float(l2_norm(leaves))


class BlockStep:
    """The passes of one step."""

    def __init__(
        self,
        units: Sequence[Unit],
        values: list[UnitValues],
        program: Callable[[int, str], Any],
        visits: Visits,
        shared: tuple[Any, Any, Any],
        n_skipped: int,
        mask: Any,
        loss_scale: LossScale,
    ) -> None:
        """Begins a step.

        Args:
          units: the units; the last one is the loss.
          values: what the host holds of each.
          program: gives the compiled program of a unit by its number and name.
          visits: brings and takes values.
          shared: (opt_params, rng, step).
          n_skipped: steps skipped before.
          mask: 0 for rows that are padding; None if there are none.
          loss_scale: what the loss is multiplied by.
        """
        self._loss_scale = loss_scale
        self.values = values
        self._units, self._program, self._visits = units, program, visits
        self._shared, self._mask = shared, mask
        self._n_skipped = np.int32(n_skipped)
        self._scale = np.float32(1)
        self._kept: list[Any] = []  # Of each unit: its inputs, or its new state.
        self._stack: list[Any] = []  # What lies before the loss.
        self._wanted: list[
            Any
        ] = []  # Of each item there: () for its cotangent, or None.
        self._new: dict[int, Future[Any]] = {}
        self._commits_at_once = False

    # --- Passes -----------------------------------------------------------------------

    def forward(self, stack: list[Any], first: Any, check: Any) -> None:
        """Computes what lies before the loss.

        Args:
          stack: the batch.
          first: the first unit's values, if they are on their way already.
          check: called for each unit in the first step.
        """
        n = len(self._units) - 1
        self._wanted = [None] * len(stack)
        coming = first or self._bring(0, slots=False)
        for i in range(n):
            weights, state = coming.result()
            if i + 1 < n:
                coming = self._bring(i + 1, slots=False)
            n_in = self._units[i].n_in
            inputs = tuple(stack[:n_in])
            if len(inputs) < n_in:
                raise ValueError(
                    f"{self._units[i].path} takes {n_in} items, the data stack holds "
                    f"{len(inputs)}: does the batch have enough parts?"
                )
            shared = ((weights, state), self._of(i))
            _, ((outputs, new_state), _) = self._program(i, "forward")(
                (), shared, (inputs, self._mask)
            )
            if check is not None:
                check(self, i, inputs, outputs, new_state)
            jax.block_until_ready(outputs)  # So that no third unit is brought.
            is_reversible = self._units[i].kind == "reversible"
            self._kept.append(new_state if is_reversible else inputs)
            stack = [*outputs, *stack[n_in:]]
            self._wanted = [()] * len(outputs) + self._wanted[n_in:]
        self._stack = stack

    def measure_gradients(self, limit: float | None) -> None:
        """Goes backward once to find the norm of all gradients, and how to clip."""
        squares = []

        def visit(i: int, values: Any, xs: Any) -> Any:
            shared = ((values[0], values[1]), self._of(i))
            _, (kept, square) = self._program(i, "norm")((), shared, xs)
            squares.append(square)
            return kept

        self._go_back(visit, slots=False)
        norm = np.sqrt(np.sum(np.asarray(jax.device_get(squares), np.float32)))
        if limit is not None and norm > limit:
            self._scale = np.float32(limit / norm) if np.isfinite(norm) else np.nan

    def backward(self) -> dict[str, Any]:
        """Computes gradients and updates, from the loss to the first unit.

        Returns:
          stats of the step.
        """
        outs: dict[int, Any] = {}

        def visit(i: int, values: Any, xs: Any) -> Any:
            weights, state, slots = values
            norm = np.float32(self.values[i].weights_l2)
            carry = Carry(weights, state, slots, self._n_skipped, norm)
            carry, (kept, outs[i]) = self._program(i, "update")(carry, self._of(i), xs)
            self._leave(i, carry)
            return kept

        self._go_back(visit, slots=True)
        return self._stats(jax.device_get(outs))

    def _go_back(self, visit: Callable[[int, Any, Any], Any], slots: bool) -> None:
        n = len(self._units) - 1
        stack: list[Any] = list(self._stack)
        grads: list[Any] = [None] * len(stack)
        if slots:  # The last pass: what it has used is let go of.
            self._stack = []
        coming = self._bring(n, slots)
        for i in range(n, -1, -1):
            values = coming.result()
            if i:
                coming = self._bring(i - 1, slots)
            unit = self._units[i]
            if unit.kind == "loss":
                n_out, inputs = len(stack), stack
                # Without a name of its own, which would keep it to the end.
                _, new_grads = visit(
                    i, values, (tuple(stack), tuple(self._wanted), self._mask)
                )
            else:
                inputs, new_grads, n_out = self._back(i, values, stack, grads, visit)
            if slots and i < n:
                self._kept[i] = None
            jax.block_until_ready(new_grads)
            stack = [*inputs, *stack[n_out:]]
            grads = [*new_grads, *grads[n_out:]]

    def _back(
        self, i: int, values: Any, stack: list[Any], grads: list[Any], visit: Any
    ) -> tuple[Any, Any, int]:
        """Returns (inputs, their cotangents, how many outputs they stand for)."""
        unit, kept = self._units[i], self._kept[i]
        n_out = unit.n_out
        given = tuple(grads[:n_out])
        if unit.kind == "standard":
            _, new_grads = visit(i, values, (kept, given, self._mask))
            return kept, new_grads, n_out
        xs = (tuple(stack[:n_out]), given, kept, self._mask)
        inputs, new_grads = visit(i, values, xs)
        return inputs, new_grads, n_out

    # --- Values -----------------------------------------------------------------------

    def commit_at_once(self) -> None:
        """Makes new values replace the old ones as soon as they come."""
        self._commits_at_once = True

    def commit(self) -> None:
        """Puts the new values in place of the old ones."""
        for i in list(self._new):
            self._commit_one(i)

    def _commit_one(self, i: int) -> None:
        carry = self._new.pop(i).result()
        self.values[i] = UnitValues(
            carry.weights, carry.state, carry.slots, float(carry.weights_l2)
        )

    def bring_first(self) -> Future[Any]:
        """Begins to bring the first unit for the next step."""
        return self._bring(0, slots=False)

    def check_reverse(self, i: int, inputs: Any, outputs: Any, new_state: Any) -> None:
        """Raises ValueError if unit i does not find its inputs again."""
        values = self.values[i]
        shared = ((values.weights, values.state), self._of(i))
        xs = (inputs, outputs[: self._units[i].n_out], new_state, self._mask)
        _, (_, found) = self._program(i, "check")((), shared, xs)
        dtypes = [x.dtype for x in inputs if jax.numpy.issubdtype(x.dtype, np.floating)]
        for (difference, size), dtype in zip(found, dtypes, strict=True):
            bound = float(jax.numpy.finfo(dtype).eps) ** 0.5 * max(float(size), 1e-30)
            if not float(difference) <= bound:
                names = ", ".join(layer.name for layer in self._units[i].layers)
                raise ValueError(
                    f"{names} at {self._units[i].path} is not reversed by its "
                    f"reverse(): the largest difference to the inputs is "
                    f"{float(difference):.3g}, where numbers go up to "
                    f"{float(size):.3g} (rounding makes at most {bound:.3g})."
                )

    def _of(self, i: int) -> Shared:
        place = where(self._units[i])
        return Shared(*self._shared, place, self._scale, self._loss_scale)

    def _bring(self, i: int, slots: bool) -> Future[Any]:
        own = self.values[i]
        values = (own.weights, own.state)
        return self._visits.bring((*values, own.slots) if slots else values)

    def _leave(self, i: int, carry: Carry) -> None:
        self._new[i] = self._visits.take(carry)
        if self._commits_at_once:
            for j in [j for j in self._new if j > i]:
                self._commit_one(j)

    def _stats(self, outs: dict[int, Any]) -> dict[str, Any]:
        """Joins what the units report."""
        n = len(self._units) - 1
        stats = dict(outs[n])
        squares: list[Any] = []
        norms: list[Any] = []
        place = 0
        for i in range(n + 1):
            if not jax.tree.leaves(self.values[i].weights):
                continue
            for name in ("gradients_l2", "weights_l2"):
                stats[f"layer{place}/{name}"] = outs[i][name]
            place += 1
            squares.append(np.square(np.float64(outs[i]["gradients_l2"])))
            norms.append(np.square(np.float64(outs[i]["weights_l2"])))
        stats[f"layer{place}/loss"] = stats["loss"]
        stats["gradients_l2"] = np.float32(np.sqrt(np.sum(squares)))
        stats["weights_l2"] = np.float32(np.sqrt(np.sum(norms)))
        finite = [bool(out["grads_finite"]) for out in outs.values()]
        stats["grads_finite"] = np.bool_(all(finite) and np.isfinite(self._scale))
        memory = psutil.Process(os.getpid()).memory_info().rss
        return stats | {"host_memory_bytes": memory}
