"""Small sequence tasks that a model can learn wholly: copy, reverse, sort.

Last in the order of `retrax.data`, beside `synthetic`. Everything is made by the seed
and the number of the batch alone, so streams have an exact position. Id 0 is padding,
id 1 ends a sequence, symbols are 2 to vocab_size - 1.

Each task comes in two forms. For encoder-decoder models a batch is (inputs, targets,
weights): the sequence, padded to max_length, and what is asked for with its end,
padded to max_length + 1. For language models (`lm=True`) it is (x, x, weights) with
x = sequence, 1, what is asked for, 1, padded to 2 max_length + 2. Only what is asked
for and its end has weight. Models shift their (decoder) input right by themselves.
"""

import operator
from collections.abc import Callable

import gin
import numpy as np

from retrax.data.arrays import ArrayStream
from retrax.data.inputs import Inputs
from retrax.data.streams import Batch, Position, Stream, check_kind

EOS_ID = 1
_FIRST_SYMBOL = 2
_EVAL_BRANCH, _TRAIN_BRANCH = 0, 1  # keep the examples of the two apart

Solve = Callable[[np.ndarray, np.ndarray], np.ndarray]


@gin.configurable(module="retrax.data")
def copy_task(
    batch_size: int = 64,
    vocab_size: int = 16,
    min_length: int = 1,
    max_length: int = 10,
    lm: bool = False,
    n_eval: int = 512,
    eval_batch_size: int = 256,
    seed: int = 0,
) -> Inputs:
    """Returns sequences to be copied, as `Inputs`.

    The training stream is endless; the evaluation stream holds n_eval examples, each
    once and the same ones every time, drawn apart from those of training (short
    sequences over few symbols occur in both all the same).

    Args:
      batch_size: training examples in a batch, over all devices together.
      vocab_size: ids, padding and end included; at least 3.
      min_length: symbols in the shortest sequence; all lengths are equally likely.
      max_length: symbols in the longest sequence.
      lm: whether batches are for language models, see above.
      n_eval: evaluation examples.
      eval_batch_size: examples in an evaluation batch; the last one is smaller.
      seed: non-negative; it fixes all examples.

    Raises:
      ValueError: a number is out of range.

    >>> inputs, targets, weights = next(copy_task(batch_size=3).train_stream())
    >>> inputs.shape, targets.shape, weights.shape, weights.dtype.name
    ((3, 10), (3, 11), (3, 11), 'float32')
    """
    task = TaskStream(_copy, batch_size, vocab_size, min_length, max_length, lm, seed)
    return _inputs(task, n_eval, eval_batch_size)


@gin.configurable(module="retrax.data")
def reverse_task(
    batch_size: int = 64,
    vocab_size: int = 16,
    min_length: int = 1,
    max_length: int = 10,
    lm: bool = False,
    n_eval: int = 512,
    eval_batch_size: int = 256,
    seed: int = 0,
) -> Inputs:
    """Returns sequences to be reversed; all is as in `copy_task`."""
    task = TaskStream(
        _reverse, batch_size, vocab_size, min_length, max_length, lm, seed
    )
    return _inputs(task, n_eval, eval_batch_size)


@gin.configurable(module="retrax.data")
def sort_task(
    batch_size: int = 64,
    vocab_size: int = 16,
    min_length: int = 1,
    max_length: int = 10,
    lm: bool = False,
    n_eval: int = 512,
    eval_batch_size: int = 256,
    seed: int = 0,
) -> Inputs:
    """Returns sequences to be sorted, smallest first; all is as in `copy_task`."""
    task = TaskStream(_sort, batch_size, vocab_size, min_length, max_length, lm, seed)
    return _inputs(task, n_eval, eval_batch_size)


