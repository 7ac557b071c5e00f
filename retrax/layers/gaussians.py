"""Functions of arrays from probability: densities, a mixture loss, sampling.

They stand beside the layers and know none.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

__all__ = [
    "log_gaussian_diag_pdf",
    "log_gaussian_pdf",
    "logsoftmax_sample",
    "multigaussian_loss",
]


def log_gaussian_pdf(x: Any, mu: Any, sigma: Any) -> Any:
    """Returns log N(x | mu, sigma) for a covariance matrix sigma.

    x, mu: (..., d), sigma: (..., d, d), result: (...).
    """
    difference = (x - mu)[..., None]
    _, log_det = jnp.linalg.slogdet(sigma)
    solved = jnp.linalg.solve(sigma, difference)
    distance = jnp.sum(difference * solved, axis=(-2, -1))
    return -0.5 * (mu.shape[-1] * jnp.log(2 * jnp.pi) + log_det + distance)


def log_gaussian_diag_pdf(x: Any, mu: Any, diag_sigma: Any) -> Any:
    """Returns log N(x | mu, diag(diag_sigma)); diag_sigma holds variances.

    x, mu, diag_sigma: (..., d), result: (...). Trax divides mu instead of x - mu by
    the variance, which is right for variances of 1 only.
    """
    log_det = jnp.sum(jnp.log(diag_sigma), axis=-1)
    distance = jnp.sum(jnp.square(x - mu) / diag_sigma, axis=-1)
    return -0.5 * (mu.shape[-1] * jnp.log(2 * jnp.pi) + log_det + distance)


def multigaussian_loss(preds: Any, targets: Any, ngauss: int = 1) -> Any:
    """Returns -log p(target) of each row under a mixture of diagonal Gaussians.

    preds: (batch, ngauss * (1 + 2 d)): logits of the components, then their means,
    then roots of their variances; targets: (batch, d); result: (batch,).
    (Trax's raises; what it would return is log p.)

    Raises:
      ValueError: the sizes do not fit.
    """
    d = targets.shape[-1]
    wanted = ngauss * (1 + 2 * d)
    if preds.shape[-1] != wanted:
        raise ValueError(
            f"multigaussian_loss needs {wanted} predictions for {ngauss} components in "
            f"{d} dimensions, got {preds.shape[-1]}."
        )
    log_share = jax.nn.log_softmax(preds[:, :ngauss], axis=-1)
    means = jnp.reshape(preds[:, ngauss : ngauss * (1 + d)], (-1, ngauss, d))
    roots = jnp.reshape(preds[:, ngauss * (1 + d) :], (-1, ngauss, d))
    variances = jnp.square(roots) + 1e-6
    log_p = log_gaussian_diag_pdf(targets[:, None, :], means, variances)
    return -jax.scipy.special.logsumexp(log_share + log_p, axis=-1)


def logsoftmax_sample(log_probs: Any, temperature: float = 1.0, rng: Any = None) -> Any:
    """Returns sampled categories from log-probabilities, by the Gumbel-max trick.

    log_probs: (..., n_categories), result: (...) int. (Maddison et al. 2014,
    https://arxiv.org/abs/1411.0030.) Trax draws from NumPy's global random state.

    Args:
      log_probs: logarithms of probabilities, up to a constant.
      temperature: 1 samples from the distribution, 0 takes the most probable.
      rng: a random key; needed unless the temperature is 0.

    Raises:
      ValueError: there is no key.

    Example:
      >>> int(logsoftmax_sample(jnp.log(jnp.array([0.2, 0.8])), temperature=0.0))
      1
    """
    if temperature == 0:
        return jnp.argmax(log_probs, axis=-1)
    if rng is None:
        raise ValueError(
            f"logsoftmax_sample needs a random key at temperature {temperature}, got "
            "rng=None; pass rng=jax.random.key(seed)."
        )
    noise = jax.random.gumbel(rng, log_probs.shape, log_probs.dtype)
    return jnp.argmax(log_probs + noise * temperature, axis=-1)
