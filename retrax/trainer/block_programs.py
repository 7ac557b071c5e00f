"""What is compiled for layer-by-layer training: the programs of one unit.

Each is a function of (carry, shared, xs) that returns (carry, (kept, out)), made for
`Devices.compile_block`. Equal units share their programs: where a unit stands comes in
as an argument (`where`), only its layers and how its key is split are built in.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from retrax import trees
from retrax.errors import ConfigError, DataError
from retrax.layers.base import to_list
from retrax.layers.reversing import (
    reverse_chain,
    reverse_each,
    with_float0,
    without_float0,
)
from retrax.layers.running import batch_context, row_mask
from retrax.layers.stack import inputs_from_stack, packed
from retrax.optimizers import l2_norm
from retrax.trainer.blocks import Unit
from retrax.trainer.loss_chunks import chunked_loss
from retrax.trainer.loss_scale import (
    LossScale,
    current_loss_scale,
    loss_scale_context,
)
from retrax.trainer.precision import Policy
from retrax.trainer.reduce import Reduce
from retrax.trainer.step import (
    Aux,
    Carry,
    build_update,
    from_loss,
    from_reverse,
    from_vjp,
    step_rngs,
)
from retrax.trainer.structure import fingerprint

__all__ = ["Shared", "UnitPrograms", "where"]


class Shared(NamedTuple):
    """What is the same on all devices.

    Attributes:
      opt_params: hyper-parameters.
      rng: the run's key.
      step: number of the step.
      where: which of the keys is whose, see `where`.
      scale: what gradients are multiplied by, for clipping; 1 otherwise.
      loss_scale: what the loss is multiplied by.
    """

    opt_params: Any
    rng: Any
    step: Any
    where: Any
    scale: Any
    loss_scale: LossScale


def where(unit: Unit) -> tuple[np.ndarray, ...]:
    """Returns which keys a Serial would give the layers of a unit."""
    return tuple(
        np.array([i for _, i in place.steps], np.int32) for place in unit.places
    )


class UnitPrograms:
    """Makes the programs of a unit.

    Attributes:
      key: equal for units that may use each other's programs.
    """

    def __init__(
        self,
        unit: Unit,
        reduce: Reduce,
        optimizer_update: Callable[..., Any],
        trainable: list[bool],
        state_sync: list[str | None],
        policy: Policy,
    ) -> None:
        """Notes what is built in.

        Args:
          unit: the unit; units that are equal to it may use the programs.
          reduce: how replicas agree.
          optimizer_update: as `Optimizer.tree_update`.
          trainable: for each leaf of the weights, whether it is trained.
          state_sync: for each leaf of the state, how replicas agree on it.
          policy: the dtypes to compute in.
        """
        self._policy = policy
        self._kind, self._chunk, self._n_in = unit.kind, unit.chunk, unit.n_in
        self._layers = unit.layers
        self._splits = [[n for n, _ in place.steps] for place in unit.places]
        self._reduce = reduce
        self._optimizer_update = optimizer_update
        self._trainable, self._state_sync = trainable, state_sync
        built_in = (self._kind, self._chunk, self._splits, trainable, state_sync)
        built_in += (policy,)
        self.key = (fingerprint(unit.layers), repr(built_in))

    # --- Programs ---------------------------------------------------------------------

    def forward(self, carry: Any, shared: Any, xs: Any) -> Any:
        """shared: ((weights, state), Shared); xs: (inputs, mask).

        Kept are (outputs, new state of reversible units with a new first axis).
        """
        (weights, state), shared = shared
        inputs, mask = xs
        rng, _ = step_rngs(self._reduce.key(shared.rng), shared.step)
        with batch_context(self._reduce.axis, mask):
            outputs, new_state = self._run(inputs, weights, state, rng, shared.where)
        if self._kind != "reversible":
            new_state = ()
        return carry, ((outputs, jax.tree.map(lambda s: s[None], new_state)), ())

    def update(self, carry: Carry, shared: Shared, xs: Any) -> Any:
        """xs: as `gradients` takes. Kept are what it gives in `Aux.inputs`."""

        def scaled_update(step: Any, grads: Any, *args: Any) -> Any:
            grads = jax.tree.map(lambda g: g * shared.scale.astype(g.dtype), grads)
            return self._optimizer_update(step, grads, *args)

        update = build_update(
            self._gradient_source(shared.where),
            scaled_update,
            self._reduce,
            self._trainable,
            self._state_sync,
            skip_nonfinite=False,  # Whether to skip is known after the last unit.
        )
        carry = carry._replace(loss_scale=shared.loss_scale)
        carry, out = update(carry, (shared.opt_params, shared.rng, shared.step), xs)
        if self._kind != "loss":
            out.pop("loss", None)
        return carry, (out.pop("inputs"), out)

    def norm(self, carry: Any, shared: Any, xs: Any) -> Any:
        """Does what `update` does, and changes nothing; out is the square of the norm.

        shared: ((weights, state), Shared).
        """
        (weights, state), shared = shared
        rng, _ = step_rngs(self._reduce.key(shared.rng), shared.step)
        with loss_scale_context(shared.loss_scale):
            grads, aux = self._gradient_source(shared.where)(weights, state, rng, *xs)
        grads = self._reduce.gradients(trees.partition(grads, self._trainable)[0])
        grads = shared.loss_scale.unscale(grads)
        return carry, (aux.inputs, jnp.square(l2_norm(grads)))

    def check(self, carry: Any, shared: Any, xs: Any) -> Any:
        """Compares inputs with what reversing finds; out is [(difference, size)].

        shared: ((weights, state), Shared); xs: (inputs, outputs, new_state, mask).
        """
        (weights, state), shared = shared
        inputs, outputs, new_state, mask = xs
        rng, _ = step_rngs(self._reduce.key(shared.rng), shared.step)
        keys = self._keys(rng, shared.where)
        new_state = jax.tree.map(lambda s: s[0], new_state)
        cast = self._policy.cast_to_compute(weights)
        with batch_context(self._reduce.axis, mask), self._policy.context():
            found = reverse_each(
                self._layers, packed(outputs), cast, state, new_state, keys
            )
        differences = []
        for x, y in zip(inputs, to_list(found), strict=True):
            if jnp.shape(x) != jnp.shape(y) or x.dtype != y.dtype:
                raise ValueError(
                    f"{self._layers[0].name} is not reversed by its reverse(): inputs "
                    f"of {x.dtype}{jnp.shape(x)} come back as {y.dtype}{jnp.shape(y)}."
                )
            if jnp.issubdtype(x.dtype, jnp.floating):
                size = jnp.maximum(jnp.max(jnp.abs(x)), jnp.max(jnp.abs(outputs[0])))
                pair = jnp.stack([jnp.max(jnp.abs(x - y)), size])
                if self._reduce.axis is not None:
                    pair = jax.lax.pmax(pair, self._reduce.axis)
                differences.append(pair)
        return carry, ((), differences)

    def check_state_sync(
        self, unit: Unit, weights: Any, state: Any, inputs: Any, n_devices: int
    ) -> None:
        """Refuses float state that changes without saying how devices agree on it."""
        leaves = jax.tree.leaves(state)
        open_ends = [
            sync is None and jnp.issubdtype(leaf.dtype, jnp.floating)
            for sync, leaf in zip(self._state_sync, leaves, strict=True)
        ]
        if not any(open_ends):
            return

        def new_state(state: Any, weights: Any, rng: Any, inputs: Any) -> Any:
            _, new = self._run(inputs, weights, state, rng, where(unit))
            return jax.tree.leaves(new)

        traced = jax.make_jaxpr(new_state)(
            state, weights, jax.random.key(0), tuple(inputs)
        )
        before = traced.jaxpr.invars[: len(leaves)]
        for is_open, old, new in zip(
            open_ends, before, traced.jaxpr.outvars, strict=True
        ):
            if is_open and new is not old:
                raise ConfigError(
                    f"state at {unit.path} changes in training, but its layer does not "
                    f"say how {n_devices} devices agree on it: set state_sync = "
                    "'mean', 'sum' or 'same' in the layer's class."
                )

    # --- Parts ------------------------------------------------------------------------

    def _gradient_source(self, where: Any) -> Callable[..., tuple[Any, Aux]]:
        """Takes (weights, state, rng, *xs) and gives (gradients, Aux).

        xs are (inputs, cotangents, mask) for a standard unit, (outputs, cotangents,
        new_state, mask) for a reversible one, (inputs, wanted, mask) for the loss, with
        () where a cotangent is wanted and None where it is not. In `Aux.inputs` are
        (inputs, cotangents), inputs only of a reversible unit. Cotangents of what is no
        float are None.
        """
        source = {
            "standard": self._from_inputs,
            "reversible": self._from_outputs,
            "loss": self._from_loss,
        }[self._kind]

        def gradients(weights: Any, state: Any, rng: Any, *xs: Any) -> tuple[Any, Aux]:
            with batch_context(self._reduce.axis, xs[-1]):
                grads, aux = source(where, weights, state, rng, *xs[:-1])
            # The cotangent that comes from the loss is scaled as the loss is.
            return grads, aux._replace(loss_scale=current_loss_scale())

        return gradients

    def _from_inputs(
        self, where: Any, weights: Any, state: Any, rng: Any, inputs: Any, grads: Any
    ) -> tuple[Any, Aux]:
        def pure_fn(xs: Any, w: Any, state: Any, rng: Any) -> tuple[Any, Any]:
            outputs, new_state = self._run(xs, w, state, rng, where)
            # Cotangents of the others need not be spoken of.
            pairs = zip(outputs, grads, strict=True)
            return [y for y, g in pairs if g is not None], new_state

        given = [g for g in grads if g is not None]
        gradients, aux = from_vjp(pure_fn)(weights, state, rng, inputs, given)
        return gradients, aux._replace(inputs=((), without_float0(aux.inputs)))

    def _from_outputs(
        self,
        where: Any,
        weights: Any,
        state: Any,
        rng: Any,
        outputs: Any,
        grads: Any,
        new_state: Any,
    ) -> tuple[Any, Aux]:
        def reverse_and_grad(
            outputs: Any, grads: Any, w: Any, state: Any, new_state: Any, rng: Any
        ) -> Any:
            with self._policy.context():
                x, (gx, gw) = reverse_chain(
                    self._layers,
                    packed(outputs),
                    packed(grads),
                    self._policy.cast_to_compute(w),
                    state,
                    new_state,
                    self._keys(rng, where),
                    apart=False,
                )
            gw = jax.tree.map(lambda g, x: g.astype(x.dtype), gw, w)
            return tuple(to_list(x)), (tuple(to_list(gx)), gw)

        grads = tuple(with_float0(g, y) for g, y in zip(grads, outputs, strict=True))
        new_state = jax.tree.map(lambda s: s[0], new_state)
        gradients, aux = from_reverse(reverse_and_grad)(
            weights, state, rng, tuple(outputs), grads, new_state
        )
        inputs, cotangents = aux.inputs
        return gradients, aux._replace(inputs=(inputs, without_float0(cotangents)))

    def _from_loss(
        self, where: Any, weights: Any, state: Any, rng: Any, inputs: Any, wanted: Any
    ) -> tuple[Any, Aux]:
        floats = [
            w is not None and jnp.issubdtype(x.dtype, jnp.floating)
            for x, w in zip(inputs, wanted, strict=True)
        ]
        moving, fixed = trees.partition(tuple(inputs), floats)

        def loss_fn(both: Any, state: Any, rng: Any, fixed: Any) -> tuple[Any, Aux]:
            weights, moving = both
            xs = trees.combine(moving, fixed)
            keys = self._keys(rng, where)
            cast = (*self._policy.cast_to_compute(weights[:-1]), weights[-1])
            with self._policy.context(self._layers[-1]):
                return chunked_loss(self._layers, xs, cast, state, keys, self._chunk)

        (gradients, grads_in), aux = from_loss(loss_fn, self._reduce)(
            (weights, moving), state, rng, fixed
        )
        if aux.weight is None and row_mask() is not None:
            raise DataError(
                "a batch does not divide over the devices, and the loss "
                f"{self._layers[-1].name} cannot leave padding out; use a loss that "
                "reports its weight, or batches that divide."
            )
        return gradients, aux._replace(inputs=((), grads_in))

    def _run(
        self, inputs: Any, weights: Any, state: Any, rng: Any, where: Any
    ) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        keys = self._keys(rng, where)
        stack, new_state = list(inputs), []
        for layer, w, s, key in zip(self._layers, weights, state, keys, strict=True):
            x = inputs_from_stack(stack, layer.n_in)
            y, s, _ = self._policy.run_inside(layer, x, w, s, key)
            stack = to_list(y) + stack[layer.n_in :]
            new_state.append(s)
        return tuple(stack), tuple(new_state)

    def _keys(self, rng: Any, where: Any) -> list[Any]:
        """Splits a model's key as its Serials would on the way to each layer."""
        keys = []
        for splits, own in zip(self._splits, where, strict=True):
            key = rng
            for depth, n in enumerate(splits):
                key = jax.random.split(key, n)[own[depth]]
            keys.append(key)
        return keys
