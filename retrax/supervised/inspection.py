"""Callbacks that look into training and change nothing: noise, updates, time.

Found in `callbacks`. Each looks every so many steps, and waits for the device then.
"""

from __future__ import annotations

import os
from typing import Any

import gin
import jax
import jax.numpy as jnp

from retrax import trees
from retrax.errors import ConfigError
from retrax.layers import tree as layer_tree
from retrax.trainer.arguments import check_count
from retrax.trainer.callback import Callback
from retrax.trainer.devices import Devices
from retrax.trainer.reduce import Reduce
from retrax.trainer.step import from_loss, step_rngs

__all__ = ["GradientNoise", "Profile", "UpdateRatio"]


@gin.configurable(module="retrax.supervised.callbacks")
class UpdateRatio(Callback):
    """Logs how far a step moves each weight: |new - old| / |old|.

    Tags are 'training/update_ratio/<path>', and 'training/update_ratio' for all. Ratios
    near 1e-3 are usual; far larger ones point to a learning rate that is too high.
    """

    def __init__(self, every: int = 100) -> None:
        """Makes the callback.

        Args:
          every: steps between two looks.
        """
        self._every = check_count("UpdateRatio: every", every, least=1)
        self._old: Any = None
        self._compiled: Any = None

    def on_step_begin(self, step: int) -> None:
        if step % self._every == 0:
            devices = self.run.step_trainer.devices
            self._old = devices.put(self.run.step_trainer.carry.weights[0])

    def on_step_end(self, step: int) -> None:
        if self._old is None:
            return
        trainer, old = self.run.step_trainer, self._old
        self._old = None
        if self._compiled is None:
            self._compiled = trainer.devices.compile(_norms, donate=False, split=False)
        pairs = (old, trainer.carry.weights[0])
        moved, size = jax.device_get(self._compiled((), pairs, ())[1])
        named = [path for path, _ in layer_tree.named_leaves(self.run.model, old)]
        ratios = {
            f"training/update_ratio/{path}": _ratio(a, b)
            for path, a, b in zip(named, moved, size, strict=True)
        }
        ratios["training/update_ratio"] = _ratio(sum(moved), sum(size))
        self.run.log.scalars("train", step, ratios)


def _norms(carry: Any, shared: Any, batch: Any) -> tuple[Any, Any]:
    """Squared norms of the difference and of the old value, for each weight."""
    old, new = (jax.tree.leaves(tree) for tree in shared)

    def square(x: Any) -> Any:
        return jnp.sum(jnp.square(x.astype(jnp.float32)))

    moved = [square(b - a) for a, b in zip(old, new, strict=True)]
    return carry, (moved, [square(a) for a in old])


def _ratio(moved: Any, size: Any) -> float:
    return float((moved / size) ** 0.5) if size else 0.0


