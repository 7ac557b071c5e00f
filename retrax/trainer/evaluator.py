"""`Evaluator`: exact means of metrics over a finite set of batches.

Each metric of a batch is a mean with a weight, and the result is the weighted mean of
all, summed in float64 on the host. So neither a smaller last batch nor the number of
devices changes a result. Nothing is trained and no model state changes here.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from retrax.errors import DataError
from retrax.layers.base import Layer
from retrax.layers.running import (
    PER_EXAMPLE_PREFIX,
    SUMMARY_PREFIX,
    batch_context,
)
from retrax.layers.stack import inputs_from_stack, outputs_onto_stack
from retrax.shapes import signature
from retrax.trainer.devices import Devices
from retrax.trainer.padding import cut_rows, divides, pad_rows
from retrax.trainer.precision import Policy, as_policy
from retrax.trainer.reduce import Reduce
from retrax.trainer.step import aux_of

__all__ = ["EvalBatch", "Evaluator"]

_READ_EVERY = 100  # Batches whose sums may wait on the device, so that it need not.


class EvalBatch(NamedTuple):
    """What one batch of an evaluation gives.

    Attributes:
      metrics: name -> (mean, weight), over all devices.
      summaries: 'forward/{name}' -> value, of `Summary` layers in the model.
      per_example: 'per_example/{name}' -> (batch, ...), of `PerExample` layers.
    """

    metrics: dict[str, tuple[Any, Any]]
    summaries: dict[str, Any]
    per_example: dict[str, Any]


class Evaluator:
    """Evaluates a model by metric layers.

    A metric takes its inputs from the data stack that the model leaves: its outputs,
    then the rest of the batch (targets, weights).
    """

    def __init__(
        self,
        model: Layer,
        metrics: Mapping[str, Layer],
        devices: Devices | None = None,
        precision: str | Policy | None = None,
    ) -> None:
        """Makes an evaluator.

        Args:
          model: layer in mode 'eval'; its weights are given at each evaluation.
          metrics: name -> metric layer without weights.
          devices: where to run; one device by default.
          precision: dtypes that the model computes in; see `Policy`.

        Raises:
          TypeError: a metric is no layer.
        """
        for name, metric in metrics.items():
            if not isinstance(metric, Layer):
                hint = (
                    f" Make an instance: {metric.__name__}()."
                    if isinstance(metric, type) or callable(metric)
                    else ""
                )
                raise TypeError(
                    f"metric {name!r} must be a layer, got {metric!r}.{hint}"
                )
        self._model = model
        self._metrics = dict(metrics)
        self._devices = devices or Devices(1)
        self._policy = as_policy(precision)
        self._compiled: dict[tuple[bool, bool], Any] = {}
        self._maskable: bool | None = None

    @property
    def names(self) -> list[str]:
        """Names of the metrics."""
        return list(self._metrics)

    def evaluate(
        self,
        batches: Iterable[tuple[Any, ...]],
        weights: Any,
        state: Any,
        rng: Any = None,
        n_batches: int | None = None,
    ) -> dict[str, float]:
        """Computes each metric over the batches.

        Args:
          batches: tuples of arrays; each is read once.
          weights: weights of the model.
          state: state of the model.
          rng: key for layers that draw random numbers even in evaluation.
          n_batches: at most so many; None takes all.

        Returns:
          name -> mean, weighted by what each metric says its batch weighs; 0 where
          nothing weighs anything.

        Raises:
          DataError: there is no batch at all, or all were asked for of a stream that
            never ends.
        """
        if n_batches is None and getattr(batches, "is_endless", False):
            raise DataError(
                "the evaluation stream never ends: say how many batches to take "
                "(train.eval_steps), or make it a finite pass, such as "
                "ArrayStream(..., shuffle=False, repeat=False)."
            )
        rng = jax.random.key(0) if rng is None else rng
        totals = {name: np.zeros(2) for name in self._metrics}
        sums, n = [], 0
        for batch in itertools.islice(batches, n_batches):
            sums.append(self._batch_sums(batch, weights, state, rng, n))
            n += 1
            if len(sums) == _READ_EVERY:
                _add(totals, sums)
                sums = []
        if not n:
            raise DataError("evaluation got no batch: is the evaluation set empty?")
        _add(totals, sums)
        return {name: float(_mean(pair)) for name, pair in totals.items()}

    def batch(
        self, batch: tuple[Any, ...], weights: Any, state: Any, rng: Any = None
    ) -> EvalBatch:
        """Evaluates one batch, and returns also what its layers hand out.

        Args:
          batch: tuple of arrays.
          weights: weights of the model.
          state: state of the model; it is not changed.
          rng: key for layers that draw random numbers even in evaluation.
        """
        rng = jax.random.key(0) if rng is None else rng
        sums, given = self._batch_sums(batch, weights, state, rng, 0, whole=True)
        metrics = {n: (_mean(pair), pair[1]) for n, pair in sums.items()}
        devices = self._devices
        given = cut_rows(given, batch[0].shape[0], devices.n_cuts, devices.shard[1])
        kinds = [
            {n: x for n, x in given.items() if n.startswith(prefix)}
            for prefix in (SUMMARY_PREFIX, PER_EXAMPLE_PREFIX)
        ]
        return EvalBatch(metrics, *kinds)

    def _batch_sums(
        self,
        batch: tuple[Any, ...],
        weights: Any,
        state: Any,
        rng: Any,
        i: int,
        whole: bool = False,
    ) -> Any:
        split, mask = True, None
        if not divides(batch[0].shape[0], self._devices.n_cuts):
            if self._maskable is None:
                self._maskable = self._can_mask(batch, weights, state)
            split = self._maskable
        if split:
            batch, mask = pad_rows(batch, self._devices.n_cuts, self._devices.shard)
        if (split, whole) not in self._compiled:
            # Devices that all take the whole batch have nothing to join.
            axis = self._devices.axis if split else None
            self._compiled[split, whole] = self._devices.compile(
                functools.partial(self._step, axis, whole), donate=False, split=split
            )
        shared = (weights, state, rng, np.int32(i))
        return self._compiled[split, whole]((), shared, (tuple(batch), mask))[1]

    def _step(
        self, axis: str | None, whole: bool, carry: Any, shared: Any, xs: Any
    ) -> tuple[Any, Any]:
        weights, state, rng, i = shared
        batch, mask = xs
        rng = jax.random.fold_in(rng, i)
        if axis is not None:
            rng = jax.random.fold_in(rng, jax.lax.axis_index(axis))
        with batch_context(axis, mask):
            pairs, emitted = self._values(batch, weights, state, rng)
        sums = {}
        for name, (value, weight) in pairs.items():
            weight = jnp.float32(batch[0].shape[0] if weight is None else weight)
            pair = jnp.stack([value.astype(jnp.float32) * weight, weight])
            sums[name] = pair if axis is None else jax.lax.psum(pair, axis)
        if not whole:
            return carry, sums
        reduce, aux = Reduce(axis), aux_of((), emitted)
        given = {n: reduce.summary(x) for n, x in aux.summaries.items()}
        given |= {n: reduce.joined(x) for n, x in aux.per_example.items()}
        return carry, (sums, given)

    def _values(
        self, batch: Any, weights: Any, state: Any, rng: Any
    ) -> tuple[dict[str, tuple[Any, Any]], list[tuple[str, Any]]]:
        """Returns name -> (value, weight or None), and what the model emitted."""
        inputs = inputs_from_stack(tuple(batch), self._model.n_in)
        outputs, _, handed_out = self._policy.run_model(
            self._model, inputs, weights, state, rng
        )
        stack = outputs_onto_stack(outputs, tuple(batch), self._model.n_in)
        values = {}
        for name, metric in self._metrics.items():
            n_have = len(stack) if isinstance(stack, tuple) else 1
            if n_have < metric.n_in:
                raise DataError(
                    f"metric {name!r} ({metric!r}) takes {metric.n_in} inputs but the "
                    f"model's outputs and the rest of the batch are {n_have}: does the "
                    "batch lack example weights (data.AddLossWeights)?"
                )
            x = inputs_from_stack(stack, metric.n_in)
            metric_weights, metric_state = _init_metric(metric, x)
            value, _, emitted = metric.apply(x, metric_weights, metric_state, rng)
            found = [v for what, v in emitted if what == "weight"]
            values[name] = (value, found[-1] if found else None)
        return values, handed_out

    def _can_mask(self, batch: Any, weights: Any, state: Any) -> bool:
        """Whether every metric says what a batch weighs when rows are masked."""
        all_weigh: list[bool] = []

        def probe(weights: Any, state: Any, rng: Any, mask: Any, batch: Any) -> Any:
            with batch_context(None, mask):
                values, _ = self._values(batch, weights, state, rng)
            all_weigh.append(all(w is not None for _, w in values.values()))
            return {name: v for name, (v, _) in values.items()}

        mask = np.ones(batch[0].shape[0], np.float32)
        jax.eval_shape(probe, weights, state, jax.random.key(0), mask, tuple(batch))
        return all_weigh[0]


def _mean(pair: Any) -> Any:
    total, weight = pair
    return total / weight if weight else 0.0 * weight


def _add(totals: dict[str, Any], sums: list[Any]) -> None:
    for batch_sums in jax.device_get(sums):
        for name, pair in batch_sums.items():
            totals[name] += np.asarray(pair, np.float64)


def _init_metric(metric: Layer, x: Any) -> tuple[Any, Any]:
    """Metrics hold no weights, but their trees have the shape of their sublayers."""
    if not metric.sublayers:
        return (), ()
    return metric.init(signature(x), rng=jax.random.key(0))
