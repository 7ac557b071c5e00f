"""`NeuralGPU`: a convolutional gated unit applied again and again, for algorithms.

Above the layers.
"""

from __future__ import annotations

from typing import Any

import gin
import jax.numpy as jnp

from retrax import layers as tl

__all__ = ["ConvDiagonalGRU", "DiagonalGate", "NeuralGPU"]


@gin.configurable(module="retrax.models", denylist=["mode"])
def NeuralGPU(
    d_feature: int = 96,
    steps: int = 16,
    vocab_size: int = 2,
    mode: str = "train",
) -> tl.Layer:
    """Returns a Neural GPU with diagonal gates.

    Source: Freivalds and Liepins 2017, https://arxiv.org/abs/1702.08727.

    Input: ids (batch, height, length) int in [0, vocab_size). Output: (batch, height,
    length, vocab_size) float logits. All steps share their weights, so `Repeat`, whose
    blocks have weights of their own, cannot hold them.

    Args:
      d_feature: number of channels; a multiple of 3.
      steps: how often the unit is applied.
      vocab_size: number of ids.
      mode: dropout of the unit acts in 'train' only.

    Raises:
      ValueError: steps is negative; d_feature is not divisible by 3.
    """
    if steps < 0:
        raise ValueError(f"NeuralGPU needs steps of at least 0, got {steps}.")
    if d_feature % 3:
        raise ValueError(
            f"NeuralGPU needs a d_feature that is a multiple of 3, got {d_feature}: "
            "its gate moves the thirds of the channels in different directions."
        )
    unit = ConvDiagonalGRU(d_feature, mode=mode)
    return tl.Serial(
        tl.Embedding(vocab_size, d_feature),
        [unit] * steps,
        tl.Dense(vocab_size),
    )


def ConvDiagonalGRU(
    units: int, kernel_size: tuple[int, int] = (3, 3), mode: str = "train"
) -> tl.Layer:
    """Returns a convolutional gated unit s -> s' whose memory moves diagonally.

    s: (batch, height, length, units). Formulas at `GeneralGRUCell`. Gates start half
    open; in Trax they start beyond the flat end of the hard sigmoid, where no gradient
    moves them.
    """
    return tl.GeneralGRUCell(
        candidate_transform=lambda: tl.Conv(units, kernel_size, padding="SAME"),
        memory_transform_fn=DiagonalGate,
        gate_nonlinearity=tl.HardSigmoid,
        candidate_nonlinearity=tl.HardTanh,
        sigmoid_bias=-0.5,  # The hard sigmoid rises between -1 and 0.
        mode=mode,
    )


def DiagonalGate() -> tl.Layer:
    """Makes a layer that moves thirds of the channels along the length.

    x: (batch, height, length, channels). The first third moves by one place to higher
    positions, the last to lower ones; zeros come in.
    """

    def shift(x: Any) -> Any:
        if x.shape[-1] % 3:
            raise ValueError(
                f"DiagonalGate needs channels that divide by 3, got shape {x.shape}."
            )
        up, stay, down = jnp.split(x, 3, axis=-1)
        up = jnp.pad(up, ((0, 0), (0, 0), (1, 0), (0, 0)))[:, :, :-1]
        down = jnp.pad(down, ((0, 0), (0, 0), (0, 1), (0, 0)))[:, :, 1:]
        return jnp.concatenate([up, stay, down], axis=-1)

    return tl.Fn("DiagonalGate", shift)