class TaskStream(Stream):
    """Streams examples of a task without end; see `copy_task`.

    Args:
      solve: function of (symbols: (n, max_length) int32, padded with 0; lengths: (n,))
        that returns what is asked for, in the same form and of the same lengths.
      batch_size: examples in a batch.
      vocab_size: ids, padding and end included; at least 3.
      min_length: symbols in the shortest sequence.
      max_length: symbols in the longest sequence.
      lm: whether batches are for language models.
      seed: non-negative int.
    """

    def __init__(
        self,
        solve: Solve,
        batch_size: int,
        vocab_size: int,
        min_length: int,
        max_length: int,
        lm: bool = False,
        seed: int = 0,
    ):
        if not 1 <= min_length <= max_length:
            raise ValueError(
                "lengths must satisfy 1 <= min_length <= max_length, got min_length="
                f"{min_length}, max_length={max_length}"
            )
        if vocab_size <= _FIRST_SYMBOL:
            raise ValueError(
                f"vocab_size must be at least 3, got {vocab_size}: 0 is padding, 1 the "
                "end, symbols start at 2"
            )
        if batch_size < 1 or seed < 0:
            raise ValueError(
                "batch_size must be at least 1 and seed not negative, got batch_size="
                f"{batch_size}, seed={seed}"
            )
        self._solve = solve
        self._batch_size = operator.index(batch_size)
        self._vocab_size = operator.index(vocab_size)
        self._lengths = operator.index(min_length), operator.index(max_length)
        self._lm, self._seed = bool(lm), operator.index(seed)
        self._next = 0
        self._closed = False

    def read(self) -> Batch:
        if self._closed:
            raise StopIteration
        self._next += 1
        return self.examples(self._batch_size, _TRAIN_BRANCH, self._next - 1)

    def examples(self, n: int, *place: int) -> Batch:
        """Returns n examples, drawn by the seed and the place alone."""
        low, high = self._lengths
        # NumPy promises these raw bits for ever; the unevenness of a remainder of 64
        # random bits is nothing.
        bits = np.random.PCG64([self._seed, *place]).random_raw(n * (high + 1))
        bits = bits.reshape(n, high + 1)
        lengths = (low + bits[:, 0] % np.uint64(high - low + 1)).astype(np.int32)
        symbols = bits[:, 1:] % np.uint64(self._vocab_size - _FIRST_SYMBOL)
        symbols = symbols.astype(np.int32) + _FIRST_SYMBOL
        symbols *= np.arange(high) < lengths[:, None]
        answers = self._solve(symbols, lengths)
        if self._lm:
            return _as_lm(symbols, answers, lengths)
        targets = _with_end(answers, lengths)
        return symbols, targets, (targets != 0).astype(np.float32)

    def position(self) -> Position:
        return {
            "kind": "task",
            "batches": self._next,
            "task": getattr(self._solve, "__name__", "").strip("_"),
            "seed": self._seed,
            "batch_size": self._batch_size,
            "vocab_size": self._vocab_size,
            "min_length": self._lengths[0],
            "max_length": self._lengths[1],
            "lm": self._lm,
        }

    def seek(self, position: Position) -> None:
        mine = self.position()
        check_kind(position, "task", tuple(mine))
        for key in mine.keys() - {"batches"}:
            if position[key] != mine[key]:
                raise ValueError(
                    f"the state was saved with {key}={position[key]}, this stream has "
                    f"{key}={mine[key]}; build the stream as it was, or do not restore"
                )
        self._next = position["batches"]

    def fresh(self) -> "TaskStream":
        return TaskStream(
            self._solve,
            self._batch_size,
            self._vocab_size,
            *self._lengths,
            lm=self._lm,
            seed=self._seed,
        )

    def close(self) -> None:
        super().close()
        self._closed = True


def _inputs(task: TaskStream, n_eval: int, eval_batch_size: int) -> Inputs:
    if n_eval < 1:
        raise ValueError(f"n_eval must be at least 1, got {n_eval}")
    examples = task.examples(n_eval, _EVAL_BRANCH)
    once = ArrayStream(examples, eval_batch_size, shuffle=False, repeat=False)
    return Inputs(train_stream=task, eval_stream=once)


def _copy(symbols: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    return symbols


def _reverse(symbols: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    places = lengths[:, None] - 1 - np.arange(symbols.shape[1])
    answers = np.take_along_axis(symbols, np.maximum(places, 0), axis=1)
    return np.where(places >= 0, answers, 0)


def _sort(symbols: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    last = np.iinfo(symbols.dtype).max
    answers = np.sort(np.where(symbols == 0, last, symbols), axis=1)
    return np.where(answers == last, 0, answers)


def _with_end(symbols: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Puts the end id after each sequence; one column longer."""
    ended = np.pad(symbols, ((0, 0), (0, 1)))
    ended[np.arange(len(ended)), lengths] = EOS_ID
    return ended


def _as_lm(symbols: np.ndarray, answers: np.ndarray, lengths: np.ndarray) -> Batch:
    """Joins question and answer, each with its end, without padding between."""
    question, answer = _with_end(symbols, lengths), _with_end(answers, lengths)
    n, width = question.shape
    x = np.zeros((n, 2 * width), np.int32)
    x[:, :width] = question
    rows, columns = np.nonzero(answer)
    x[rows, lengths[rows] + 1 + columns] = answer[rows, columns]
    weights = (x != 0) & (np.arange(2 * width) > lengths[:, None])
    return x, x, weights.astype(np.float32)
