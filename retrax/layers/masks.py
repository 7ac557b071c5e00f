"""Masks for attention: which keys a query may see.

Above `base`. Masks are bool, broadcast to (batch, heads, queries, keys), and are true
where a key is seen.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from retrax.layers.base import Fn, Layer

__all__ = ["CausalMask", "EncoderDecoderMask", "PaddingMask"]


def PaddingMask(pad: int = 0) -> Layer:
    """Makes a layer that hides padding: ids -> mask.

    ids: (batch, length) int; mask: (batch, 1, 1, length) bool, false where the id is
    `pad`.

    Example:
      >>> PaddingMask()(jnp.array([[7, 0]])).tolist()
      [[[[True, False]]]]
    """

    def mask(ids: Any) -> Any:
        if ids.ndim != 2:
            raise ValueError(
                f"PaddingMask needs ids of shape (batch, length), got {ids.shape}."
            )
        return (ids != pad)[:, None, None, :]

    return Fn(f"PaddingMask({pad})", mask)


def CausalMask() -> Layer:
    """Makes a layer that hides what comes later: x -> mask.

    x: (batch, length, ...); mask: (1, 1, length, length) bool, true where the key is
    not after the query.

    Example:
      >>> CausalMask()(jnp.zeros((5, 2))).tolist()
      [[[[True, False], [True, True]]]]
    """

    def mask(x: Any) -> Any:
        if x.ndim < 2:
            raise ValueError(
                f"CausalMask needs inputs of shape (batch, length, ...), got {x.shape}."
            )
        return jnp.tri(x.shape[1], dtype=bool)[None, None]

    return Fn("CausalMask", mask)


def EncoderDecoderMask() -> Layer:
    """Makes a layer that hides the encoder's padding from the decoder.

    Takes (decoder input, encoder mask), gives the mask between the two. Decoder input:
    (batch, d_length, ...); encoder mask: (batch, 1, 1, e_length), 0/1 or bool; result:
    (batch, 1, d_length, e_length) bool.
    """

    def mask(decoder_input: Any, encoder_mask: Any) -> Any:
        x, given = decoder_input, encoder_mask
        if x.ndim < 2 or given.ndim != 4 or given.shape[1:3] != (1, 1):
            raise ValueError(
                "EncoderDecoderMask needs a decoder input (batch, length, ...) and an "
                f"encoder mask (batch, 1, 1, length), got {x.shape} and {given.shape}."
            )
        if x.shape[0] != given.shape[0]:
            raise ValueError(
                f"EncoderDecoderMask: the decoder input has a batch of {x.shape[0]}, "
                f"the encoder mask one of {given.shape[0]}; they must be the same. (In "
                "mode 'predict' mask and encoder output are kept from the first call "
                "on; model.reset_state() begins anew.)"
            )
        shape = (given.shape[0], 1, x.shape[1], given.shape[3])
        return jnp.broadcast_to(given != 0, shape)

    return Fn("EncoderDecoderMask", mask)
