"""A model in mode 'predict' as a pure function of its next tokens, and compiled loops.

Above `sampling`, under `beam` and `decoding`. The model itself is never changed: the
state that a loop starts from is made inside of the compiled code.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable
from typing import Any

import jax
import jax.numpy as jnp

from retrax.layers import sequences
from retrax.layers.base import Layer
from retrax.shapes import ShapeDtype, signature
from retrax.supervised.sampling import PAD_ID, Rule, keys_of, next_tokens

__all__ = [
    "compiled",
    "eval_state",
    "eval_step",
    "keeps_sequences",
    "run",
    "sample_loop",
    "sample_step",
    "start_state",
]

# (weights, state, ids: (batch, length), inputs: tuple) -> ...
_PROGRAMS: weakref.WeakKeyDictionary[Layer, dict[Hashable, Callable[..., Any]]] = (
    weakref.WeakKeyDictionary()
)


def compiled(
    model: Layer, key: Hashable, program: Callable[..., Any]
) -> Callable[..., Any]:
    """Returns `program(model, ...)` compiled, the same one whenever it is asked for.

    Args:
      model: the model; it lives no longer for it.
      key: tells programs of one model apart; shapes are told apart by JAX.
      program: takes the model first; must not hold it otherwise.
    """
    programs = _PROGRAMS.setdefault(model, {})
    if key not in programs:
        reference = weakref.ref(model)

        def with_model(*args: Any) -> Any:
            return program(reference(), *args)

        programs[key] = jax.jit(with_model)
    return programs[key]


def start_state(model: Layer, state: Any, ids: Any, inputs: tuple[Any, ...]) -> Any:
    """Returns the state before the first token, for the batch size of `ids`.

    The model may have been initialised for another batch size, or not at all: what
    depends on it is made by `init` here. What was learned is taken from `state`. To be
    compiled only, since `init` outside of compiled code changes the model.

    Raises:
      ValueError: no layer keeps state of a sequence.
    """
    fresh = _fresh_state(model, ids, inputs)
    if not keeps_sequences(model, fresh):
        raise ValueError(
            f"decoding token by token needs a model made with mode='predict', but no "
            f"layer of {model.name} keeps anything from one call to the next. Make it "
            "with mode='predict', or pass eval_mode=True with a model of mode 'eval'. "
            "(A layer of your own that keeps such state defines start_state.)"
        )
    if not jax.tree.leaves(state):
        return fresh
    kept = sequences.initial_state(model, state)
    if jax.tree.structure(kept) != jax.tree.structure(fresh):
        raise ValueError(
            f"the state of {model.name} is not structured as the one that init makes: "
            f"{jax.tree.structure(kept)} instead of {jax.tree.structure(fresh)}; call "
            "model.init(signature) and set the weights again."
        )
    return jax.tree.map(_of_this_batch, kept, fresh)


def eval_state(model: Layer, state: Any, ids: Any, inputs: tuple[Any, ...]) -> Any:
    """Returns the state of a model of mode 'eval'. To be compiled, as `start_state`.

    Raises:
      ValueError: the model has mode 'predict'.
    """
    fresh = _fresh_state(model, ids, inputs)
    if keeps_sequences(model, fresh):
        raise ValueError(
            f"eval_mode=True needs a model of mode 'eval', but {model.name} was made "
            "with mode='predict'; leave eval_mode out."
        )
    return state if jax.tree.leaves(state) else fresh


def keeps_sequences(model: Layer, state: Any) -> bool:
    """Says whether a layer holds state that belongs to one sequence.

    To be called on traced values or on any but scalars of Python.
    """
    start = jax.tree.leaves(sequences.initial_state(model, state))
    held = {id(x) for x in jax.tree.leaves(state)}
    return any(id(x) not in held for x in start)


def run(
    model: Layer, weights: Any, state: Any, ids: Any, inputs: tuple[Any, ...], rng: Any
) -> tuple[Any, Any]:
    """Returns (the logits (batch, length, vocab_size) after each id, new state).

    Of a model with several outputs the first are the logits.

    Raises:
      ValueError: they have another shape.
    """
    x = (*inputs, ids) if inputs else ids
    y, state = model.pure_fn(x, weights, state, rng)
    logits = y[0] if isinstance(y, (tuple, list)) else y
    if logits.ndim != 3 or logits.shape[:2] != ids.shape:
        raise ValueError(
            f"{model.name} gives outputs of shape {logits.shape} for ids of shape "
            f"{ids.shape}; decoding needs logits (batch, length, vocab_size)."
        )
    dtype = jnp.promote_types(logits.dtype, jnp.float32)
    return logits.astype(dtype), state


def sample_step(
    model: Layer,
    rule: Rule,
    weights: Any,
    state: Any,
    ids: Any,
    inputs: tuple[Any, ...],
    rngs: tuple[Any, Any],
    t: Any,
    values: dict[str, Any],
) -> tuple[Any, Any, Any]:
    """Feeds the next ids and chooses token t; `rngs` are of `keys_of`.

    Returns:
      (tokens: (batch,) int32, which rows' outputs hold NaN: (batch,) bool, state).
    """
    logits, state = run(model, weights, state, ids, inputs, rngs[1])
    logits = logits[:, -1]
    tokens = next_tokens(logits, rngs[0], t, rule, values)
    return tokens, _is_nan_at(logits, tokens), state


def eval_step(
    model: Layer,
    rule: Rule,
    weights: Any,
    state: Any,
    padded: tuple[Any, Any],
    inputs: tuple[Any, ...],
    rngs: tuple[Any, Any],
    t: Any,
    values: dict[str, Any],
) -> tuple[Any, Any, Any]:
    """Does what `sample_step` does with a model of mode 'eval'.

    Args:
      padded: (all ids so far, padded on the right: (batch, longer) int32, how many).
    """
    ids, n = padded
    logits, _ = run(model, weights, state, ids, inputs, rngs[1])
    # The model shifts by itself: output n stems from the ids before n.
    logits = jax.lax.dynamic_index_in_dim(logits, n, axis=1, keepdims=False)
    tokens = next_tokens(logits, rngs[0], t, rule, values)
    return tokens, _is_nan_at(logits, tokens), state


def sample_loop(
    model: Layer,
    rule: Rule,
    max_length: int,
    weights: Any,
    state: Any,
    ids: Any,
    inputs: tuple[Any, ...],
    rng: Any,
    values: dict[str, Any],
) -> tuple[Any, Any, Any, Any]:
    """Feeds the prompt at once, then one token after another, until all rows ended.

    Returns:
      (tokens: (batch, max_length) int32, how many columns are filled, whether the last
      one stems from NaN, the state).
    """

    # At once, since deriving keys costs more in a loop than drawing by them.
    n_rows = ids.shape[0]
    all_rngs = jax.vmap(lambda t: keys_of(rng, t, n_rows))(jnp.arange(max_length))

    def choose(state: Any, ids: Any, t: Any, done: Any) -> Any:
        rngs = jax.tree.map(lambda keys: keys[t], all_rngs)
        tokens, broken, state = sample_step(
            model, rule, weights, state, ids, inputs, rngs, t, values
        )
        tokens = jnp.where(done, PAD_ID, tokens)
        failed = jnp.any(broken & ~done)
        done |= tokens == values["eos_id"]
        goes_on = (t + 1 < max_length) & ~jnp.all(done) & ~failed
        return tokens, (done, failed, goes_on), state

    def one_more(loop: Any) -> Any:
        t, out, tokens, (done, _, _), state = loop
        tokens, ends, state = choose(state, tokens[:, None], t, done)
        out = jax.lax.dynamic_update_slice(out, tokens[:, None], (0, t))
        return t + 1, out, tokens, ends, state

    state = start_state(model, state, ids, inputs)
    nobody = jnp.zeros(n_rows, bool)
    tokens, ends, state = choose(state, ids, jnp.int32(0), nobody)
    out = jnp.full((n_rows, max_length), PAD_ID, jnp.int32).at[:, 0].set(tokens)
    loop = (jnp.int32(1), out, tokens, ends, state)
    # Whether to go on is known in the body: a condition costs as much as its steps.
    t, out, _, (_, failed, _), state = jax.lax.while_loop(
        lambda loop: loop[3][2], one_more, loop
    )
    return out, t, failed, state


def _is_nan_at(logits: Any, tokens: Any) -> Any:
    """Which rows hold NaN, (batch,) bool: where there is any, it is what is chosen."""
    chosen = jnp.take_along_axis(logits, tokens[:, None], axis=-1, mode="clip")
    return jnp.isnan(chosen[:, 0])


def _fresh_state(model: Layer, ids: Any, inputs: tuple[Any, ...]) -> Any:
    tokens = ShapeDtype((ids.shape[0], 1), ids.dtype)
    sig = (*signature(inputs), tokens) if inputs else tokens
    return model.init(sig, rng=jax.random.key(0))[1]


def _of_this_batch(kept: Any, fresh: Any) -> Any:
    same = kept.shape == fresh.shape and kept.dtype == fresh.dtype
    return kept if same else fresh
