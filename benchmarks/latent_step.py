"""Time of a step of latent thoughts: retrax against the same written by hand in JAX.

The model of sudoku4_latent.gin (4 layers, width 128, a convolution of width 3, 3
thoughts, batch 32), its loss and AdamW with clipping. Both see each token once and keep
keys and values, the hand-written step by concatenating them (`--runs_anew`: both run
the model anew for each thought). Both begin at the same weights, and before anything is
timed their losses must agree. Each ratio is the median over rounds of the time in the
same round to that of the hand-written step. Prints one JSON line.

  step_trainer  LatentStepTrainer.one_step on the batches of the hand-written step
  trainer       CurriculumTrainer.train_step: stream, instances, schedule, log
  data          seconds for a batch with its instances, beside those for a step

usage: python benchmarks/latent_step.py [--rounds N] [--steps N] [--runs_anew]
"""

from __future__ import annotations

import argparse
import functools
import io
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from retrax import data, models, optimizers
from retrax.supervised.curriculum import CurriculumTrainer
from retrax.supervised.latent_config import LatentConfig
from retrax.supervised.latent_layers import LatentThoughtLoss, latent_model
from retrax.trainer.run_log import RunLog

K, SIDE, HEADS, LAYERS, WIDTH, BATCH = 3, 4, 4, 4, 128, 32
CONV = 3  # As many embeddings, up to its own, make the vector of a token.
SHARED, PREFIX = 15, 24  # Tokens that are clues in all rows, and in any with its slots.
LOC, VALUE, LEAK, AUX, POS_WEIGHT = 1.0, 1.0, 0.1, 0.1, 5.0
RATE, B1, B2, EPS, DECAY, CLIP = 1e-3, 0.9, 0.95, 1e-8, 0.005, 1.0
STAGE = 2


def made(runs_anew: bool) -> CurriculumTrainer:
    """The trainer of the shipped configuration, at its last stage of instances."""
    config = LatentConfig(
        mode="depth",
        prefix_length=PREFIX,
        shared_prefix=None if runs_anew else SHARED,
        loc_weight=LOC,
        value_weight=VALUE,
        supervise_first=True,
        leak_weight=LEAK,
        aux_weight=AUX,
    )

    def lm(mode: str) -> Any:
        return models.LatentTransformerLM(
            SIDE,
            K,
            WIDTH,
            2 * WIDTH,
            LAYERS,
            HEADS,
            dropout=0.0,
            mode=mode,
            conv_width=CONV,
        )

    return CurriculumTrainer(
        functools.partial(latent_model, lm, config),
        LatentThoughtLoss(config),
        optimizers.AdamW(RATE, DECAY, B1, B2, EPS, CLIP),
        lambda step: RATE,
        data.sudoku(n_train=1000, n_eval=64, n_latents=K, batch_size=BATCH),
        n_devices=1,
        first_stage=STAGE,
        log=RunLog(None, stream=io.StringIO()),
    )


# --- By hand ------------------------------------------------------------------------


def norm(x: Any, w: Any) -> Any:
    x = x - x.mean(-1, keepdims=True)
    return x * jax.lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + 1e-6) * w[0] + w[1]


def split(x: Any, w: Any, b: Any) -> Any:
    return (x @ w + b).reshape(*x.shape[:2], HEADS, -1)


def embedded(leaves: list[Any], ids: Any) -> Any:
    """Embeddings, each with those just before it added."""
    embedding, w = leaves[:2]
    x = jnp.pad(embedding[ids], ((0, 0), (2, 0), (0, 0)))
    return x[:, 2:] * (1 + w[0]) + x[:, 1:-1] * w[1] + x[:, :-2] * w[2]


