"""The language model of language_model.py, written by hand and in other frameworks.

Pre-norm blocks of causal attention and a feed-forward part with ReLU, learned
positions, Adam. Each function takes a `Shape` and batches (n, batch, length) of ids,
and returns a step: from its number to the loss, as a value still being computed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from step_time import cross_entropy

LR = 1e-3
EPS = 1e-6
Step = Callable[[int], Any]


class Shape(NamedTuple):
    """Sizes of the network and the batch."""

    n_layers: int
    d: int = 256
    d_ff: int = 1024
    n_heads: int = 4
    n_ids: int = 256
    batch: int = 8
    length: int = 128


def shifted(ids: Any) -> Any:
    """The ids before each position: a zero first."""
    return jnp.pad(ids, ((0, 0), (1, 0)))[:, :-1]


def attention(qkv: jax.Array, n_heads: int) -> jax.Array:
    """Causal attention from joined (batch, length, 3 d) queries, keys and values."""
    b, t, d3 = qkv.shape
    q, k, v = jnp.moveaxis(qkv.reshape(b, t, 3, n_heads, d3 // 3 // n_heads), 2, 0)
    mixed = jax.nn.dot_product_attention(q, k, v, is_causal=True)
    return mixed.reshape(b, t, d3 // 3)


# --- By hand --------------------------------------------------------------------------


def norm_one_pass(x: jax.Array, scale: jax.Array, shift: jax.Array) -> jax.Array:
    """LayerNorm from mean and mean of squares."""
    mean = jnp.mean(x, -1, keepdims=True)
    square = jnp.mean(jax.lax.square(x), -1, keepdims=True)
    inverse = jax.lax.rsqrt(jnp.maximum(0, square - mean * mean) + EPS)
    return (x - mean) * (inverse * scale) + shift


def norm_two_passes(x: jax.Array, scale: jax.Array, shift: jax.Array) -> jax.Array:
    """LayerNorm from the mean, and the mean of squared distances to it."""
    centred = x - jnp.mean(x, -1, keepdims=True)
    variance = jnp.mean(jax.lax.square(centred), -1, keepdims=True)
    return centred * (jax.lax.rsqrt(variance + EPS) * scale) + shift


def hand_written(
    shape: Shape, ids: np.ndarray, norm: Any = norm_one_pass, barrier: bool = False
) -> Step:
    """Plain functions and Adam written out.

    Args:
      shape: sizes.
      ids: batches.
      norm: how LayerNorm is computed.
      barrier: keeps the compiler from computing the residual stream several times.
    """
    weights = _weights(shape)
    moments = jax.tree.map(lambda w: (jnp.zeros_like(w), jnp.zeros_like(w)), weights)

    def dense(w: Any, x: jax.Array) -> jax.Array:
        return x @ w["w"] + w["b"]

    def block(w: Any, x: jax.Array) -> jax.Array:
        if barrier:
            x = jax.lax.optimization_barrier(x)
        x = x + dense(w["out"], attention(dense(w["qkv"], norm(x, *w["n1"])), 4))
        return x + dense(w["down"], jax.nn.relu(dense(w["up"], norm(x, *w["n2"]))))

    def loss_fn(w: Any, y: jax.Array) -> jax.Array:
        x = w["embed"][shifted(y)] + w["positions"]
        for b in w["blocks"]:
            x = block(b, x)
        return cross_entropy(dense(w["head"], norm(x, *w["n"])), y)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def update(weights: Any, moments: Any, i: Any, y: Any) -> Any:
        loss, grads = jax.value_and_grad(loss_fn)(weights, y)
        c1, c2 = 1 - 0.9 ** (i + 1.0), 1 - 0.999 ** (i + 1.0)

        def adam(w: Any, g: Any, mv: Any) -> Any:
            m, v = 0.9 * mv[0] + 0.1 * g, 0.999 * mv[1] + 0.001 * g * g
            return w - LR * (m / c1) / (jnp.sqrt(v / c2) + 1e-8), (m, v)

        leaves, treedef = jax.tree.flatten(weights)
        pairs = map(
            adam, leaves, jax.tree.leaves(grads), treedef.flatten_up_to(moments)
        )
        new, new_moments = zip(*pairs, strict=True)
        return treedef.unflatten(new), treedef.unflatten(new_moments), loss

    def step(i: int) -> Any:
        nonlocal weights, moments
        weights, moments, loss = update(
            weights, moments, np.int32(i), ids[i % len(ids)]
        )
        return loss

    return step


def _weights(shape: Shape) -> dict[str, Any]:
    keys = _keys()

    def matrix(n_in: int, n_out: int) -> Any:
        w = jax.random.normal(next(keys), (n_in, n_out)) / np.sqrt(n_in)
        return {"w": w, "b": jnp.zeros(n_out)}

    def norm() -> Any:
        return jnp.ones(shape.d), jnp.zeros(shape.d)

    def block() -> Any:
        d, d_ff = shape.d, shape.d_ff
        return {
            "n1": norm(),
            "qkv": matrix(d, 3 * d),
            "out": matrix(d, d),
            "n2": norm(),
            "up": matrix(d, d_ff),
            "down": matrix(d_ff, d),
        }

    return {
        "embed": jax.random.normal(next(keys), (shape.n_ids, shape.d)),
        "positions": jax.random.normal(next(keys), (shape.length, shape.d)) * 0.02,
        "blocks": [block() for _ in range(shape.n_layers)],
        "n": norm(),
        "head": matrix(shape.d, shape.n_ids),
    }


def _keys() -> Iterator[Any]:
    key = jax.random.key(0)
    while True:
        key, sub = jax.random.split(key)
        yield sub


# --- Frameworks -----------------------------------------------------------------------


def nnx(shape: Shape, ids: np.ndarray) -> Step:
    """Flax NNX with Optax."""
    import optax
    from flax import nnx

    rngs, d = nnx.Rngs(0), shape.d

    class Block(nnx.Module):
        def __init__(self) -> None:
            self.n1, self.n2 = nnx.LayerNorm(d, rngs=rngs), nnx.LayerNorm(d, rngs=rngs)
            self.qkv = nnx.Linear(d, 3 * d, rngs=rngs)
            self.out = nnx.Linear(d, d, rngs=rngs)
            self.up = nnx.Linear(d, shape.d_ff, rngs=rngs)
            self.down = nnx.Linear(shape.d_ff, d, rngs=rngs)

        def __call__(self, x: Any) -> Any:
            x = x + self.out(attention(self.qkv(self.n1(x)), shape.n_heads))
            return x + self.down(nnx.relu(self.up(self.n2(x))))

    class Model(nnx.Module):
        def __init__(self) -> None:
            self.embed = nnx.Embed(shape.n_ids, d, rngs=rngs)
            positions = jax.random.normal(jax.random.key(1), (shape.length, d))
            self.positions = nnx.Param(positions * 0.02)
            self.blocks = nnx.List([Block() for _ in range(shape.n_layers)])
            self.n = nnx.LayerNorm(d, rngs=rngs)
            self.head = nnx.Linear(d, shape.n_ids, rngs=rngs)

        def __call__(self, x: Any) -> Any:
            x = self.embed(x) + self.positions[...]
            for block in self.blocks:
                x = block(x)
            return self.head(self.n(x))

    model = Model()
    optimizer = nnx.Optimizer(model, optax.adam(LR), wrt=nnx.Param)

    @nnx.jit(donate_argnums=(0, 1))
    def update(model: Any, optimizer: Any, y: Any) -> Any:
        loss, grads = nnx.value_and_grad(lambda m: cross_entropy(m(shifted(y)), y))(
            model
        )
        optimizer.update(model, grads)
        return loss

    return lambda i: update(model, optimizer, ids[i % len(ids)])


def equinox(shape: Shape, ids: np.ndarray) -> Step:
    """Equinox with Optax."""
    import equinox as eqx
    import optax

    keys, d = _keys(), shape.d

    def each(fn: Any) -> Any:
        return jax.vmap(jax.vmap(fn))

    def linear(n_in: int, n_out: int) -> Any:
        return eqx.nn.Linear(n_in, n_out, key=next(keys))

    class Block(eqx.Module):
        n1: Any
        n2: Any
        qkv: Any
        out: Any
        up: Any
        down: Any

        def __init__(self) -> None:
            self.n1, self.n2 = eqx.nn.LayerNorm(d), eqx.nn.LayerNorm(d)
            self.qkv, self.out = linear(d, 3 * d), linear(d, d)
            self.up, self.down = linear(d, shape.d_ff), linear(shape.d_ff, d)

        def __call__(self, x: Any) -> Any:
            mixed = attention(each(self.qkv)(each(self.n1)(x)), shape.n_heads)
            x = x + each(self.out)(mixed)
            return x + each(self.down)(jax.nn.relu(each(self.up)(each(self.n2)(x))))

    class Model(eqx.Module):
        embed: Any
        positions: Any
        blocks: Any
        n: Any
        head: Any

        def __init__(self) -> None:
            self.embed = jax.random.normal(next(keys), (shape.n_ids, d))
            self.positions = jax.random.normal(next(keys), (shape.length, d)) * 0.02
            self.blocks = [Block() for _ in range(shape.n_layers)]
            self.n, self.head = eqx.nn.LayerNorm(d), linear(d, shape.n_ids)

        def __call__(self, x: Any) -> Any:
            x = self.embed[x] + self.positions
            for block in self.blocks:
                x = block(x)
            return each(self.head)(each(self.n)(x))

    model, tx = Model(), optax.adam(LR)
    state = tx.init(eqx.filter(model, eqx.is_array))

    @eqx.filter_jit(donate="all-except-first")
    def update(y: Any, model: Any, state: Any) -> Any:
        loss, grads = eqx.filter_value_and_grad(
            lambda m: cross_entropy(m(shifted(y)), y)
        )(model)
        updates, state = tx.update(grads, state)
        return eqx.apply_updates(model, updates), state, loss

    def step(i: int) -> Any:
        nonlocal model, state
        model, state, loss = update(jnp.asarray(ids[i % len(ids)]), model, state)
        return loss

    return step


def haiku(shape: Shape, ids: np.ndarray) -> Step:
    """Haiku with Optax."""
    import haiku as hk
    import optax

    d = shape.d

    def forward(x: Any) -> Any:
        init = hk.initializers.RandomNormal(0.02)
        x = hk.Embed(shape.n_ids, d)(x)
        x = x + hk.get_parameter("positions", (shape.length, d), init=init)
        for _ in range(shape.n_layers):
            normed = hk.LayerNorm(-1, True, True)(x)
            mixed = attention(hk.Linear(3 * d)(normed), shape.n_heads)
            x = x + hk.Linear(d)(mixed)
            up = jax.nn.relu(hk.Linear(shape.d_ff)(hk.LayerNorm(-1, True, True)(x)))
            x = x + hk.Linear(d)(up)
        return hk.Linear(shape.n_ids)(hk.LayerNorm(-1, True, True)(x))

    net = hk.without_apply_rng(hk.transform(forward))
    weights = jax.jit(net.init)(jax.random.key(0), ids[0])
    tx = optax.adam(LR)
    state = tx.init(weights)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def update(weights: Any, state: Any, y: Any) -> Any:
        loss, grads = jax.value_and_grad(
            lambda w: cross_entropy(net.apply(w, shifted(y)), y)
        )(weights)
        updates, state = tx.update(grads, state)
        return optax.apply_updates(weights, updates), state, loss

    def step(i: int) -> Any:
        nonlocal weights, state
        weights, state, loss = update(weights, state, ids[i % len(ids)])
        return loss

    return step


def keras(shape: Shape, ids: np.ndarray) -> Step:
    """Keras on JAX; without learned positions, which it has no layer for."""
    import keras

    kl, d = keras.layers, shape.d
    inputs = keras.Input((shape.length,), dtype="int32")
    x = kl.Embedding(shape.n_ids, d)(inputs)
    for _ in range(shape.n_layers):
        normed = kl.LayerNormalization()(x)
        heads = kl.MultiHeadAttention(shape.n_heads, d // shape.n_heads)
        x = x + heads(normed, normed, use_causal_mask=True)
        up = kl.Dense(shape.d_ff, "relu")(kl.LayerNormalization()(x))
        x = x + kl.Dense(d)(up)
    model = keras.Model(inputs, kl.Dense(shape.n_ids)(kl.LayerNormalization()(x)))
    model.compile(
        keras.optimizers.Adam(LR),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )
    before = np.pad(ids, ((0, 0), (0, 0), (1, 0)))[:, :, :-1]
    return lambda i: model.train_on_batch(before[i % len(ids)], ids[i % len(ids)])


def torch(shape: Shape, ids: np.ndarray) -> Step:
    """PyTorch, eager."""
    import torch
    from torch import nn

    d, f = shape.d, nn.functional

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.n1, self.n2 = nn.LayerNorm(d), nn.LayerNorm(d)
            self.qkv, self.out = nn.Linear(d, 3 * d), nn.Linear(d, d)
            self.up, self.down = nn.Linear(d, shape.d_ff), nn.Linear(shape.d_ff, d)

        def forward(self, x: Any) -> Any:
            b, t, _ = x.shape
            qkv = self.qkv(self.n1(x)).view(b, t, 3, shape.n_heads, d // shape.n_heads)
            q, k, v = qkv.permute(2, 0, 3, 1, 4)
            y = f.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + self.out(y.transpose(1, 2).reshape(b, t, d))
            return x + self.down(torch.relu(self.up(self.n2(x))))

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(shape.n_ids, d)
            self.positions = nn.Parameter(torch.randn(shape.length, d) * 0.02)
            self.blocks = nn.Sequential(*[Block() for _ in range(shape.n_layers)])
            self.n, self.head = nn.LayerNorm(d), nn.Linear(d, shape.n_ids)

        def forward(self, x: Any) -> Any:
            return self.head(self.n(self.blocks(self.embed(x) + self.positions)))

    model = Model()
    optimizer = torch.optim.Adam(model.parameters(), LR)
    batches = torch.tensor(ids).long()

    def step(i: int) -> Any:
        y = batches[i % len(ids)]
        optimizer.zero_grad(set_to_none=True)
        logits = model(f.pad(y, (1, 0))[:, :-1])
        loss = f.cross_entropy(logits.reshape(-1, shape.n_ids), y.reshape(-1))
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step
