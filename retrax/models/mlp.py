"""Multilayer perceptron."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import gin

from retrax import layers as tl

__all__ = ["MLP"]


@gin.configurable(module="retrax.models", denylist=["mode"])
def MLP(
    layer_widths: Sequence[int] = (128, 64),
    activation_fn: Callable[[], tl.Layer] = tl.Relu,
    out_activation: bool = False,
    flatten: bool = True,
    mode: str = "train",
) -> tl.Layer:
    """Returns a chain of dense layers with activations between them.

    Args:
      layer_widths: number of units of each dense layer, the last being the output.
      activation_fn: makes the activation layer.
      out_activation: also put an activation after the last dense layer.
      flatten: first make one axis of all axes but the batch.
      mode: ignored; all modes are alike.

    Input (batch, ...) float; output (batch, layer_widths[-1]).

    Raises:
      ValueError: layer_widths is empty or holds a width below 1.
    """
    del mode
    widths = tuple(layer_widths)
    if not widths or min(widths) < 1:
        raise ValueError(f"layer_widths needs positive widths, got {widths}.")
    layers: list[tl.Layer] = [tl.Flatten()] if flatten else []
    for i, width in enumerate(widths):
        layers.append(tl.Dense(width))
        if out_activation or i + 1 < len(widths):
            layers.append(activation_fn())
    return tl.Serial(layers)
