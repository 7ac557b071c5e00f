"""Inputs made by rules and seeded generators, for tests and first experiments.

Last in the order of `retrax.data`, beside `digits`. Every stream is endless, begins
anew at every call, and depends on its seed alone; evaluation has a seed of its own.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import gin
import numpy as np

from retrax.data.inputs import Inputs

_REQUIRED: Any = gin.REQUIRED
_Batches = Iterator[tuple[np.ndarray, ...]]


@gin.configurable(module="retrax.data")
def random_inputs(
    input_shape: Sequence[int] = _REQUIRED,
    input_dtype: Any = np.int32,
    input_range: tuple[float, float] = (0, 255),
    output_shape: Sequence[int] = _REQUIRED,
    output_dtype: Any = np.int32,
    output_range: tuple[float, float] = (0, 9),
    seed: int = 0,
) -> Inputs:
    """Returns batches of uniform random inputs and outputs.

    Args:
      input_shape: shape of a batch of inputs, with the batch dimension.
      input_dtype: dtype of the inputs.
      input_range: smallest and largest input, both included for integers.
      output_shape: shape of a batch of outputs, with the batch dimension.
      output_dtype: dtype of the outputs.
      output_range: smallest and largest output, both included for integers.
      seed: non-negative int.
    """

    def draw(rng: np.random.Generator, shape: Any, dtype: Any, ends: Any) -> np.ndarray:
        dtype = np.dtype(dtype)
        if np.issubdtype(dtype, np.integer):
            return rng.integers(ends[0], ends[1] + 1, shape).astype(dtype)
        return rng.uniform(ends[0], ends[1], shape).astype(dtype)

    def batches(rng: np.random.Generator) -> _Batches:
        while True:
            x = draw(rng, input_shape, input_dtype, input_range)
            yield x, draw(rng, output_shape, output_dtype, output_range)

    return _inputs(batches, batches, seed)


@gin.configurable(module="retrax.data")
def sequence_copy_inputs(
    vocab_size: int = _REQUIRED,
    batch_size: int = _REQUIRED,
    train_length: int = _REQUIRED,
    eval_min_length: int = _REQUIRED,
    eval_max_length: int = _REQUIRED,
    reverse: bool = False,
    pad_to_multiple: int = 32,
    seed: int = 0,
) -> Inputs:
    """Returns the copy task: 0 w 0 w, with weight on the second w alone.

    Batches are (x, x, weights), each (batch, padded length); w holds symbols 1 to
    vocab_size - 1 and one length in a batch.

    Args:
      vocab_size: symbols, 0 included.
      batch_size: examples in a batch.
      train_length: longest w in training; the shortest is 1.
      eval_min_length: shortest w in evaluation.
      eval_max_length: longest w in evaluation.
      reverse: whether the second w is reversed.
      pad_to_multiple: lengths are padded with 0 to a multiple of this.
      seed: non-negative int.
    """

    def batches(low: int, high: int) -> Callable[[np.random.Generator], _Batches]:
        def make(rng: np.random.Generator) -> _Batches:
            zero = np.zeros((batch_size, 1), np.int32)
            while True:
                n = int(rng.integers(low, high + 1))
                w = rng.integers(1, vocab_size, (batch_size, n), dtype=np.int32)
                copy = w[:, ::-1] if reverse else w
                x = np.concatenate([zero, w, zero, copy], axis=1)
                weights = np.zeros(x.shape, np.float32)
                weights[:, n + 2 :] = 1
                x = _pad(x, pad_to_multiple)
                yield x, x, _pad(weights, pad_to_multiple)

        return make

    return _inputs(
        batches(1, train_length), batches(eval_min_length, eval_max_length), seed
    )


@gin.configurable(module="retrax.data")
def addition_inputs(
    vocab_size: int = _REQUIRED,
    batch_size: int = _REQUIRED,
    train_length: int = _REQUIRED,
    eval_min_length: int = _REQUIRED,
    eval_max_length: int = _REQUIRED,
    pad_to_multiple: int = 32,
    encdec: bool = False,
    seed: int = 0,
) -> Inputs:
    """Returns the addition task: two numbers, then their sum.

    Numbers are written lowest digit first in base vocab_size - 2; digit d is symbol
    d + 1, the signs "+" and "=" are both symbol vocab_size - 1, and 0 is padding. A
    batch is (x, x, weights) with x = a + b = sum and weight on the sum alone, or with
    `encdec` (a + b, sum, weights).

    Args:
      vocab_size: symbols, padding included; at least 4.
      batch_size: examples in a batch.
      train_length: longest "a + b" in training; the shortest is 3.
      eval_min_length: shortest "a + b" in evaluation; at least 3.
      eval_max_length: longest "a + b" in evaluation.
      pad_to_multiple: lengths are padded with 0 to a multiple of this.
      encdec: whether inputs and targets are separate sequences.
      seed: non-negative int.
    """

    def batches(low: int, high: int) -> Callable[[np.random.Generator], _Batches]:
        def make(rng: np.random.Generator) -> _Batches:
            while True:
                rows = [
                    _sum_example(rng, low, high, vocab_size, encdec)
                    for _ in range(batch_size)
                ]
                columns = zip(*rows, strict=True)
                yield tuple(_stack(column, pad_to_multiple) for column in columns)

        return make

    if vocab_size < 4 or min(train_length, eval_min_length) < 3:
        raise ValueError(
            "addition_inputs needs vocab_size >= 4 and lengths >= 3, got vocab_size="
            f"{vocab_size}, train_length={train_length}, "
            f"eval_min_length={eval_min_length}"
        )
    return _inputs(
        batches(3, train_length), batches(eval_min_length, eval_max_length), seed
    )


@gin.configurable(module="retrax.data")
def sine_inputs(
    batch_size: int = _REQUIRED,
    length: int = _REQUIRED,
    max_phase: float = 2 * math.pi,
    min_period: float = 0.1,
    max_period: float = 10.0,
    seed: int = 0,
) -> Inputs:
    """Returns sines of random phase and period, as time series to predict.

    Batches are (x, zeros, x, ones), each (batch, length): observations, actions,
    targets and weights; float32, actions int32. x[t] = sin((t - phase) / period), the
    period drawn uniformly in its logarithm.
    """

    def batches(rng: np.random.Generator) -> _Batches:
        t = np.arange(length)
        ends = math.log(min_period), math.log(max_period)
        while True:
            phase = rng.uniform(0, max_phase, (batch_size, 1))
            period = np.exp(rng.uniform(*ends, (batch_size, 1)))
            x = np.sin((t - phase) / period).astype(np.float32)
            yield x, np.zeros(x.shape, np.int32), x, np.ones(x.shape, np.float32)

    return _inputs(batches, batches, seed)


def _inputs(
    train: Callable[[np.random.Generator], _Batches],
    evaluate: Callable[[np.random.Generator], _Batches],
    seed: int,
) -> Inputs:
    def source(
        make: Callable[[np.random.Generator], _Batches], branch: int
    ) -> Callable[[], _Batches]:
        return lambda: make(np.random.Generator(np.random.PCG64([seed, branch])))

    return Inputs(source(train, 0), source(evaluate, 1))


def _sum_example(
    rng: np.random.Generator, low: int, high: int, vocab_size: int, encdec: bool
) -> list[np.ndarray]:
    base, sign = vocab_size - 2, [vocab_size - 1]
    n = int(rng.integers(low, high + 1))
    n_first = int(rng.integers(1, n - 1))
    first = rng.integers(0, base, n_first).tolist()
    second = rng.integers(0, base, n - 1 - n_first).tolist()
    total = _add(first, second, base)
    question = [d + 1 for d in first] + sign + [d + 1 for d in second]
    answer = [d + 1 for d in total]
    if encdec:
        ones = [1.0] * len(answer)
        parts: list[list[Any]] = [question, answer, ones]
    else:
        x = question + sign + answer
        weights = [0.0] * (len(question) + 1) + [1.0] * len(answer)
        parts = [x, x, weights]
    kinds = (np.int32, np.int32, np.float32)
    return [np.asarray(p, k) for p, k in zip(parts, kinds, strict=True)]


def _add(first: list[int], second: list[int], base: int) -> list[int]:
    """Adds two numbers of any length, lowest digit first; no leading zeros."""
    total, carry = [], 0
    for i in range(max(len(first), len(second)) + 1):
        carry += sum(digits[i] for digits in (first, second) if i < len(digits))
        total.append(carry % base)
        carry //= base
    while len(total) > 1 and not total[-1]:
        total.pop()
    return total


def _pad(x: np.ndarray, multiple: int) -> np.ndarray:
    return np.pad(x, [(0, 0), (0, -x.shape[1] % multiple)])


def _stack(rows: Sequence[np.ndarray], multiple: int) -> np.ndarray:
    longest = max(len(row) for row in rows)
    out = np.zeros((len(rows), longest + -longest % multiple), rows[0].dtype)
    for target, row in zip(out, rows, strict=True):
        target[: len(row)] = row
    return out
