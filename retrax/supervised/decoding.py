"""From a trained model to sequences: sampling, token by token, and beam search.

Last in the order of decoding, above `sampling`, `cached_model` and `beam`. Names and
first arguments are Trax's; its faults are not kept: nothing is drawn from a global
random state, the model's own state is neither read nor left behind from one call to the
next, rows stop at their own end, and beam search heeds ends and lengths.

A sequence begins with `start_id`, the id that the model's shift to the right puts first
in training, and a prompt follows it. A model made with mode='predict' sees each token
once; the loop over tokens is compiled as a whole. With eval_mode=True a model of mode
'eval', which shifts by itself, sees all tokens anew each time.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from retrax.layers import sequences
from retrax.layers.base import Layer
from retrax.supervised import beam, cached_model
from retrax.supervised.decoding_call import Call, check_lengths, checked_call
from retrax.supervised.sampling import PAD_ID, Rule, keys_of, rule_and_values

__all__ = ["autoregressive_sample", "autoregressive_sample_stream", "beam_search"]


def autoregressive_sample(
    model: Layer,
    inputs: Any = None,
    batch_size: int = 1,
    temperature: float = 1.0,
    start_id: Any = 0,
    eos_id: int | None = 1,
    max_length: int = 100,
    accelerate: bool = True,
    eval_mode: bool = False,
    eval_min_length: int = 1,
    *,
    rng: Any = None,
    top_k: int | None = None,
    top_p: float | None = None,
    min_length: int = 0,
) -> np.ndarray:
    """Samples a batch of sequences.

    Args:
      model: language model made with mode='predict', or encoder-decoder, with its
        weights set. It need not be initialised for this batch size and is not changed.
      inputs: (batch_size, length) int. A language model (n_in 1) takes them as the
        prompt, which is not part of the result; a model with more inputs takes them as
        all but the last one (a tuple if these are several). One row serves all rows.
      batch_size: number of sequences; 1 for as many as `inputs` has.
      temperature: divides the logits; 0 takes the most probable token.
      start_id: the id that all sequences begin with, or one for each: (batch_size,) or
        (batch_size, 1) int. Not used in eval mode.
      eos_id: id that ends a row; None (or an id out of the vocabulary) for none.
      max_length: greatest number of new tokens, the end included.
      accelerate: False runs step by step, not compiled: slow, but an error inside the
        model is raised where it happens.
      eval_mode: the model has mode 'eval' and is run on the whole sequence each time,
        padded on the right with zeros to a power of 2, which has to be no more than its
        greatest length. Slow; every causal model can do it.
      eval_min_length: least length to pad to in eval mode.
      rng: random key; None is `jax.random.key(0)`, the same every time.
      top_k: choose among this many of the most probable tokens.
      top_p: choose among the most probable tokens that have this probability together.
      min_length: number of tokens that a row has at least before its end.

    Returns:
      (batch_size, longest row) int32. A row holds its tokens up to and with the first
      eos_id, then zeros. Rows do not depend on each other: row i is the same in a batch
      of any size.

    Raises:
      ValueError: an argument is out of range; the model has no mode 'predict'; the
        sequence is longer than what it can keep; its outputs are NaN.

    Example:
      >>> from retrax import layers as tl
      >>> from retrax.shapes import ShapeDtype
      >>> layers = [tl.Embedding(9, 8), tl.GRU(8, mode='predict'), tl.Dense(9)]
      >>> lm = tl.Serial(tl.ShiftRight(mode='predict'), layers)
      >>> _ = lm.init(ShapeDtype((1, 1), 'int32'), rng=jax.random.key(0))
      >>> prompt = np.array([[2, 3], [4, 5]])
      >>> autoregressive_sample(lm, prompt, eos_id=None, max_length=4).shape
      (2, 4)
    """
    rule, values = rule_and_values(temperature, top_k, top_p, eos_id, min_length)
    check_lengths(max_length, min_length)
    call = checked_call(
        model, inputs, batch_size, start_id, rng, eval_mode, eval_min_length
    )
    if eval_mode or not accelerate:
        tokens = _tokens(call, rule, values, accelerate)
        return _collect(tokens, call.ids.shape[0], values["eos_id"], max_length)
    key = ("sample", rule, max_length)

    def program(model: Layer, *args: Any) -> Any:
        return cached_model.sample_loop(model, rule, max_length, *args)

    loop = cached_model.compiled(model, key, program)
    out, t, failed, state = loop(*call.of_the_model(), call.rng, values)
    _check_outcome(call, state, bool(failed), int(t))
    return np.asarray(out)[:, : int(t)]


def autoregressive_sample_stream(
    model: Layer,
    inputs: Any = None,
    batch_size: int = 1,
    temperature: float = 1.0,
    start_id: Any = 0,
    accelerate: bool = True,
    eval_mode: bool = False,
    eval_min_length: int = 1,
    *,
    rng: Any = None,
    top_k: int | None = None,
    top_p: float | None = None,
) -> Iterator[np.ndarray]:
    """Yields sampled tokens, (batch_size,) int32, without end.

    Arguments are those of `autoregressive_sample`, which gives the same tokens, but
    does not come back to Python for each of them. The weights are those at the call;
    several streams of one model do not disturb each other.

    Raises:
      ValueError: as there; a sequence that is too long raises when its turn comes.
    """
    rule, values = rule_and_values(temperature, top_k, top_p)
    call = checked_call(
        model, inputs, batch_size, start_id, rng, eval_mode, eval_min_length
    )
    return _tokens(call, rule, values, accelerate)


def beam_search(
    model: Layer,
    inputs: Any = None,
    batch_size: int = 1,
    n_beams: int = 2,
    start_id: Any = 0,
    eos_id: int | None = 1,
    max_length: int = 100,
    length_penalty: float = 1.0,
    accelerate: bool = True,
    *,
    rng: Any = None,
    min_length: int = 0,
) -> list[tuple[np.ndarray, np.ndarray]]:
    """Searches for the most probable sequences, keeping n_beams of them at a time.

    Each step extends the hypotheses of a row by every token. Of the n_beams best
    extensions those that end with `eos_id` are put aside; the n_beams best of the
    others go on. A row ends when n_beams hypotheses have ended, or with max_length
    tokens, when those still open count too. So n_beams=1 is greedy sampling, and a beam
    as wide as there are sequences finds the best of them all.

    The score of a sequence of n tokens, its end included, is

        log p(tokens) / ((5 + n) / 6) ** length_penalty

    (Wu et al. 2016, https://arxiv.org/abs/1609.08144, equation 14, without coverage);
    with length_penalty=0 it is the log-probability itself. Trax heeds neither eos_id
    nor length_penalty, and takes one row only.

    Args:
      n_beams: number of hypotheses for each row.
      length_penalty: the exponent; more of it favours longer sequences.
      rng: random key for layers that draw numbers; the search draws none.
      min_length: number of tokens that a sequence has at least before its end.

    The other arguments are those of `autoregressive_sample`. The model need not be
    initialised for batch_size * n_beams rows.

    Returns:
      n_beams pairs (ids: (batch_size, longest) int32, scores: (batch_size,) float), the
      best first; rows hold zeros after their end. Where there are fewer sequences than
      n_beams, ids are zeros and the score is -inf.

    Raises:
      ValueError: an argument is out of range; the model has no mode 'predict'; the
        sequence is longer than what it can keep; its outputs are NaN.
    """
    _, values = rule_and_values(0.0, eos_id=eos_id, min_length=min_length)
    values["alpha"] = float(length_penalty)
    if not np.isfinite(values["alpha"]):
        raise ValueError(f"length_penalty must be finite, got {length_penalty}.")
    if n_beams < 1:
        raise ValueError(f"n_beams must be at least 1, got {n_beams}.")
    check_lengths(max_length, min_length)
    call = checked_call(model, inputs, batch_size, start_id, rng)

    def program(model: Layer, weights: Any, state: Any, *args: Any) -> Any:
        axes = beam.batch_axes(model, weights, state, *args[:2])
        start = cached_model.start_state(model, state, *args[:2])
        return beam.beam_loop(model, n_beams, max_length, axes, weights, start, *args)

    if accelerate:
        search = cached_model.compiled(model, ("beam", n_beams, max_length), program)
        out = search(*call.of_the_model(), call.rng, values)
    else:
        axes = beam.batch_axes(model, *call.of_the_model())
        start = _started(call)
        weights, _, ids, inputs = call.of_the_model()
        with jax.disable_jit():
            out = beam.beam_loop(
                model,
                n_beams,
                max_length,
                axes,
                weights,
                start,
                ids,
                inputs,
                call.rng,
                values,
            )
    ids, lengths, scores, t, failed, state = out
    _check_outcome(call, state, bool(failed), int(t))
    ids, scores = np.asarray(ids), np.asarray(scores)
    longest = max(int(np.max(lengths)), 1)
    return [(ids[:, k, :longest], scores[:, k]) for k in range(n_beams)]


# --- Running ------------------------------------------------------------------------


def _tokens(
    call: Call, rule: Rule, values: dict[str, Any], accelerate: bool
) -> Iterator[np.ndarray]:
    """Yields (batch,) int32, one step of the model at a time."""
    cached = call.eval_min_length is None
    step_of = cached_model.sample_step if cached else cached_model.eval_step
    weights, _, ids, inputs = call.of_the_model()

    def step(model: Layer, *args: Any) -> Any:
        weights, state, fed, inputs, rng, t, values = args
        rngs = keys_of(rng, t, jax.tree.leaves(fed)[0].shape[0])
        return step_of(model, rule, weights, state, fed, inputs, rngs, t, values)

    model = call.model
    if accelerate:
        run = cached_model.compiled(model, (step_of.__name__, rule), step)
    else:
        run = functools.partial(step, model)
    state = _started(call)

    def generate(state: Any, ids: np.ndarray) -> Iterator[np.ndarray]:
        t = 0
        while True:
            fed = ids if cached else _padded(call, ids)
            tokens, broken, new_state = run(
                weights, state, fed, inputs, call.rng, np.int32(t), values
            )
            _check_outcome(call, new_state, bool(np.any(broken)), t + 1)
            tokens = np.asarray(tokens)
            yield tokens
            t += 1
            if cached:
                ids, state = tokens[:, None], new_state
            else:
                ids = np.concatenate([ids, tokens[:, None]], axis=1)

    return generate(state, ids)


def _padded(call: Call, ids: np.ndarray) -> tuple[np.ndarray, np.int32]:
    n = ids.shape[1]
    length = max(n + 1, call.eval_min_length or 1)
    length = 1 << (length - 1).bit_length()
    padded = np.pad(ids, ((0, 0), (0, length - n)), constant_values=PAD_ID)
    return padded, np.int32(n)


def _collect(
    tokens: Iterator[np.ndarray], n_rows: int, eos_id: int, max_length: int
) -> np.ndarray:
    """Gathers columns until all rows have ended."""
    done = np.zeros(n_rows, bool)
    columns: list[np.ndarray] = []
    while len(columns) < max_length and not done.all():
        column = np.where(done, PAD_ID, next(tokens))
        columns.append(column.astype(np.int32))
        done |= column == eos_id
    return np.stack(columns, axis=1)


def _started(call: Call) -> Any:
    """The state before the first token, as a value."""
    cached = call.eval_min_length is None
    make = cached_model.start_state if cached else cached_model.eval_state
    start = cached_model.compiled(call.model, make.__name__, make)
    return start(call.model.state, call.ids, call.inputs)


def _check_outcome(call: Call, state: Any, failed: bool, n_tokens: int) -> None:
    """Raises ValueError if the model ran out of room or gave NaN."""
    n_prompt = call.ids.shape[1]
    try:
        sequences.check_state(call.model, state)
    except ValueError as e:
        raise ValueError(
            f"{e} (Here it took {n_prompt} ids at once, start_id included, and was to "
            f"give token {n_tokens}.)"
        ) from e
    if failed:
        raise ValueError(
            f"the outputs of {call.model.name} are NaN at new token {n_tokens}, after "
            f"{n_prompt} given ids; look at its weights."
        )