@gin.configurable(module="retrax.supervised.callbacks")
class GradientNoise(Callback):
    """Logs the noise scale of gradients, in examples, as 'training/noise_scale'.

    It is tr(S) / |G|^2 with S the covariance of the gradient of one example and G the
    true gradient: batches far below it are noisy, batches far above it waste examples.
    Both are estimated from the two halves of a batch, and averaged over looks. Source:
    McCandlish et al. 2018, https://arxiv.org/abs/1812.06162, appendix A.1.
    """

    def __init__(self, every: int = 100, decay: float = 0.9) -> None:
        """Makes the callback.

        Args:
          every: steps between two looks; each costs two gradients of half a batch.
          decay: share of the old averages that stays, per look.
        """
        self._every = check_count("GradientNoise: every", every, least=1)
        if not 0 <= decay < 1:
            raise ConfigError(f"GradientNoise: decay must be in [0, 1), got {decay!r}.")
        self._decay = decay
        self._means: tuple[float, float, float] = (0.0, 0.0, 0.0)
        self._compiled: dict[int, Any] = {}

    def on_step_begin(self, step: int) -> None:
        batch = self.run.batch
        half = batch[0].shape[0] // 2
        if step % self._every or half == 0:
            return
        trainer = self.run.step_trainer
        fn = self._compiled.get(id(trainer))
        if fn is None:
            fn = self._compiled[id(trainer)] = _halves_fn(trainer)
        halves = [tuple(x[i * half : (i + 1) * half] for x in batch) for i in (0, 1)]
        shared = (trainer.weights, trainer.state, self.run.rng, step)
        small, big = map(float, jax.device_get(fn((), shared, tuple(halves))[1]))
        # |mean gradient of n examples|^2 is |G|^2 + tr(S) / n, for n and for 2 n.
        self._add(2 * big - small, 2 * half * (small - big))

    def _add(self, signal: float, noise: float) -> None:
        keep, new = self._decay, 1 - self._decay
        old_signal, old_noise, total = self._means
        self._means = (
            keep * old_signal + new * signal,
            keep * old_noise + new * noise,
            keep * total + new,
        )
        signal, noise, total = self._means
        values = {
            "training/noise_scale": noise / signal if signal > 0 else float("inf"),
            "training/gradient_signal": signal / total,
            "training/gradient_noise": noise / total,
        }
        self.run.log.scalars("train", self.run.step + 1, values)

    def state(self) -> dict[str, Any]:
        return {"means": self._means}

    def restore(self, state: dict[str, Any]) -> None:
        self._means = state["means"]


def _halves_fn(trainer: Any) -> Any:
    """Compiles (mean squared norm of both gradients, that of their mean)."""
    grad_fn = from_loss(trainer.loss, Reduce())
    model = trainer.model_with_loss

    def fn(carry: Any, shared: Any, halves: Any) -> tuple[Any, Any]:
        weights, state, rng, step = shared
        rng, _ = step_rngs(rng, step)
        mask = layer_tree.trainable_list(model, weights)
        a, b = (
            jax.tree.leaves(
                trees.partition(grad_fn(weights, state, rng, half)[0], mask)[0]
            )
            for half in halves
        )

        def norm(leaves: Any) -> Any:
            return sum(jnp.sum(jnp.square(x.astype(jnp.float32))) for x in leaves)

        mean = [(x + y) / 2 for x, y in zip(a, b, strict=True)]
        return carry, ((norm(a) + norm(b)) / 2, norm(mean))

    return Devices(1).compile(fn, donate=False)


@gin.configurable(module="retrax.supervised.callbacks")
class Profile(Callback):
    """Writes a trace of some steps, for TensorBoard's profiler or Perfetto."""

    def __init__(
        self,
        first: int = 10,
        last: int = 12,
        folder: str | os.PathLike[str] | None = None,
    ) -> None:
        """Makes the callback.

        Args:
          first: first step of the trace; step 1 compiles.
          last: last step of it.
          folder: where to; by default output_dir/profile.
        """
        self._first = check_count("Profile: first", first, least=1)
        self._last = check_count("Profile: last", last, least=self._first)
        self._folder, self._is_open = folder, False

    def attach(self, run: Any) -> None:
        super().attach(run)
        if self._folder is None and run.output_dir is None:
            raise ConfigError("Profile: give a folder, since there is no output_dir.")

    def on_step_begin(self, step: int) -> None:
        if step == self._first and self.run.writes:
            folder = self._folder or self.run.output_dir / "profile"
            jax.block_until_ready(self.run.step_trainer.carry)
            jax.profiler.start_trace(os.fspath(folder))
            self._is_open = True

    def on_step_end(self, step: int) -> None:
        if step >= self._last:
            self._end()

    def on_run_end(self) -> None:
        self._end()

    def _end(self) -> None:
        if self._is_open:
            self._is_open = False
            jax.block_until_ready(self.run.step_trainer.carry)
            jax.profiler.stop_trace()
