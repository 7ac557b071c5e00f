"""Callbacks that act on weights: frozen at first, or averaged beside training.

Found in `callbacks`.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import gin
import jax
import jax.numpy as jnp

from retrax import trees
from retrax.errors import CheckpointError, ConfigError
from retrax.layers import tree as layer_tree
from retrax.layers.base import Layer
from retrax.layers.files import load_tree
from retrax.trainer.arguments import check_count
from retrax.trainer.callback import Callback
from retrax.trainer.checkpointer import Checkpointer
from retrax.trainer.state import CHECKPOINT_NAME, initial_trees, unpack_signature
from retrax.trainer.thaw import change_trainable

__all__ = ["FreezeUntil", "ModelEMA", "load_ema"]


@gin.configurable(module="retrax.supervised.callbacks")
class FreezeUntil(Callback):
    """Leaves layers untrained at first, and trains them from a step on.

    Until then they are as with `tl.Freeze`: no gradient, no decay, no slot, bits
    unchanged. Then their slots begin at zero while the optimizer's count of steps goes
    on, and the step is compiled anew.
    """

    def __init__(
        self, layers: str | Sequence[str] | Callable[[str], bool], step: int
    ) -> None:
        """Makes the callback.

        Args:
          layers: beginnings of paths in the model, such as '0.Serial/1.Dense', or a
            function of the path of a layer.
          step: first step that trains them.
        """
        self._layers = layers
        self._until = check_count("FreezeUntil: step", step, least=2)
        self._is_frozen = False

    def attach(self, run: Any) -> None:
        super().attach(run)
        for trainer in run.owner.step_trainers:
            if not hasattr(trainer, "reset_optimizer"):
                raise ConfigError(
                    f"FreezeUntil does not work with a {type(trainer).__name__}."
                )
        self._chosen = self._choose(run.model)

    def _choose(self, model: Layer) -> list[Layer]:
        weights = model.weights
        by_path = {
            prefix.rstrip("/"): layer
            for prefix, layer, own, trainable in layer_tree.walk(model, weights)
            if trainable and jax.tree.leaves(own)
        }
        if callable(self._layers):
            chosen = [layer for path, layer in by_path.items() if self._layers(path)]
            if not chosen:
                raise ConfigError(
                    "FreezeUntil: the function chooses none of the layers with weights "
                    f"that are trained: {', '.join(by_path)}."
                )
            return chosen
        chosen = []
        for start in [self._layers] if isinstance(self._layers, str) else self._layers:
            found = [
                layer
                for path, layer in by_path.items()
                if path == start or path.startswith(start + "/")
            ]
            if not found:
                near = difflib.get_close_matches(start, by_path, n=3, cutoff=0.3)
                raise ConfigError(
                    f"FreezeUntil: there is no layer {start!r} with weights that are "
                    f"trained; did you mean {', '.join(near or by_path)}?"
                )
            chosen += found
        return chosen

    def before_restore(self, step: int) -> None:
        self._set_frozen(step + 1 < self._until)

    def on_step_begin(self, step: int) -> None:
        if self._is_frozen and step >= self._until:
            self._set_frozen(False)
            names = ", ".join(layer.name for layer in self._chosen)
            self.run.say(f"FreezeUntil: {names} trained from step {step} on.")

    def _set_frozen(self, frozen: bool) -> None:
        if frozen == self._is_frozen:
            return
        self._is_frozen = frozen

        def change() -> None:
            for layer in self._chosen:
                layer.trainable = not frozen

        change_trainable(self.run.owner.step_trainers, change)


@gin.configurable(module="retrax.supervised.callbacks")
class ModelEMA(Callback):
    """Keeps a moving average of the model's weights; evaluates and saves it.

    After each step a' = d a + (1 - d) w, with d = min(decay, (1 + n) / (10 + n)) at the
    n-th average, so that the first weights are soon forgotten (as in TensorFlow's
    ExponentialMovingAverage). Each evaluation measures the average, too, with the
    model's state, as `metrics/ema_<metric>`. `load_ema` reads it from a checkpoint.
    """

    def __init__(self, decay: float = 0.999, evaluate: bool = True) -> None:
        """Makes the callback.

        Args:
          decay: share of the old average that stays, per step.
          evaluate: whether evaluations measure the average.
        """
        if not 0 < decay < 1:
            raise ConfigError(f"ModelEMA: decay must be in (0, 1), got {decay!r}.")
        self._decay, self._evaluate = decay, evaluate
        self._n, self._average, self._compiled = 0, None, None

    @property
    def weights(self) -> Any:
        """A copy of the average; the model's weights before the first step."""
        if self._average is None:
            return self.run.step_trainer.weights[0]
        return self.run.step_trainer.devices.fetch(self._average)

    def added_metrics(self, names: Sequence[str]) -> list[str]:
        return [f"ema_{name}" for name in names] if self._evaluate else []

    def on_step_end(self, step: int) -> None:
        del step
        trainer = self.run.step_trainer
        weights = trainer.carry.weights[0]
        if self._average is None:
            self._average = trainer.devices.put(weights)
            self._n = 1
            return
        if self._compiled is None:
            self._compiled = trainer.devices.compile(_averaged, split=False)
        decay = min(self._decay, (1 + self._n) / (10 + self._n))
        shared = (jnp.float32(decay), weights)
        self._average, _ = self._compiled(self._average, shared, ())
        self._n += 1

    def on_eval_end(self, step: int) -> None:
        del step
        if self._evaluate and self._average is not None:
            state = self.run.step_trainer.carry.state[0]
            values = self.run.measure(self._average, state)
            self.run.record({f"metrics/ema_{k}": v for k, v in values.items()})

    def state(self) -> dict[str, Any]:
        if self._average is None:
            return {}
        named = layer_tree.named_leaves(self.run.model, self._average)
        return {"n": self._n, "weights": trees.to_numpy(dict(named))}

    def restore(self, state: dict[str, Any]) -> None:
        if not state:
            self._n, self._average = 0, None
            return
        trainer = self.run.step_trainer
        like = trainer.carry.weights[0]
        average = load_tree(self.run.model, like, state["weights"], strict=True)
        self._n, self._average = state["n"], trainer.devices.put(average)


def _averaged(average: Any, shared: Any, batch: Any) -> tuple[Any, Any]:
    del batch
    decay, weights = shared

    def one(a: Any, w: Any) -> Any:
        mixed = decay * a.astype(jnp.float32) + (1 - decay) * w.astype(jnp.float32)
        return mixed.astype(a.dtype)

    return jax.tree.map(one, average, weights), ()


def load_ema(
    output_dir: str | os.PathLike[str],
    model: Layer,
    weights_file: str | os.PathLike[str] | None = None,
) -> Any:
    """Returns the weights that `ModelEMA` has averaged in a run.

    Args:
      output_dir: the run's directory.
      model: the model that was trained, in any mode; it is not changed.
      weights_file: a checkpoint other than the newest.

    Raises:
      FileNotFoundError: there is no checkpoint.
      CheckpointError: it is damaged, of another model, or of a run without ModelEMA.
    """
    path = Path(weights_file or Path(output_dir) / CHECKPOINT_NAME)
    payload, used = Checkpointer(None).load(path) or ({}, path)
    saved = payload.get("callbacks", {}).get("ModelEMA", {}).get("weights")
    if saved is None:
        raise CheckpointError(f"{used} holds no averaged weights of ModelEMA.")
    signature = unpack_signature(payload["input_signature"])
    weights, _ = initial_trees(model, signature)
    return load_tree(model, weights, saved, strict=True)
