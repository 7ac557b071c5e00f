"""Mixed precision: half precision in the layers, float32 in weights, losses and sums.

`Policy` says in which dtypes a model computes, a loss scale keeps small gradients of
float16 from vanishing. `StepTrainer`, `ReversibleSerialTrainer` and `Evaluator` ask the
policy to run their layers; `build_update` asks the loss scale. Micikevicius et al. 2018
(https://arxiv.org/abs/1710.03740). Stands on layers and `step`; under `step_trainer`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import warnings
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from retrax.errors import ConfigError
from retrax.layers.base import Layer
from retrax.layers.combinators import Serial
from retrax.layers.running import precision_context, rounded
from retrax.layers.stack import arities
from retrax.optimizers import SGD
from retrax.trainer.loss_scale import DynamicLossScale, LossScale, NoLossScale
from retrax.trainer.reduce import Reduce
from retrax.trainer.step import Aux, Carry, build_update, from_loss

__all__ = [
    "PRESETS",
    "Policy",
    "as_loss_scale",
    "as_policy",
    "mixed_precision_step",
    "round_to",
    "step_options_with",
]

_COMPUTE = ("float32", "bfloat16", "float16")


@dataclasses.dataclass(frozen=True)
class Policy:
    """In which dtypes a model keeps its weights, computes, and gives its outputs.

    Weights and float inputs are cast where they enter the model, inside of what is
    differentiated, so gradients and optimizer slots have the dtype of the weights.
    Layer state keeps its dtype, and so do targets and example weights. Moments of
    normalization layers, softmax of attention, and losses are float32 whatever the
    policy.

    Attributes:
      param_dtype: dtype of the weights that are cast; others are left as they are.
      compute_dtype: 'float32', 'bfloat16' or 'float16'.
      output_dtype: dtype of the model's outputs, as losses and metrics get them.
      strict_rounding: round the results of each layer to compute_dtype, also where a
        compiler may keep more digits: numbers are then the same compiled or not, at
        some cost in speed.

    Example:
      >>> policy = as_policy('mixed_bfloat16')
      >>> tree = {'w': jnp.ones(2), 'ids': jnp.arange(2)}
      >>> [str(x.dtype) for x in jax.tree.leaves(policy.cast_to_compute(tree))]
      ['int32', 'bfloat16']
    """

    param_dtype: Any = jnp.float32
    compute_dtype: Any = jnp.float32
    output_dtype: Any = jnp.float32
    strict_rounding: bool = False

    def __post_init__(self) -> None:
        """Checks the dtypes.

        Raises:
          ConfigError: compute_dtype is none of the three, or another is no float.
        """
        for field in ("param_dtype", "compute_dtype", "output_dtype"):
            given = getattr(self, field)
            try:
                dtype = jnp.dtype(given)
            except TypeError:
                dtype = jnp.dtype(bool)
            allowed = _COMPUTE if field == "compute_dtype" else None
            if not jnp.issubdtype(dtype, jnp.floating) or (
                allowed and dtype.name not in allowed
            ):
                raise ConfigError(
                    f"{field} must be one of {', '.join(_COMPUTE)}, got {given!r}."
                )
            object.__setattr__(self, field, dtype)

    @property
    def is_mixed(self) -> bool:
        """Whether anything is cast at all."""
        return self.compute_dtype != self.param_dtype

    def cast_to_compute(self, tree: Any) -> Any:
        """Casts leaves of param_dtype to compute_dtype; others stay as they are."""
        if not self.is_mixed:
            return tree
        return jax.tree.map(self._to_compute, tree)

    def cast_to_output(self, tree: Any) -> Any:
        """Casts leaves of compute_dtype to output_dtype; others stay as they are."""
        if self.compute_dtype == self.output_dtype:
            return tree
        return jax.tree.map(
            lambda x: (
                x.astype(self.output_dtype) if _dtype(x) == self.compute_dtype else x
            ),
            tree,
        )

    def _to_compute(self, x: Any) -> Any:
        if _dtype(x) != self.param_dtype:
            return x
        if self.strict_rounding:
            x = round_to(x, self.compute_dtype)
        return x.astype(self.compute_dtype)

    # --- Running layers ---------------------------------------------------------------

    def run_loss(
        self, model_with_loss: Layer, batch: Any, weights: Any, state: Any, rng: Any
    ) -> tuple[Any, Any, list[tuple[str, Any]]]:
        """Does what `Layer.apply` does, in this policy.

        Args:
          model_with_loss: `Serial` whose last layer is the loss. Any other layer is
            taken for a model as a whole.
          batch: tuple of arrays.
          weights: weights of both.
          state: state of both.
          rng: a key.
        """
        if not self.is_mixed:
            return model_with_loss.apply(_bare(batch), weights, state, rng)
        loss = _loss_of(model_with_loss)
        if loss is None:
            weights = self.cast_to_compute(weights)
        else:
            weights = (*self.cast_to_compute(weights[:-1]), weights[-1])
        batch = self.cast_inputs(model_with_loss, batch)
        with self.context(loss):
            value, new_state, emitted = model_with_loss.apply(
                _bare(batch), weights, state, rng
            )
        return self.cast_to_output(value), _like(new_state, state), emitted

    def cast_inputs(self, model_with_loss: Layer, batch: Any) -> tuple[Any, ...]:
        """Casts the parts of a batch that the layers before the loss take."""
        batch = tuple(batch)
        if not self.is_mixed:
            return batch
        n_in = len(batch)
        if _loss_of(model_with_loss) is not None:
            n_in = arities(model_with_loss.sublayers[:-1])[0]
        return (*self.cast_to_compute(batch[:n_in]), *batch[n_in:])

    def run_model(
        self, model: Layer, x: Any, weights: Any, state: Any, rng: Any
    ) -> tuple[Any, Any, list[tuple[str, Any]]]:
        """Does what `Layer.apply` does, in this policy; outputs in output_dtype."""
        x = self.cast_to_compute(x)
        y, new_state, emitted = self.run_inside(model, x, weights, state, rng)
        return self.cast_to_output(y), new_state, emitted

    def run_inside(
        self, layer: Layer, x: Any, weights: Any, state: Any, rng: Any
    ) -> tuple[Any, Any, list[tuple[str, Any]]]:
        """Does what `Layer.apply` does for a layer between others: x and y as is."""
        if not self.is_mixed:
            return layer.apply(x, weights, state, rng)
        weights = self.cast_to_compute(weights)
        with self.context():
            y, new_state, emitted = layer.apply(x, weights, state, rng)
        return y, _like(new_state, state), emitted

    def context(self, loss: Layer | None = None) -> Any:
        """Tells layers that run in the block how to round, and which is the loss."""
        if not self.is_mixed:
            return contextlib.nullcontext()
        return precision_context(
            self.compute_dtype if self.strict_rounding else None,
            loss,
            self.cast_to_output,
        )


PRESETS = {
    "float32": Policy(),
    "mixed_bfloat16": Policy(compute_dtype=jnp.bfloat16),
    "mixed_float16": Policy(compute_dtype=jnp.float16),
}


def as_policy(precision: str | Policy | None) -> Policy:
    """Returns a policy for the name of a preset, a policy, or None (float32).

    Raises:
      ConfigError: there is no such preset; says which there are.
    """
    if precision is None:
        return PRESETS["float32"]
    if isinstance(precision, Policy):
        return precision
    if not isinstance(precision, str) or precision not in PRESETS:
        raise ConfigError(
            f"precision must be one of {', '.join(map(repr, PRESETS))} or a Policy, "
            f"got {precision!r}."
        )
    return PRESETS[precision]


def as_loss_scale(loss_scale: Any, policy: Policy) -> LossScale:
    """Returns the loss scale, or for None that which the policy needs.

    float16 needs a `DynamicLossScale`: its largest number is 65504, and gradients below
    6e-8 are 0. bfloat16 has the exponents of float32 and needs none.

    Raises:
      ConfigError: loss_scale is something else.
    """
    is_float16 = policy.compute_dtype == jnp.float16
    if loss_scale is None:
        return DynamicLossScale() if is_float16 else NoLossScale()
    if not isinstance(loss_scale, LossScale):
        raise ConfigError(
            "loss_scale must be a NoLossScale, StaticLossScale or DynamicLossScale, "
            f"got {loss_scale!r}."
        )
    if is_float16 and isinstance(loss_scale, NoLossScale):
        warnings.warn(
            "float16 without a loss scale: gradients below 6e-8 become 0, and training "
            "stalls without an error. Use DynamicLossScale(), or 'mixed_bfloat16'.",
            stacklevel=3,
        )
    return loss_scale


def step_options_with(options: Mapping[str, Any] | None, **more: Any) -> dict[str, Any]:
    """Returns options of a step trainer, with those of `more` that are not None."""
    return {**(options or {}), **{k: x for k, x in more.items() if x is not None}}


def round_to(x: Any, dtype: Any) -> Any:
    """Rounds to the digits of `dtype` and keeps the dtype of x; gradients likewise.

    Casting there and back does not do: a compiler may leave both casts out.
    """
    return rounded(x, dtype)


def mixed_precision_step(
    params: dict[str, Any],
    x: Any,
    y: Any,
    loss_scale: Any,
    good_steps: Any,
    lr: Any,
    growth_interval: int,
) -> dict[str, Any]:
    """Makes one step of linear regression in bfloat16, with float32 weights.

    The prediction is x w + b, rounded to bfloat16 after the product and after the sum;
    the loss is the mean of (prediction - y)^2 in float32. It is the step of
    `StepTrainer` in small, and gives the same numbers compiled or not.

    Args:
      params: {'w': (d, k) float32, 'b': (k,) float32}.
      x: (batch, d) float32.
      y: (batch, k) float32.
      loss_scale: () float32, what the loss is multiplied by.
      good_steps: () int32, good steps since the scale last changed.
      lr: () float32, learning rate per step.
      growth_interval: good steps after which the scale doubles; a Python number, static
        where this is compiled.

    Returns:
      {'loss': () float32, 'params': as given, 'loss_scale': () float32,
      'good_steps': () int32, 'grads_finite': () bool}. After gradients that are not
      finite the params are as they were and the scale is halved, to 1 at least.

    Raises:
      ValueError: the scale is not finite or not above 0, or growth_interval below 1.
    """
    policy = Policy(compute_dtype=jnp.bfloat16, strict_rounding=True)
    scale = DynamicLossScale(loss_scale, growth_interval, good_steps=good_steps)

    def loss_fn(weights: Any, state: Any, rng: Any, batch: Any) -> tuple[Any, Aux]:
        x, y = batch
        cast, x = policy.cast_to_compute((weights, x))
        product = round_to(x @ cast["w"], jnp.bfloat16)
        prediction = round_to(product + cast["b"], jnp.bfloat16)
        loss = jnp.mean(jnp.square(policy.cast_to_output(prediction) - y))
        return loss, Aux(state=state)

    reduce, sgd = Reduce(), SGD(0.0)
    params = jax.tree.map(lambda p: jnp.asarray(p, jnp.float32), params)
    slots, _ = sgd.tree_init(params)
    update = build_update(
        from_loss(loss_fn, reduce),
        functools.partial(sgd.tree_update, store_slots=False),
        reduce,
        [True] * len(params),
        [],
        packed=True,
    )
    carry = Carry(params, (), slots, jnp.int32(0), jnp.float32(0), scale)
    shared = ({"learning_rate": lr}, jax.random.key(0), jnp.int32(1))
    new, out = update(carry, shared, ((jnp.asarray(x), jnp.asarray(y)),))
    return {
        "loss": out["loss"],
        "params": new.weights,
        "loss_scale": new.loss_scale.loss_scale,
        "good_steps": new.loss_scale.good_steps,
        "grads_finite": out["grads_finite"],
    }


def _loss_of(model_with_loss: Layer) -> Layer | None:
    """Returns the loss at the end of a Serial; None where it cannot be told."""
    parts = model_with_loss.sublayers
    return parts[-1] if isinstance(model_with_loss, Serial) and parts[1:] else None


def _like(new: Any, old: Any) -> Any:
    """State in the dtypes that it had."""
    return jax.tree.map(
        lambda x, before: x if _dtype(x) == _dtype(before) else x.astype(before.dtype),
        new,
        old,
    )


def _dtype(x: Any) -> Any:
    return getattr(x, "dtype", None)


def _bare(batch: Any) -> Any:
    return batch[0] if len(batch) == 1 else tuple(batch)
