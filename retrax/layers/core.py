"""Layers that most models are made of: dense maps, embeddings, dropout.

Above `base`, `running` and `initializers`. Layers without weights that are plain
functions of arrays are in `functions`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from retrax import trees
from retrax.layers import initializers as init
from retrax.layers.base import Layer
from retrax.layers.running import (
    PER_EXAMPLE_PREFIX,
    SUMMARY_PREFIX,
    emit,
    rounded,
)

__all__ = [
    "Dense",
    "Dropout",
    "Embedding",
    "PerExample",
    "Summary",
    "SummaryScalar",
    "TiedEmbedding",
]


class Dense(Layer):
    """Maps the last axis by y = x W + b.

    x: (..., d_in), y: (..., n_units). Weights: (W, b), or the bare W without bias.
    The key is split into one for W and one for b.

    Example:
      >>> from retrax.shapes import ShapeDtype
      >>> weights, _ = Dense(3).init(ShapeDtype((5, 2)))
      >>> [w.shape for w in weights]
      [(2, 3), (3,)]
    """

    def __init__(
        self,
        n_units: int,
        kernel_initializer: Callable[..., Any] | None = None,
        bias_initializer: Callable[..., Any] | None = None,
        use_bias: bool = True,
        use_bfloat16: bool = False,
        name: str | None = None,
    ) -> None:
        """Makes a dense layer.

        Args:
          n_units: size of the last axis of the output.
          kernel_initializer: makes W from (shape, rng); Glorot uniform by default.
          bias_initializer: makes b; normal with deviation 1e-6 by default.
          use_bias: whether there is a b.
          use_bfloat16: keeps the weights in bfloat16.
          name: name of the layer.

        Raises:
          ValueError: n_units is not positive.
        """
        super().__init__(name=name or f"Dense_{n_units}")
        if n_units < 1:
            raise ValueError(f"Dense needs n_units of at least 1, got {n_units}.")
        self._n_units = n_units
        self._kernel_initializer = kernel_initializer or init.GlorotUniformInitializer()
        self._bias_initializer = bias_initializer or init.RandomNormalInitializer(1e-6)
        self._use_bias = use_bias
        self._use_bfloat16 = use_bfloat16

    def init_weights_and_state(self, input_signature: Any) -> None:
        """Makes (W, b)."""
        if not input_signature.shape:
            raise ValueError("Dense needs inputs of shape (..., d_in), got a scalar.")
        shape_w = (input_signature.shape[-1], self._n_units)
        rng_w, rng_b = jax.random.split(self.rng, 2)
        w = self._cast(self._kernel_initializer(shape_w, rng_w))
        if self._use_bias:
            b = self._cast(self._bias_initializer((self._n_units,), rng_b))
            self.weights = (w, b)
        else:
            self.weights = w

    def forward(self, x: Any) -> Any:
        """Computes x W + b."""
        if not self._use_bias:
            return jnp.dot(x, self.weights)
        w, b = self.weights
        return rounded(jnp.dot(x, w)) + b

    def _cast(self, w: Any) -> Any:
        return w.astype(jnp.bfloat16) if self._use_bfloat16 else w


class Embedding(Layer):
    """Looks up a trainable vector for each integer id.

    x: (...) int in [0, vocab_size), y: (..., d_feature). Ids outside of the range are
    an error where the layer runs uncompiled; compiled code cannot raise and clips them
    into it, as Trax does everywhere. The weights are one array (vocab_size, d_feature).
    """

    def __init__(
        self,
        vocab_size: int,
        d_feature: int,
        use_bfloat16: bool = False,
        kernel_initializer: Callable[..., Any] | None = None,
        name: str | None = None,
    ) -> None:
        """Makes an embedding.

        Args:
          vocab_size: number of ids.
          d_feature: size of a vector.
          use_bfloat16: keeps the weights in bfloat16; outputs are float32 still.
          kernel_initializer: makes the vectors from (shape, rng); by default uniform
            with variance 1 / d_feature.
          name: name of the layer.
        """
        super().__init__(name=name or f"Embedding_{vocab_size}_{d_feature}")
        self._vocab_size = vocab_size
        self._d_feature = d_feature
        self._use_bfloat16 = use_bfloat16
        self._kernel_initializer = kernel_initializer or init.ScaledInitializer(
            out_dim=-1, in_dim=-2, scale=1.0, mode="fan_out", distribution="uniform"
        )

    def init_weights_and_state(self, input_signature: Any) -> None:
        """Makes the vectors."""
        w = self._kernel_initializer((self._vocab_size, self._d_feature), self.rng)
        self.weights = w.astype(jnp.bfloat16) if self._use_bfloat16 else w

    def forward(self, x: Any) -> Any:
        """Takes the vectors of the ids.

        Raises:
          TypeError: the ids are not integers.
          ValueError: an id that can be read is outside of the vocabulary.
        """
        if not jnp.issubdtype(x.dtype, jnp.integer):
            raise TypeError(
                f"Embedding needs integer ids, got {x.dtype}; give integer inputs, and "
                "an integer signature to init(): ShapeDtype(shape, 'int32')."
            )
        if trees.is_concrete(x):
            self._check_range(np.asarray(x))
        y = jnp.take(self.weights, x, axis=0, mode="clip")
        return y.astype(jnp.float32) if self._use_bfloat16 else y

    def _check_range(self, ids: np.ndarray) -> None:
        n = self.weights.shape[0]
        wrong = ids[(ids < 0) | (ids >= n)]
        if wrong.size:
            raise ValueError(
                f"{self.name} has vectors for the ids 0 to {n - 1}, but {wrong.size} "
                f"of {ids.size} ids are outside, the first of them {wrong[0]}; make "
                "the model with a larger vocab_size, or look at how ids are made."
            )


class TiedEmbedding(Embedding):
    """An embedding that also takes vectors back to ids, by the same weights.

    Integer ids (...) become vectors (..., d_feature), as in `Embedding`. Vectors
    (..., d_feature) float become logits (..., vocab_size), their products with the
    vectors of all ids (Press and Wolf 2016, https://arxiv.org/abs/1608.05859). One
    instance both at the start and at the end of a model is one set of weights, with the
    sum of both gradients, saved once.

    Example:
      >>> from retrax.shapes import ShapeDtype
      >>> tied = TiedEmbedding(9, 4)
      >>> _ = tied.init(ShapeDtype((2, 3), 'int32'))
      >>> vectors = tied(jnp.zeros((2, 3), jnp.int32))
      >>> vectors.shape, tied(vectors).shape
      ((2, 3, 4), (2, 3, 9))
    """

    def __init__(
        self,
        vocab_size: int,
        d_feature: int,
        use_bfloat16: bool = False,
        kernel_initializer: Callable[..., Any] | None = None,
        name: str | None = None,
    ) -> None:
        """Makes a tied embedding; see `Embedding` for the arguments."""
        name = name or f"TiedEmbedding_{vocab_size}_{d_feature}"
        super().__init__(vocab_size, d_feature, use_bfloat16, kernel_initializer, name)

    def forward(self, x: Any) -> Any:
        """Looks ids up, or compares vectors with those of all ids.

        Raises:
          ValueError: the vectors have another size.
        """
        if jnp.issubdtype(x.dtype, jnp.integer):
            return super().forward(x)
        w = self.weights
        if not x.shape or x.shape[-1] != w.shape[1]:
            raise ValueError(
                f"{self.name} needs integer ids, or vectors of {w.shape[1]} features, "
                f"got {x.dtype} of shape {tuple(x.shape)}."
            )
        return jnp.dot(x, w.astype(x.dtype).T if self._use_bfloat16 else w.T)


class Dropout(Layer):
    """Sets random elements to 0 in training and scales the rest to keep the mean.

    Source: Srivastava et al. 2014. `rate` is the chance of dropping. Has no state,
    unlike Trax's.
    """

    def __init__(
        self,
        rate: float = 0.0,
        shared_axes: Sequence[int] | None = None,
        mode: str = "train",
        name: str | None = None,
    ) -> None:
        """Makes a dropout layer.

        Args:
          rate: chance of an element to be dropped; at 0 no random number is drawn.
          shared_axes: axes along which all elements are dropped or kept together.
          mode: anything but 'train' makes it the identity.
          name: name of the layer.

        Raises:
          ValueError: the rate is not in [0, 1).
        """
        super().__init__(name=name)
        if not 0.0 <= rate < 1.0:
            raise ValueError(
                f"Dropout rate must be in [0, 1), got {rate}; it is the chance of "
                "dropping, not of keeping."
            )
        self._rate = rate
        self._shared_axes = tuple(shared_axes or ())
        self._mode = mode

    def forward(self, x: Any) -> Any:
        """Drops elements, or returns x itself outside of training.

        Raises:
          ValueError: there is no random key.
        """
        if self._mode != "train" or self._rate == 0.0:
            return x
        rng = self.rng
        if rng is None:
            raise ValueError(
                f"Dropout needs a random key in mode 'train' (rate {self._rate}), got "
                "rng=None; pass rng=jax.random.key(seed), or build the model with "
                "mode='eval'."
            )
        shape = list(x.shape)
        for axis in self._shared_axes:
            shape[axis] = 1
        keep = jax.random.bernoulli(rng, 1.0 - self._rate, tuple(shape))
        return jnp.where(keep, x / (1.0 - self._rate), 0.0).astype(x.dtype)


class SummaryScalar(Layer):
    """Returns its input and emits a number made from it for the training log.

    Trainers write it under 'summary_{name}'. Unlike Trax's layer it has no state.
    """

    def __init__(self, name: str, aggregation_fun: Callable[..., Any] = jnp.mean):
        """Makes a summary.

        Args:
          name: what the number is called.
          aggregation_fun: makes a scalar from the input.
        """
        super().__init__(name=f"summary_{name}")
        self._aggregation_fun = aggregation_fun

    def forward(self, x: Any) -> Any:
        """Emits the number."""
        emit(self.name, self._aggregation_fun(x))
        return x


class Summary(Layer):
    """Returns its input and emits a value made from it, for the training log.

    `StepTrainer` gives it as 'forward/{name}' in its stats: a number is averaged over
    devices and micro-batches, an array is joined from them along its first axis; logs
    show an array by its mean. Out of a loop (`Scan`, `Repeat`) comes an array with one
    entry for each step. A second one of the same name is 'forward/{name}_1'.

    Example:
      >>> from retrax import layers as tl
      >>> m = tl.Serial(tl.Relu(), tl.Summary('share', lambda x: jnp.mean(x > 0)))
      >>> m.apply(jnp.array([1., -1.]), m.weights, m.state, None)[2]
      [('forward/share', Array(0.5, dtype=float32))]
    """

    def __init__(self, name: str, fn: Callable[[Any], Any] = jnp.mean) -> None:
        """Makes a summary.

        Args:
          name: what the value is called.
          fn: makes the value from the input.
        """
        super().__init__(name=f"Summary_{name}")
        self._summary_name, self._fn = SUMMARY_PREFIX + name, fn

    def forward(self, x: Any) -> Any:
        """Emits the value."""
        emit(self._summary_name, self._fn(x))
        return x


class PerExample(Layer):
    """Returns its input and hands it, or values made from it, out of the step by rows.

    `StepTrainer` gives it as 'per_example/{name}' in its stats and `Evaluator.batch`
    likewise: one entry for each row of the batch, in order, never averaged. Out of a
    loop (`Scan`, `Repeat`) each row has an axis of steps; inside of `Chunk`, which cuts
    the batch, there is no such entry to be had.
    """

    def __init__(self, name: str, fn: Callable[[Any], Any] | None = None) -> None:
        """Makes an outlet.

        Args:
          name: what the values are called.
          fn: makes the values (batch, ...) from the input; the input itself by default.
        """
        super().__init__(name=f"PerExample_{name}")
        self._example_name, self._fn = PER_EXAMPLE_PREFIX + name, fn

    def forward(self, x: Any) -> Any:
        """Emits the values."""
        emit(self._example_name, x if self._fn is None else self._fn(x))
        return x
