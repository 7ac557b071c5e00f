"""Layers of models that think in latent vectors: what goes in, and what is read off.

Above `base`. A latent thought is a vector that takes the place of the embedding of a
placeholder (Hao et al. 2024, https://arxiv.org/abs/2412.06769).
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from retrax.layers.base import Fn, Layer

__all__ = ["InjectLatents", "LatentNoise", "TakePositions"]


def InjectLatents() -> Layer:
    """Makes a layer that puts latent vectors in the place of embeddings.

    Takes (x, latents, positions, active), gives y. x, y: (batch, length, d) float;
    latents: (batch, K, d) float, or (batch, K, 1) for vectors of one number; positions:
    (batch, K) int; active: (batch, K) bool or 0/1, whether the vector is put there.
    Positions outside of the sequence, and slots that are not active, change nothing. Of
    two slots with one position the last one counts.

    Example:
      >>> x, latents = jnp.zeros((1, 3, 2)), jnp.ones((1, 1, 2))
      >>> InjectLatents()((x, latents, jnp.array([[1]]), jnp.array([[True]]))).tolist()
      [[[0.0, 0.0], [1.0, 1.0], [0.0, 0.0]]]
    """

    def inject(x: Any, latents: Any, positions: Any, active: Any) -> Any:
        n_latents = positions.shape[1]
        width = tuple(latents.shape[2:])
        if tuple(latents.shape[:2]) != tuple(positions.shape) or width not in (
            x.shape[2:],
            (1,),
        ):
            raise ValueError(
                f"latents must have shape {(*positions.shape, x.shape[2])}, as there "
                f"are positions of shape {tuple(positions.shape)} and embeddings of "
                f"shape {tuple(x.shape)}; got {tuple(latents.shape)}."
            )
        # A few selects, not a scatter: positions differ by row.
        at = jnp.arange(x.shape[1])[None]
        for k in range(n_latents):
            here = (at == positions[:, k, None]) & (active[:, k, None] != 0)
            x = jnp.where(here[..., None], latents[:, k, None].astype(x.dtype), x)
        return x

    return Fn("InjectLatents", inject)


def TakePositions() -> Layer:
    """Makes a layer that takes the vectors at some positions of each row.

    Takes (x, positions), gives y. x: (batch, length, d); positions: (batch, K) int,
    those outside of the sequence give its first or last vector; y: (batch, K, d).

    Example:
      >>> x = jnp.arange(6.0).reshape(1, 3, 2)
      >>> TakePositions()((x, jnp.array([[2, 0]]))).tolist()
      [[[4.0, 5.0], [0.0, 1.0]]]
    """

    def take(x: Any, positions: Any) -> Any:
        return jnp.take_along_axis(x, positions[:, :, None], axis=1, mode="clip")

    return Fn("TakePositions", take)


class LatentNoise(Layer):
    """Makes the mean and spread of random thoughts, by maps of each slot's own.

    x: (batch, K, d) float. Gives (mu, log_sigma), both (batch, K, d): mu_j = z_j + z_j
    A_j + a_j and log_sigma_j = z_j B_j + c_j. A, a and B start at 0 and c at -3, so
    that thoughts are at first the vectors themselves with a deviation of 0.05.

    Example:
      >>> layer, x = LatentNoise(2, 3), jnp.ones((1, 2, 3))
      >>> _ = layer.init(x)
      >>> mu, log_sigma = layer(x)
      >>> mu[0, 0].tolist(), float(log_sigma[0, 1, 2])
      ([1.0, 1.0, 1.0], -3.0)
    """

    def __init__(self, n_latents: int, d_feature: int, name: str | None = None) -> None:
        """Makes the layer.

        Args:
          n_latents: K, number of slots.
          d_feature: d, size of a vector.
          name: name of the layer.
        """
        super().__init__(n_out=2, name=name)
        self._n_latents, self._d_feature = n_latents, d_feature

    @property
    def d_feature(self) -> int:
        """Size of a vector."""
        return self._d_feature

    def init_weights_and_state(self, input_signature: Any) -> None:
        """Makes (A, a, B, c)."""
        del input_signature
        k, d = self._n_latents, self._d_feature
        matrix, vector = jnp.zeros((k, d, d)), jnp.zeros((k, d))
        self.weights = (matrix, vector, matrix.copy(), vector - 3.0)

    def forward(self, x: Any) -> Any:
        """Computes (mu, log_sigma).

        Raises:
          ValueError: the shape is not (batch, K, d).
        """
        wanted = (self._n_latents, self._d_feature)
        if tuple(x.shape[1:]) != wanted:
            raise ValueError(
                f"{self.name} takes vectors of shape (batch, {wanted[0]}, {wanted[1]})"
                f", got {tuple(x.shape)}."
            )
        to_mu, mu_0, to_log_sigma, log_sigma_0 = self.weights

        def mapped(w: Any) -> Any:
            return jnp.einsum("bkd,kde->bke", x, w)

        return x + mapped(to_mu) + mu_0, mapped(to_log_sigma) + log_sigma_0
