"""Latent thoughts as layers, for Trainer and Loop: `LatentThoughts` and its loss.

Above `latent_run` and `latent_losses`, under `curriculum`. A model (ids, latents,
positions, active) -> (logits, hidden, candidates) becomes one that takes batches of
`data.SudokuDataset`, and `Serial(LatentThoughts(model), LatentThoughtLoss())` is a
model with its loss as any other.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from types import MappingProxyType
from typing import Any

import gin
import jax
import jax.numpy as jnp

from retrax.errors import ConfigError, LayerError
from retrax.layers.base import Layer
from retrax.layers.running import data_axis, emit, row_mask
from retrax.shapes import ShapeDtype
from retrax.supervised.latent import Latents, build_latents
from retrax.supervised.latent_config import LatentConfig
from retrax.supervised.latent_losses import joined, loss_sums
from retrax.supervised.latent_run import think_and_answer

__all__ = ["LatentThoughtLoss", "LatentThoughts", "latent_model", "thinking"]

REDUCTIONS = ("weight", "mean")

_SETTINGS: ContextVar[Mapping[str, Any]] = ContextVar(
    "retrax_thinking", default=MappingProxyType({})
)


@contextlib.contextmanager
def thinking(**settings: Any) -> Iterator[None]:
    """Changes settings of `LatentConfig` for the layers that run in this block.

    They are read while tracing, so what is compiled inside keeps them.

    Example:
      >>> layer = LatentThoughtLoss()
      >>> with thinking(num_passes=2):
      ...     layer.config.num_passes
      2
    """
    token = _SETTINGS.set({**_SETTINGS.get(), **settings})
    try:
        yield
    finally:
        _SETTINGS.reset(token)


class LatentThoughts(Layer):
    """Runs a model that thinks: builds latent vectors, then reads out.

    Takes a batch (tokens (batch, length + 1) int, solution, start_index (batch, 1) int,
    level (batch, 1) int, candidates (batch, K, C) int). Gives (logits (draws, batch,
    length, vocab), cand_logits (draws, batch, K, C, n), sigma (), tokens, start_index,
    level, candidates); there is one draw without noise. The model runs once for each
    pass and once more, each time with the same weights and, without noise, with the
    same key; or once in all, see `LatentConfig.shared_prefix`.
    """

    def __init__(
        self,
        model: Layer,
        config: LatentConfig | None = None,
        name: str | None = None,
        cached: Layer | None = None,
    ) -> None:
        """Makes the layer.

        Args:
          model: takes (ids, latents, positions, active), gives (logits, hidden,
            cand_logits); or, with a noise head, `Parallel` of that and of the head, as
            `LatentTransformerLM` makes it.
          config: settings; `LatentConfig()` by default.
          name: name of the layer.
          cached: the same model of mode 'predict'; needed with `shared_prefix`.

        Raises:
          ConfigError: there is `shared_prefix`, but no model of mode 'predict'.
          TypeError: the model takes or gives something else.
        """
        super().__init__(n_in=5, n_out=7, name=name)
        arity = _arity(model)
        self._sublayers = [model]
        self._has_noise_head = arity == (5, 5)
        self._config = config or LatentConfig()
        self._cached = None
        if self._config.shared_prefix is not None:
            if cached is None or _arity(cached) != arity:
                raise ConfigError(
                    f"shared_prefix={self._config.shared_prefix} needs the model in "
                    "mode 'predict', too: LatentThoughts(model, config, cached=...), "
                    f"which `latent_model` gives; got cached={cached!r}."
                )
            self._cached = cached.sublayers[0] if self._has_noise_head else cached

    @property
    def config(self) -> LatentConfig:
        """The settings, as `thinking` has changed them."""
        return dataclasses.replace(self._config, **_SETTINGS.get())

    @property
    def base_config(self) -> LatentConfig:
        """The settings as they were given."""
        return self._config

    @property
    def model(self) -> Layer:
        """The model."""
        return self.sublayers[0]

    @property
    def has_noise_head(self) -> bool:
        """Whether the model is one with a noise head."""
        return self._has_noise_head

    def init_weights_and_state(self, input_signature: Any) -> None:
        """Initialises the model."""
        tokens, _, _, _, candidates = input_signature
        n_rows, n_latents = candidates.shape[:2]
        sig = [
            ShapeDtype((n_rows, tokens.shape[1] - 1), tokens.dtype),
            ShapeDtype((n_rows, n_latents, 1)),  # The model knows how wide they are.
            ShapeDtype((n_rows, n_latents), "int32"),
            ShapeDtype((n_rows, n_latents), "bool"),
        ]
        if self._has_noise_head:
            head: Any = self.model.sublayers[1]
            sig.append(ShapeDtype((n_rows, n_latents, head.d_feature)))
        weights, state = self.model.init(tuple(sig), use_cache=True)
        if self._cached is not None:
            self._check_is_fixed(weights, state, tuple(sig))
        self.weights, self.state = (weights,), (state,)

    def forward(self, inputs: Any) -> Any:
        """Thinks, then answers."""
        config, rng = self.config, self.rng
        answer = functools.partial(self.answer, self.weights, self.state, inputs)
        if config.noise:
            if rng is None:
                raise ValueError(
                    "random thoughts (noise=True) need a random key, got rng=None; "
                    "pass rng=jax.random.key(seed), or set noise=False."
                )
            draws = jax.random.split(jax.random.fold_in(rng, 1), config.n_draws)
            latents, logits, cand = jax.vmap(
                lambda key: answer(*jax.random.split(key))
            )(draws)
            sigma = jnp.mean(latents.sigma)
        else:
            latents, logits, cand = answer(rng, rng)
            logits, cand, sigma = logits[None], cand[None], latents.sigma
        tokens, _, *rest = inputs
        return logits, cand, sigma, tokens, *rest

    def answer(
        self,
        weights: Any,
        state: Any,
        batch: Any,
        build_key: Any = None,
        read_key: Any = None,
        takes_mean: bool = False,
    ) -> tuple[Latents, Any, Any]:
        """Thinks and answers once, as a pure function.

        Args:
          weights: weights of this layer.
          state: its state.
          batch: as the layer takes it.
          build_key: random key of the thoughts, or None.
          read_key: random key of the last run, or None.
          takes_mean: without noise, thoughts go through the mean of the noise head.

        Returns:
          (thoughts, logits: (batch, length, vocab), cand_logits: (batch, K, C, n)).
        """
        tokens, _, start_index, level, candidates = batch
        config, n_latents = self.config, candidates.shape[1]
        ids = tokens[:, :-1]
        if self._cached is not None and n_latents:
            inner = weights[0][0] if self._has_noise_head else weights[0]
            return think_and_answer(
                self._cached, inner, ids, start_index, level, n_latents, config
            )
        run, head = self.parts(weights, state)
        prefix = ids[:, : config.prefix_length]
        mean = None
        if takes_mean and head is not None:
            mean = _mean_of(head)
        latents = build_latents(
            lambda *args: run(prefix, *args)[1],
            start_index,
            level,
            n_latents,
            config,
            build_key,
            head,
            map_thought=mean,
        )
        logits, _, cand = run(ids, *latents[:3], read_key)
        return latents, logits, cand

    def _check_is_fixed(self, weights: Any, state: Any, sig: Any) -> None:
        """Raises ConfigError unless mode 'predict' computes what this mode does."""
        why = "it keeps state" if jax.tree.leaves(state) else ""
        try:
            jax.eval_shape(
                lambda w, s, x: self.model.pure_fn(x, w, s, None), weights, state, sig
            )
        except ValueError as e:
            why = e.cause if isinstance(e, LayerError) else str(e)
        if why:
            raise ConfigError(
                f"shared_prefix={self._config.shared_prefix} thinks in one run of the "
                "model in mode 'predict', which draws nothing and keeps keys and "
                "values only; the model must do so, too (dropout=0), or leave "
                f"shared_prefix out. What stands against it: {why}"
            )

    def parts(
        self, weights: Any, state: Any
    ) -> tuple[Callable[..., Any], Callable[..., Any] | None]:
        """Returns the model, and its noise head if it has one, as pure functions.

        Args:
          weights: weights of this layer.
          state: its state.

        Returns:
          (run, head): run(ids, latents, positions, active, key) -> (logits, hidden,
          cand_logits), and head(thoughts: (batch, d), slot) -> (mu, log_sigma) or None.
        """
        model, weights, state = self.model, weights[0], state[0]
        head = None
        if self._has_noise_head:
            head = _head_fn(model.sublayers[1], weights[1], state[1])
            model, weights, state = model.sublayers[0], weights[0], state[0]

        def run(ids: Any, latents: Any, positions: Any, active: Any, key: Any) -> Any:
            x = (ids, latents, positions, active)
            return model.pure_fn(x, weights, state, key)[0]

        return run, head


@gin.configurable(module="retrax.supervised.latent")
class LatentThoughtLoss(Layer):
    """The loss of a model that thinks, see `loss_terms`.

    Takes what `LatentThoughts` gives; gives () float32. Emits 'ce_loss', 'aux_loss',
    'leak_loss' and 'latent_sigma' for the log, and the number of supervised tokens as
    'weight'. On several devices each term is divided by what all
    of them count, so that two devices give the numbers of one.
    """

    def __init__(
        self,
        config: LatentConfig | None = None,
        reduce: str = "weight",
        name: str | None = None,
    ) -> None:
        """Makes the loss.

        Args:
          config: settings; `LatentConfig()` by default.
          reduce: 'weight' as said; 'mean' for a step that takes the plain mean over
            devices (`step_options={'reduce': 'mean'}`), whatever each of them counts.
          name: name of the layer.
        """
        super().__init__(n_in=7, name=name)
        if reduce not in REDUCTIONS:
            raise ValueError(f"reduce must be one of {REDUCTIONS}, got {reduce!r}.")
        self._config, self._reduce = config or LatentConfig(), reduce

    @property
    def config(self) -> LatentConfig:
        """The settings, as `thinking` has changed them."""
        return dataclasses.replace(self._config, **_SETTINGS.get())

    def forward(self, inputs: Any) -> Any:
        """Computes the loss, and emits its terms."""
        logits, cand_logits, sigma, tokens, start_index, level, candidates = inputs
        config = self.config
        sums = loss_sums(
            tokens,
            start_index,
            level,
            candidates,
            logits,
            cand_logits,
            config,
            row_mask(),
        )
        axis = None if self._reduce == "mean" else data_axis()

        def over_devices(x: Any) -> Any:
            return x if axis is None else jax.lax.psum(jax.lax.stop_gradient(x), axis)

        # Reports are weighed by this device's share of all supervised tokens, so its
        # part of the whole is divided by that share first.
        count = sums.n_tokens
        scale = 1.0 if axis is None else over_devices(count) / jnp.maximum(count, 1)
        parts = joined(sums, config, over_devices)
        for name in ("ce_loss", "aux_loss", "leak_loss"):
            emit(name, (parts[name] * scale, count))
        emit("latent_sigma", (sigma, count))
        emit("weight", count)
        return parts["total"] * scale


def _arity(model: Any) -> tuple[int, int]:
    arity = (model.n_in, model.n_out) if isinstance(model, Layer) else (0, 0)
    if arity not in ((4, 3), (5, 5)):
        raise TypeError(
            "LatentThoughts needs a model of 4 inputs (ids, latents, positions, "
            "active) and 3 outputs (logits, hidden, cand_logits), such as "
            f"LatentTransformerLM(...), got {model!r}."
        )
    return arity


def _mean_of(head: Callable[[Any, int], tuple[Any, Any]]) -> Callable[..., Any]:
    return lambda z, j: head(z, j)[0]


def _head_fn(head: Layer, weights: Any, state: Any) -> Callable[..., Any]:
    """Returns a noise head as a function of (thoughts (batch, d), slot)."""

    def of_slot(z: Any, j: int) -> tuple[Any, Any]:
        # The head takes all slots at once; what the others hold is not used.
        n_latents = weights[1].shape[0]
        every = jnp.broadcast_to(z[:, None], (z.shape[0], n_latents, z.shape[1]))
        mu, log_sigma = head.pure_fn(every, weights, state, None)[0]
        return mu[:, j], log_sigma[:, j]

    return of_slot


@gin.configurable(module="retrax.supervised.latent", denylist=["mode"])
def latent_model(
    model: Callable[..., Layer] = gin.REQUIRED,  # type: ignore[assignment]
    config: LatentConfig | None = None,
    mode: str = "train",
) -> Layer:
    """Returns `LatentThoughts` of a model, for `train.model` in gin.

    Args:
      model: function of `mode` that makes the model, such as `LatentTransformerLM`.
      config: settings of thoughts.
      mode: 'train' or 'eval'; or 'predict', for decoding.
    """
    cached = None
    if config is not None and config.shared_prefix is not None:
        cached = model(mode="predict")
    return LatentThoughts(model(mode=mode), config, cached=cached)
