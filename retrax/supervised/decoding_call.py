"""The arguments that all ways of decoding have, checked and put into one shape.

Under `decoding`, whose docstrings say what they mean.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import numpy as np

from retrax import layers as tl
from retrax.layers.base import Layer

__all__ = ["Call", "check_lengths", "checked_call"]


class Call(NamedTuple):
    """The checked arguments of one call."""

    model: Layer
    weights: Any
    ids: np.ndarray
    inputs: tuple[Any, ...]
    rng: Any
    eval_min_length: int | None  # None in mode 'predict'.

    def of_the_model(self) -> tuple[Any, ...]:
        """(weights, state, ids, inputs)."""
        return self.weights, self.model.state, self.ids, self.inputs


def checked_call(
    model: Layer,
    inputs: Any,
    batch_size: int,
    start_id: Any,
    rng: Any,
    eval_mode: bool = False,
    eval_min_length: int = 1,
) -> Call:
    """Checks the arguments that all ways of decoding have, see `decoding`.

    Raises:
      TypeError: the model is no layer, or the key no key.
      ValueError: shapes or values do not fit; says which.
    """
    if not isinstance(model, Layer):
        raise TypeError(f"decoding needs a layer, got {type(model).__name__}.")
    weights = model.weights
    if model.has_weights and not jax.tree.leaves(weights):
        raise ValueError(
            f"{model.name} has no weights; call model.init(signature), then set "
            "model.weights to trained ones, or use model.init_from_file."
        )
    if batch_size < 1:
        raise ValueError(f"batch_size must be at least 1, got {batch_size}.")
    if eval_min_length < 1:
        raise ValueError(f"eval_min_length must be at least 1, got {eval_min_length}.")
    given = _given_inputs(model, inputs)
    n_rows = _n_rows(batch_size, given)
    given = [np.broadcast_to(x, (n_rows, *x.shape[1:])) for x in given]
    ids = _start(start_id, n_rows)[:, : 0 if eval_mode else 1]
    if given and model.n_in == 1:
        prompt = _checked_prompt(model, given.pop())
        ids = np.concatenate([ids, prompt], axis=1)
    rng = jax.random.key(0) if rng is None else rng
    if not hasattr(rng, "dtype"):
        raise TypeError(f"rng must be a random key, got {rng!r}; use jax.random.key.")
    least = eval_min_length if eval_mode else None
    return Call(model, weights, ids, tuple(given), rng, least)


def check_lengths(max_length: int, min_length: int) -> None:
    """Raises ValueError unless 0 < max_length and min_length <= max_length."""
    if max_length < 1:
        raise ValueError(f"max_length must be at least 1 token, got {max_length}.")
    if min_length > max_length:
        raise ValueError(
            f"min_length={min_length} is more than max_length={max_length}."
        )


# --- Helpers ------------------------------------------------------------------------


def _given_inputs(model: Layer, inputs: Any) -> list[np.ndarray]:
    """The inputs as a list: a prompt, or all that the model takes but the last one."""
    if inputs is None:
        given = []
    elif isinstance(inputs, tuple):
        given = [np.asarray(x) for x in inputs]
    else:
        given = [np.asarray(inputs)]
    if model.n_in > 1 and len(given) != model.n_in - 1:
        raise ValueError(
            f"{model.name} takes {model.n_in} inputs, the last of which are the tokens "
            f"to come; give the other {model.n_in - 1} as inputs=, got {len(given)}."
        )
    if model.n_in == 1 and len(given) > 1:
        raise ValueError(f"{model.name} takes one prompt, got a tuple of {len(given)}.")
    for x in given:
        if x.ndim < 2:
            raise ValueError(
                f"inputs must have shape (batch_size, length), got {x.shape}; for one "
                "row give inputs[None]."
            )
    return given


def _n_rows(batch_size: int, given: list[np.ndarray]) -> int:
    sizes = {batch_size, *(len(x) for x in given)} - {1}
    if len(sizes) > 1 or 0 in sizes:
        raise ValueError(
            f"the batch sizes do not fit: batch_size is {batch_size}, inputs have "
            f"{[len(x) for x in given]} rows."
        )
    return sizes.pop() if sizes else 1


def _start(start_id: Any, n_rows: int) -> np.ndarray:
    """The first column, (n_rows, 1) int32."""
    start = np.asarray(start_id)
    fits = start.shape in ((), (n_rows,), (n_rows, 1))
    if not fits or not np.issubdtype(start.dtype, np.integer):
        raise ValueError(
            f"start_id must be an integer, or one for each of {n_rows} rows; got an "
            f"array of shape {start.shape} of {start.dtype}."
        )
    return np.broadcast_to(np.reshape(start, (-1, 1)), (n_rows, 1)).astype(np.int32)


def _checked_prompt(model: Layer, prompt: np.ndarray) -> np.ndarray:
    if prompt.ndim != 2 or not np.issubdtype(prompt.dtype, np.integer):
        raise ValueError(
            f"a prompt must be ids, (batch_size, length) int; got an array of shape "
            f"{prompt.shape} of {prompt.dtype}."
        )
    limit = max((e.weights.shape[0] for e in _embeddings(model)), default=2**31)
    wrong = prompt[(prompt < 0) | (prompt >= limit)]
    if wrong.size:
        raise ValueError(
            f"the prompt holds the id {wrong[0]}, but ids of {model.name} are in "
            f"[0, {limit})."
        )
    return prompt.astype(np.int32)


def _embeddings(layer: Layer) -> Iterator[Layer]:
    if isinstance(layer, tl.Embedding) and jax.tree.leaves(layer.weights):
        yield layer
    for child in layer.sublayers:
        yield from _embeddings(child)