def blocks(leaves: list[Any], x: Any, before: list[Any]) -> tuple[Any, list[Any]]:
    """Hidden vectors of inputs x after those of the keys and values in `before`."""
    rest, kept = leaves[3:], []
    n, length, d = x.shape
    for i in range(LAYERS):
        w = rest[16 * i : 16 * (i + 1)]
        y = norm(x, w[:2])
        q, k, v = (split(y, w[j], w[j + 1]) for j in (2, 4, 6))
        if before:
            k, v = (
                jnp.concatenate(pair, axis=1)
                for pair in zip(before[i], (k, v), strict=True)
            )
        kept.append((k, v))
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) * (d // HEADS) ** -0.5
        seen = jnp.tril(jnp.ones((length, k.shape[1]), bool), k.shape[1] - length)
        weights = jax.nn.softmax(jnp.where(seen, scores, -1e9), axis=-1)
        y = jnp.einsum("bhqk,bkhd->bqhd", weights, v).reshape(n, length, d)
        x = x + y @ w[8] + w[9]
        y = jax.nn.gelu(norm(x, w[10:12]) @ w[12] + w[13], approximate=False)
        x = x + y @ w[14] + w[15]
    return norm(x, rest[16 * LAYERS : 16 * LAYERS + 2]), kept


def hidden_in_one_run(leaves: list[Any], ids: Any, at: Any) -> Any:
    positions = leaves[2]
    x = embedded(leaves, ids) + positions[: ids.shape[1]]
    hidden, kept = blocks(leaves, x[:, :SHARED], [])
    parts = [hidden]
    for p in range(SHARED, PREFIX):
        is_slot = jnp.any(at == p, axis=1)[:, None, None]
        thought = hidden[:, -1:] + positions[p]
        y = jnp.where(is_slot, thought, x[:, p : p + 1])
        hidden, kept = blocks(leaves, y, kept)
        parts.append(hidden)
    return jnp.concatenate([*parts, blocks(leaves, x[:, PREFIX:], kept)[0]], axis=1)


def hidden_run_anew(leaves: list[Any], ids: Any, at: Any) -> Any:
    positions = leaves[2]
    latents = jnp.zeros((ids.shape[0], K, WIDTH))

    def run(ids: Any, n_active: int) -> Any:
        x = embedded(leaves, ids)
        for k in range(n_active):
            here = jnp.arange(ids.shape[1]) == at[:, k, None]
            x = jnp.where(here[..., None], latents[:, k, None], x)
        return blocks(leaves, x + positions[: ids.shape[1]], [])[0]

    for j in range(K):
        hidden = run(ids[:, :PREFIX], j)
        z = hidden[jnp.arange(ids.shape[0]), at[:, 0] - 1 + j]
        latents = latents.at[:, j].set(z)
    return run(ids, K)


def loss_of(leaves: list[Any], batch: Any, runs_anew: bool) -> Any:
    tokens, _, start, _, candidates = batch
    ids, labels, n = tokens[:, :-1], tokens[:, 1:], tokens.shape[0]
    at = 3 * start + jnp.arange(K)
    hidden = (hidden_run_anew if runs_anew else hidden_in_one_run)(leaves, ids, at)
    head, cand_w, cand_b = leaves[-3:]
    logits = hidden @ head
    cand = jnp.take_along_axis(hidden, at[..., None], axis=1) @ cand_w + cand_b
    cand = cand.reshape(n, K, SIDE * SIDE, SIDE)
    i, base = jnp.arange(ids.shape[1]), 3 * start + K
    mask, value = i >= base - 1, (i + 1 - base) % 3 == 2
    log_p = jax.nn.log_softmax(logits)
    ce = -jnp.take_along_axis(log_p, labels[..., None], axis=-1)[..., 0]
    ce = jnp.sum(ce * mask * jnp.where(value, VALUE, LOC)) / mask.sum()
    row = jnp.pad(ids, ((0, 0), (1, 0)))[:, :-1]
    cell = jnp.clip(row * SIDE + ids, 0, SIDE * SIDE - 1)
    sets = jnp.take_along_axis(candidates[:, STAGE], cell, axis=1)
    inside = log_p[..., 1 : SIDE + 1]
    inside = jnp.where(sets[..., None] >> jnp.arange(SIDE) & 1, inside, -jnp.inf)
    counted = mask & value & (sets != 0)
    leak = -jax.nn.logsumexp(jnp.where(counted[..., None], inside, 0.0), axis=-1)
    leak = jnp.sum(jnp.where(counted, leak, 0.0)) / counted.sum()
    bits = candidates[..., None] >> jnp.arange(SIDE) & 1
    bce = POS_WEIGHT * bits * jax.nn.log_sigmoid(cand)
    bce = -jnp.mean(bce + (1 - bits) * jax.nn.log_sigmoid(-cand), axis=-1)
    empty = candidates != 0
    aux = jnp.mean(jnp.sum(bce * empty, axis=-1) / empty.sum(-1))
    return ce + LEAK * leak + AUX * aux


@functools.partial(jax.jit, donate_argnums=0, static_argnums=2)
def by_hand(carry: Any, batch: Any, runs_anew: bool) -> tuple[Any, Any]:
    leaves, m, v, t = carry
    loss, grads = jax.value_and_grad(loss_of)(leaves, batch, runs_anew)
    size = jnp.sqrt(sum(jnp.sum(g * g) for g in grads))
    grads = [g * jnp.minimum(1.0, CLIP / size) for g in grads]
    t = t + 1
    m = [B1 * a + (1 - B1) * g for a, g in zip(m, grads, strict=True)]
    v = [B2 * a + (1 - B2) * g * g for a, g in zip(v, grads, strict=True)]
    new = []
    for w, a, b in zip(leaves, m, v, strict=True):
        step = (a / (1 - B1**t)) / (jnp.sqrt(b / (1 - B2**t)) + EPS)
        new.append(w - RATE * (step + DECAY * w))
    return (new, m, v, t), loss


# --- Measuring ----------------------------------------------------------------------


def loops(
    trainer: CurriculumTrainer, runs_anew: bool
) -> dict[str, Callable[[int], None]]:
    """Functions of a number of steps, compiled; their losses agree."""
    step_trainer, stream = trainer.step_trainer, trainer.train_stream
    plan = trainer.plan(1)
    step_trainer.plan = plan
    batches = [trainer.instances(next(stream), i, plan) for i in range(8)]
    leaves = [jnp.array(w, copy=True) for w in jax.tree.leaves(trainer.model_weights)]
    zeros = [jnp.zeros_like(w) for w in leaves]
    state = [(leaves, zeros, [z + 0 for z in zeros], jnp.float32(0))]
    key = jax.random.key(0)
    for batch in batches[:3]:
        state[0], loss = by_hand(state[0], batch, runs_anew)
        ours, _ = step_trainer.one_step(batch, key, learning_rate=RATE)
        if abs(float(loss) - float(ours)) > 1e-4:
            raise SystemExit(f"losses differ: {float(loss)} and {float(ours)}")

    def hand(n: int) -> None:
        for i in range(n):
            state[0], _ = by_hand(state[0], batches[i % 8], runs_anew)
        jax.block_until_ready(state[0])

    def step(n: int) -> None:
        for i in range(n):
            step_trainer.one_step(batches[i % 8], key, learning_rate=RATE)
        jax.block_until_ready(step_trainer.carry)

    def whole(n: int) -> None:
        for _ in range(n):
            trainer.train_step(next(stream))
        jax.block_until_ready(step_trainer.carry)

    def read(n: int) -> None:
        for i in range(n):
            trainer.instances(next(stream), i, plan)

    return {"hand_written": hand, "step_trainer": step, "trainer": whole, "data": read}


def main() -> None:
    """Measures, and prints a JSON line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--steps", type=int, default=10, help="steps in a round")
    parser.add_argument("--runs_anew", action="store_true", help="see above")
    args = parser.parse_args()
    trainer = made(args.runs_anew)
    found = loops(trainer, args.runs_anew)
    times: dict[str, list[float]] = {name: [] for name in found}
    for _ in range(args.rounds):
        for name, loop in found.items():
            start = time.perf_counter()
            loop(args.steps)
            times[name].append((time.perf_counter() - start) / args.steps)
    hand = np.array(times["hand_written"])
    ratios = {
        name: round(statistics.median((np.array(t) / hand).tolist()), 3)
        for name, t in times.items()
    }
    best = {name: round(1e3 * min(t), 3) for name, t in times.items()}
    print(
        json.dumps(
            {
                "benchmark": "latent_step",
                "runs_anew": args.runs_anew,
                "ratio": ratios,
                "best_ms": best,
            }
        )
    )


if __name__ == "__main__":
    main()
