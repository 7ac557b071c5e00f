"""`Lender`: holds the values of layers while they are trained, and lends them back.

Under the step trainers. A layer that is trained keeps no values of its own: it asks its
lender when somebody reads them, and tells it when somebody sets them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp

from retrax.errors import ConfigError, DataError
from retrax.layers import tree as layer_tree
from retrax.layers.base import Layer

__all__ = ["Lender"]


class Lender:
    """Base of what trains a model: `StepTrainer`, `ReversibleSerialTrainer`.

    Subclasses write `_copy_of`, call `_take` when `_reload_needed`, and `_let_go` when
    they hold what it returned.
    """

    def __init__(self, model_with_loss: Layer) -> None:
        """Takes over all layers of an initialised model."""
        self._model = model_with_loss
        self._layers = list(_all_layers(model_with_loss, set()))
        self._layers_current = True  # The layers hold what we hold.
        self._reload_needed = True  # What we hold must be made anew from the layers.
        self._attach()

    @property
    def model_with_loss(self) -> Layer:
        """The layer being trained."""
        return self._model

    @property
    def weights(self) -> Any:
        """A copy of the current weights."""
        return self._copy_of("weights")

    @weights.setter
    def weights(self, value: Any) -> None:
        self._model.weights = value

    @property
    def state(self) -> Any:
        """A copy of the current model state."""
        return self._copy_of("state")

    @state.setter
    def state(self, value: Any) -> None:
        self._model.state = value

    def pull(self, about_to_change: bool = False) -> None:
        """Brings the layers up to date; called by layers that are read or set."""
        if not self._layers_current:
            self._layers_current = True
            for what in ("weights", "state"):
                self._model._store(what, self._copy_of(what))
        if about_to_change:
            self._reload_needed = True

    def _copy_of(self, what: str) -> Any:
        """Returns a copy of the current 'weights' or 'state' that others may keep."""
        raise NotImplementedError

    def _attach(self) -> None:
        others = {id(x._owner): x._owner for x in self._layers if x._owner is not None}
        for owner in others.values():
            owner.pull(about_to_change=True)
        for layer in self._layers:
            layer._owner = self

    def _take(self) -> tuple[Any, Any]:
        """Returns (weights, state) that the layers hold, checked.

        Raises:
          ConfigError: there are none yet, or a weight is no float.
        """
        if any(layer._owner is not self for layer in self._layers):
            self._attach()
        weights = self._model._stored("weights", set())
        state = self._model._stored("state", set())
        if self._model.has_weights and not jax.tree.leaves((weights, state)):
            raise ConfigError(
                f"the model {self._model.name} has no weights yet: call "
                "model_with_loss.init(signature(batch), rng) first."
            )
        for path, leaf in layer_tree.named_leaves(self._model, weights):
            if not jnp.issubdtype(jnp.result_type(leaf), jnp.floating):
                raise ConfigError(
                    f"weight {path} has dtype {jnp.result_type(leaf)}: only float "
                    "weights can be trained; keep other values in the layer's state."
                )
        return weights, state

    def _let_go(self) -> None:
        """Takes the values from the layers, so that there is no second copy."""
        for layer in self._layers:
            layer._weights = layer._state = None
        self._layers_current, self._reload_needed = False, False

    def _check_batch(self, batch: Any) -> None:
        """Raises DataError unless the batch has as many parts as the model takes."""
        if not isinstance(batch, (tuple, list)):
            raise DataError(
                f"a batch must be a tuple of arrays, got {type(batch).__name__}."
            )
        n_in = self._model.n_in
        if len(batch) != n_in:
            last = self._model.sublayers[-1] if self._model.sublayers else self._model
            hint = (
                " Add example weights to the batches (data.AddLossWeights) or choose a "
                "loss without weights."
                if len(batch) == n_in - 1
                else ""
            )
            raise DataError(
                f"the batch has {len(batch)} parts but the model with its loss "
                f"{last!r} takes {n_in}.{hint}"
            )


def _all_layers(layer: Layer, seen: set[int]) -> Iterator[Layer]:
    if id(layer) in seen:
        return
    seen.add(id(layer))
    yield layer
    for child in layer.sublayers:
        yield from _all_layers(child, seen)
