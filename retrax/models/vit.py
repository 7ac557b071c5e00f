"""`ViT`: a Transformer that classifies images.

Above `blocks`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gin
import jax.numpy as jnp

from retrax import layers as tl
from retrax.models.blocks import TransformerBlocks, repeated

__all__ = ["ViT"]


@gin.configurable(module="retrax.models", denylist=["mode"])
def ViT(
    n_classes: int = 1000,
    image_size: int = 224,
    patch_size: int = 16,
    d_model: int = 768,
    d_ff: int = 3072,
    n_layers: int = 12,
    n_heads: int = 12,
    dropout: float = 0.1,
    mode: str = "train",
    ff_activation: Callable[[], tl.Layer] = tl.Gelu,
    class_token: bool = True,
    scan_layers: bool = False,
) -> tl.Layer:
    """Returns a Vision Transformer.

    Source: Dosovitskiy et al. 2020, https://arxiv.org/abs/2010.11929, equations 1-4;
    the default sizes are ViT-B/16.

    Input: (batch, image_size, image_size, channels) int or float; output: (batch,
    n_classes) float logits.

    Args:
      n_classes: number of classes.
      image_size: height and width of the images.
      patch_size: height and width of the patches; divides image_size.
      d_model: width of the vectors between blocks.
      d_ff: width in the middle of the feed-forward parts.
      n_layers: number of blocks.
      n_heads: number of attention heads; divides d_model.
      dropout: chance of dropping in mode 'train', also for attention weights.
      mode: 'train', 'eval' or 'viz'; 'predict' is 'eval', as nothing is decoded.
      ff_activation: makes the activation layer of the feed-forward parts.
      class_token: classifies by the vector of an extra first token; False by the mean
        of all (Beyer et al. 2022, https://arxiv.org/abs/2205.01580).
      scan_layers: puts all blocks into one `Repeat`.

    Raises:
      ValueError: sizes do not fit; says which.

    Example:
      >>> sizes = dict(image_size=8, patch_size=4, d_model=8, d_ff=16, n_heads=2)
      >>> model = ViT(10, n_layers=1, mode='eval', **sizes)
      >>> images = jnp.zeros((3, 8, 8, 1))
      >>> _ = model.init(images)
      >>> model(images).shape
      (3, 10)
    """
    if patch_size < 1 or image_size < patch_size or image_size % patch_size:
        raise ValueError(
            f"ViT needs an image_size that is a multiple of patch_size, got "
            f"{image_size} and {patch_size}."
        )
    n_patches = (image_size // patch_size) ** 2
    n_tokens = n_patches + class_token

    def join_places(x: Any) -> Any:
        if x.shape[1] * x.shape[2] != n_patches:
            raise ValueError(
                f"ViT was made for images of {image_size} x {image_size}, {n_patches} "
                f"patches of {patch_size} x {patch_size}, but these have {x.shape[1]} "
                f"x {x.shape[2]} patches."
            )
        return jnp.reshape(x, (x.shape[0], n_patches, x.shape[-1]))

    blocks = TransformerBlocks(
        d_model, d_ff, n_heads, n_tokens, dropout, None, mode, ff_activation
    )
    patch = (patch_size, patch_size)
    token = tl.Weights(tl.RandomNormalInitializer(0.02), (1, 1, d_model))
    return tl.Serial(
        tl.ToFloat(),
        tl.Conv(d_model, patch, patch),
        tl.Fn("JoinPlaces", join_places),
        [tl.Branch(token, None), tl.Fn("PutBefore", _put_before)]
        if class_token
        else None,
        tl.PositionalEncoding(n_tokens, kind="learned", mode=blocks.encoder_mode),
        blocks.drop(),
        tl.Branch(None, tl.Fn("SeeAll", lambda x: jnp.ones((1, 1, 1, 1), bool))),
        repeated(blocks.encoder, n_layers, scan_layers),
        tl.Select([0], n_in=2),  # Drops the mask.
        tl.LayerNorm(),
        tl.Fn("First", lambda x: x[:, 0]) if class_token else tl.Mean(axis=1),
        tl.Dense(n_classes),
    )


def _put_before(token: Any, x: Any) -> Any:
    """Puts the same vector before each sequence."""
    token = jnp.broadcast_to(token, (x.shape[0], *token.shape[1:]))
    return jnp.concatenate([token.astype(x.dtype), x], axis=1)
