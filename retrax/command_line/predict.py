"""`retrax predict`: samples from the model that a run has trained.

Beside `commands`, which calls `run`.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from retrax.command_line import configs
from retrax.data.inputs import Inputs
from retrax.errors import ConfigError

__all__ = ["run"]

_DEFAULT_LENGTH = 200


def run(args: argparse.Namespace) -> int:
    """Prints a sample for each prompt; returns the exit code."""
    bound = configs.read_run(args.dir, args.config_file, args.config)
    inputs = configs.inputs_of(bound)
    _check_takes_tokens(args.dir, inputs)
    prompts = _prompts(args)
    model = _load(args.dir, bound["model"], args.checkpoint)
    if model.n_in > 1 and "" in prompts:
        raise ConfigError("this model needs an input to go on from: give --prompt.")
    ids = [_encode(inputs.tokenizer, prompt) for prompt in prompts]
    length = _length(model, bound["model"], ids, args.length)
    samples = _sampled(model, ids, length, args)
    for prompt, sample in zip(prompts, samples, strict=True):
        # A language model goes on where the prompt ends; others give something new.
        before = prompt if model.n_in == 1 else ""
        print(before + _decode(inputs.tokenizer, sample, bool(before)))
    return 0


def _check_takes_tokens(folder: str, inputs: Inputs) -> None:
    dtype, shape = inputs.input_dtype, inputs.input_shape
    if not np.issubdtype(dtype, np.integer) or len(shape) != 1:
        raise ConfigError(
            f"the model of {folder} was not trained on text: an input is {dtype} of "
            f"shape {shape}, not a row of token ids. `retrax predict` samples from "
            "models of sequences; `retrax eval` shows how good any model is."
        )


def _prompts(args: argparse.Namespace) -> list[str]:
    if args.prompt_file is None:
        return [args.prompt]
    prompts = Path(args.prompt_file).read_text().splitlines()
    if not prompts:
        raise ConfigError(f"{args.prompt_file} holds no prompt.")
    return prompts


def _load(folder: str, make_model: Any, checkpoint: str | None) -> Any:
    """The trained model, in mode 'predict'."""
    import jax

    from retrax.layers import tree
    from retrax.layers.files import load_tree
    from retrax.shapes import ShapeDtype
    from retrax.trainer import load_trainer_state

    trained = make_model(mode="eval")
    run_state = load_trainer_state(folder, trained, checkpoint)
    model = make_model(mode="predict")
    token = ShapeDtype((1, 1), np.int32)
    sig = token if model.n_in == 1 else (token,) * model.n_in
    state = jax.jit(lambda key: model.init(sig, rng=key)[1])(jax.random.key(0))
    # What was learned beside the weights; caches are of mode 'predict' only.
    learned = dict(tree.named_leaves(trained, run_state.model_state))
    model.weights = run_state.opt_state.weights
    model.state = load_tree(model, state, learned, strict=False)
    return model


def _length(
    model: Any, make_model: Any, prompts: Sequence[np.ndarray], wanted: int | None
) -> int:
    """How many new tokens to sample: those asked for, or as many as there is room for.

    Raises:
      ConfigError: the model cannot keep so many.
    """
    from retrax.layers import longest_sequence

    limit = longest_sequence(model)
    if limit is None:
        return _DEFAULT_LENGTH if wanted is None else wanted
    n_prompt = max(map(len, prompts)) if model.n_in == 1 else 0
    room = limit - n_prompt
    if wanted is None and room > 0:
        return min(_DEFAULT_LENGTH, room)
    if wanted is None or wanted > room:
        n = _DEFAULT_LENGTH if wanted is None else wanted
        shorter = f"--length={room} or less" if room > 0 else "a shorter prompt"
        name = getattr(make_model, "__name__", "the model")
        raise ConfigError(
            f"a prompt of {n_prompt} tokens and {n} new ones (--length) do not fit: "
            f"the model keeps sequences of max_len={limit} tokens. Give {shorter}; or "
            "make it longer, which works if its positions are not trained: "
            f"--config='{name}.max_len = {n_prompt + n}'."
        )
    return wanted


def _sampled(
    model: Any, prompts: Sequence[np.ndarray], n_new: int, args: argparse.Namespace
) -> list[np.ndarray]:
    """One sample for each prompt; prompts of one length go together."""
    import jax

    from retrax.supervised.decoding import autoregressive_sample

    samples: dict[int, np.ndarray] = {}
    for length in sorted({len(p) for p in prompts}):
        places = [i for i, p in enumerate(prompts) if len(p) == length]
        batch = np.stack([prompts[i] for i in places])
        rows = autoregressive_sample(
            model,
            batch if length else None,
            batch_size=len(places),
            temperature=args.temperature,
            max_length=n_new,
            rng=jax.random.key(args.seed),
            top_k=args.top_k,
            top_p=args.top_p,
        )
        samples.update(zip(places, rows, strict=True))
    return [samples[i] for i in range(len(prompts))]


def _encode(tokenizer: Any, prompt: str) -> np.ndarray:
    if tokenizer is not None:
        return np.asarray(tokenizer.encode(prompt), np.int32)
    try:
        return np.array([int(word) for word in prompt.split()], np.int32)
    except ValueError as e:
        raise ConfigError(
            f"the inputs of this run have no tokenizer, so a prompt has to be ids such "
            f"as '3 4 5'; got {prompt!r}."
        ) from e


def _decode(tokenizer: Any, ids: np.ndarray, goes_on: bool) -> str:
    if tokenizer is not None:
        return tokenizer.decode(ids)
    return (" " if goes_on else "") + " ".join(str(i) for i in ids)
