"""Convolutional networks for images: residual ones, and a small plain one.

Above `blocks`. Images are (batch, height, width, channels).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import gin

from retrax import layers as tl
from retrax.models.blocks import repeated

__all__ = ["ConvNet", "Resnet50", "WideResnet"]


@gin.configurable(module="retrax.models", denylist=["mode"])
def Resnet50(
    d_hidden: int = 64,
    n_output_classes: int = 1001,
    mode: str = "train",
    norm: Callable[..., tl.Layer] = tl.BatchNorm,
    non_linearity: Callable[[], tl.Layer] = tl.Relu,
    scan_layers: bool = False,
) -> tl.Layer:
    """Returns a ResNet of 50 layers.

    Source: He et al. 2015, https://arxiv.org/abs/1512.03385, table 1. As in Trax the
    first pooling is without padding. Here the last one takes the mean over all places,
    which for images of 224 x 224 is Trax's, so that images may have other sizes.

    Input: (batch, height, width, channels) int or float; output: (batch,
    n_output_classes) float logits.

    Args:
      d_hidden: number of channels of the first layer.
      n_output_classes: number of classes.
      mode: 'train' or 'eval', for the normalization.
      norm: makes a normalization from mode=, such as `BatchNorm`.
      non_linearity: makes the activation, with `FilterResponseNorm` the
        `ThresholdedLinearUnit`.
      scan_layers: puts the equal blocks of each stage into one `Repeat`.
    """

    def convolution(filters: int, size: int, stride: int) -> list[tl.Layer]:
        conv = tl.Conv(filters, (size, size), (stride, stride), "SAME")
        return [conv, norm(mode=mode)]

    def block(width: int, stride: int, shortcut: bool) -> list[tl.Layer]:
        inner = [
            convolution(width, 1, stride),
            non_linearity(),
            convolution(width, 3, 1),
            non_linearity(),
            convolution(4 * width, 1, 1),
        ]
        outer = convolution(4 * width, 1, stride) if shortcut else None
        return [tl.Residual(inner, shortcut=outer), non_linearity()]

    def stage(multiplier: int, n_blocks: int, stride: int) -> list[tl.Layer]:
        width = multiplier * d_hidden
        equal = repeated(lambda: block(width, 1, False), n_blocks - 1, scan_layers)
        return [*block(width, stride, True), *equal]

    return tl.Serial(
        tl.ToFloat(),
        convolution(d_hidden, 7, 2),
        non_linearity(),
        tl.MaxPool(pool_size=(3, 3), strides=(2, 2)),
        stage(1, 3, 1),
        stage(2, 4, 2),
        stage(4, 6, 2),
        stage(8, 3, 2),
        tl.Mean(axis=(1, 2)),
        tl.Dense(n_output_classes),
    )


@gin.configurable(module="retrax.models", denylist=["mode"])
def WideResnet(
    n_blocks: int = 3,
    widen_factor: int = 1,
    n_output_classes: int = 10,
    bn_momentum: float = 0.9,
    mode: str = "train",
    scan_layers: bool = False,
) -> tl.Layer:
    """Returns a wide residual network of 6 * n_blocks + 4 layers.

    Source: Zagoruyko and Komodakis 2016, https://arxiv.org/abs/1605.07146, table 1. As
    there each block has a shortcut; Trax puts all blocks of a group but the first into
    one. The shortcut of a group's first block is a convolution of 1 x 1 (Trax: 3 x 3),
    and the last pooling is over all places, so that images may have any size.

    Input: (batch, height, width, channels) int or float; output: (batch,
    n_output_classes) float logits.

    Args:
      n_blocks: number of blocks in each of the three groups.
      widen_factor: number of channels over that of the plain network.
      n_output_classes: number of classes.
      bn_momentum: momentum of the batch normalization's averages.
      mode: 'train' or 'eval', for the normalization.
      scan_layers: puts the equal blocks of each group into one `Repeat`.

    Raises:
      ValueError: a group has no block.
    """
    if n_blocks < 1:
        raise ValueError(f"WideResnet needs n_blocks of at least 1, got {n_blocks}.")

    def norm_relu() -> list[tl.Layer]:
        return [tl.BatchNorm(momentum=bn_momentum, mode=mode), tl.Relu()]

    def conv(channels: int, size: int, stride: int) -> tl.Layer:
        return tl.Conv(channels, (size, size), (stride, stride), padding="SAME")

    def block(channels: int, stride: int, shortcut: bool) -> tl.Layer:
        return tl.Residual(
            norm_relu(),
            conv(channels, 3, stride),
            norm_relu(),
            conv(channels, 3, 1),
            shortcut=conv(channels, 1, stride) if shortcut else None,
        )

    def group(channels: int, stride: int) -> list[tl.Layer]:
        equal = repeated(lambda: block(channels, 1, False), n_blocks - 1, scan_layers)
        return [block(channels, stride, True), *equal]

    return tl.Serial(
        tl.ToFloat(),
        conv(16, 3, 1),
        group(16 * widen_factor, 1),
        group(32 * widen_factor, 2),
        group(64 * widen_factor, 2),
        norm_relu(),
        tl.Mean(axis=(1, 2)),
        tl.Dense(n_output_classes),
    )


@gin.configurable(module="retrax.models", denylist=["mode"])
def ConvNet(
    filters: Sequence[int] = (32, 64),
    d_hidden: int = 128,
    n_output_classes: int = 10,
    kernel_size: int = 3,
    dropout: float = 0.0,
    mode: str = "train",
) -> tl.Layer:
    """Returns a small convolutional network, each convolution followed by pooling.

    Input: (batch, height, width, channels) int or float; output: (batch,
    n_output_classes) float logits. Each stage (convolution, batch normalization, Relu,
    pooling by 2) halves height and width, rounding up.

    Args:
      filters: number of channels of each stage.
      d_hidden: width of the dense layer before the output.
      n_output_classes: number of classes.
      kernel_size: height and width of the kernels.
      dropout: chance of dropping before each dense layer in mode 'train'.
      mode: 'train' or 'eval'.
    """

    def stage(n: int) -> list[tl.Layer]:
        return [
            tl.Conv(n, (kernel_size, kernel_size), padding="SAME"),
            tl.BatchNorm(momentum=0.9, mode=mode),
            tl.Relu(),
            tl.MaxPool(pool_size=(2, 2), strides=(2, 2), padding="SAME"),
        ]

    return tl.Serial(
        tl.ToFloat(),
        [stage(n) for n in filters],
        tl.Flatten(),
        tl.Dropout(rate=dropout, mode=mode),
        tl.Dense(d_hidden),
        tl.Relu(),
        tl.Dropout(rate=dropout, mode=mode),
        tl.Dense(n_output_classes),
    )
