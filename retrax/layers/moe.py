"""`MoE`: a mixture of experts, of which each token uses the k best.

Above `core` and `repeat`: the experts are equal blocks, stacked as those of `Repeat`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import gin
import jax
import jax.numpy as jnp

from retrax.layers.base import Layer
from retrax.layers.core import Dense
from retrax.layers.repeat import Repeat
from retrax.layers.running import data_axis, emit, open_run, row_mask
from retrax.layers.stack import child_rngs, remember_output
from retrax.shapes import ShapeDtype

__all__ = ["MoE"]


@gin.configurable(module="retrax.layers", denylist=["mode"])
class MoE(Layer):
    """Sends each token to k of n experts and adds up what they say, by gates.

    y = sum over the k best experts e of g_e expert_e(x). The router gives
    p = softmax(x R), in float32. For k > 1 the gates are the k largest p, divided by
    their sum (Lepikhin et al. 2020, https://arxiv.org/abs/2006.16668); for k = 1 the
    gate is p itself, else the router had no gradient (Fedus et al. 2021,
    https://arxiv.org/abs/2101.03961).

    x, y: (batch, ..., d). Weights: (R, experts), the experts' stacked on a first axis.

    Capacity. In mode 'train' an expert takes at most ceil(capacity_factor * k * length
    / n_experts) tokens *of each row of the batch*, length being the tokens of a row;
    for what finds no room that expert adds 0. Places are given from the first position
    on, at one position to the better expert first. So no token can change what
    an earlier one gives, and no row another row's: results do not depend on how a
    batch is cut over devices or micro-batches (the papers count over the batch, and
    all first choices first). In other modes nothing is dropped, at the cost
    of letting each expert look at as many places as there are tokens.

    Balance. With f_e the share of choices that fall on e and P_e the mean of p_e, both
    over the batch, the loss is n sum_e f_e P_e (Fedus et al., equation 4; 1 if all
    are used alike). There are two ways to train with it:

    * By default, nothing else to do: in mode 'train' the *gradient* of balance_weight
      times the loss is added in the backward pass. The layer's value, and so the
      trainer's loss, stay without it. It works inside of Residual, Repeat and
      several devices, and takes for granted that the model's loss is differentiated
      itself, not a multiple of it.
    * return_loss=True gives (y, loss), to be added to the model's loss by hand;
      nothing is added in secret then.

    Emits 'moe_balance_loss' and 'moe_dropped', the share of choices without room.

    Example:
      >>> from retrax import layers as tl
      >>> moe = tl.MoE(lambda: [tl.Dense(16), tl.Relu(), tl.Dense(4)], n_experts=8)
      >>> block = tl.Residual(tl.LayerNorm(), moe)
      >>> _ = block.init(ShapeDtype((2, 10, 4)))
      >>> block(jnp.ones((2, 10, 4))).shape
      (2, 10, 4)
    """

    def __init__(
        self,
        expert_fn: Callable[[], Any] | Layer,
        n_experts: int,
        k: int = 2,
        capacity_factor: float | None = 1.25,
        mode: str = "train",
        balance_weight: float = 0.01,
        return_loss: bool = False,
        name: str | None = None,
    ) -> None:
        """Makes a mixture of experts.

        Args:
          expert_fn: makes one expert, a layer or list of layers from (n, d) to (n, d);
            called once. A layer given instead serves as a pattern.
          n_experts: number of experts.
          k: how many experts each token uses.
          capacity_factor: room for tokens, as a multiple of what is used if all experts
            are used alike; None: room for all.
          mode: anything but 'train' drops no token and adds no gradient.
          balance_weight: how much the balance loss counts in the default way.
          return_loss: whether to give (y, loss) instead.
          name: name of the layer.

        Raises:
          ValueError: k is not in [1, n_experts], or a factor is out of range.
        """
        super().__init__(n_out=2 if return_loss else 1, name=name)
        if not 1 <= k <= n_experts:
            raise ValueError(
                f"MoE needs 1 <= k <= n_experts, got k={k}, n_experts={n_experts}."
            )
        if capacity_factor is not None and capacity_factor <= 0:
            raise ValueError(
                f"capacity_factor must be positive, got {capacity_factor}; None leaves "
                "room for all."
            )
        if balance_weight < 0:
            raise ValueError(f"balance_weight must be >= 0, got {balance_weight}.")
        router = Dense(n_experts, use_bias=False, name="Router")
        self._sublayers = [router, Experts(expert_fn, n_experts, name="Experts")]
        self._n_experts = n_experts
        self._k = k
        self._capacity_factor = capacity_factor
        self._mode = mode
        self._balance_weight = balance_weight
        self._return_loss = return_loss

    def init_weights_and_state(self, input_signature: Any) -> None:
        """Initialises the router and the experts."""
        shape = input_signature.shape
        if len(shape) < 2:
            raise ValueError(f"MoE needs inputs of shape (batch, ..., d), got {shape}.")
        n_rows, length, d = _rows_shape(shape)
        n_places = n_rows * self._capacity(length)
        router, experts = self.sublayers
        parts = [
            router.init(ShapeDtype((n_rows, length, d), "float32"), use_cache=True),
            experts.init(
                ShapeDtype((self._n_experts, n_places, d), "float32"),
                use_cache=True,
            ),
        ]
        self.weights = tuple(w for w, _ in parts)
        self.state = tuple(s for _, s in parts)

    def forward(self, x: Any) -> Any:
        """Chooses experts, runs them on their tokens and adds up the results."""
        rows = jnp.reshape(x, _rows_shape(x.shape))
        router, experts = self.sublayers
        rngs = child_rngs(self)
        logits, router_state = router.pure_fn(
            rows.astype(jnp.promote_types(rows.dtype, jnp.float32)),
            self.weights[0],
            self.state[0],
            rngs[0],
            use_cache=True,
        )
        probs = jax.nn.softmax(logits.astype(jnp.promote_types(logits.dtype, "f4")))
        gates, chosen = jax.lax.top_k(probs, self._k)
        if self._k > 1:
            gates = gates / jnp.sum(gates, axis=-1, keepdims=True)
        is_real = self._real_rows(rows.shape[0])
        hits = jax.nn.one_hot(chosen, self._n_experts, dtype=jnp.int32)
        hits = hits * is_real[:, None, None, None]
        places = self._places(hits, chosen)
        taken = _gather(rows, self._token_at(places, rows.shape))
        results, experts_state = experts.pure_fn(
            _by_expert(taken, self._n_experts),
            self.weights[1],
            self.state[1],
            rngs[1],
            use_cache=True,
        )
        self.state = (router_state, experts_state)
        found = _gather(_by_row(results, rows.shape[0]), places)
        found = jnp.reshape(found, (*chosen.shape, -1))
        y = jnp.sum(found * gates[..., None].astype(found.dtype), axis=-2)
        y = jnp.reshape(y, x.shape)
        return self._with_balance(y, probs, hits, places)

    def _capacity(self, length: int) -> int:
        """Places that each expert has for the tokens of one row."""
        if self._mode != "train" or self._capacity_factor is None:
            return length
        share = self._capacity_factor * self._k * length / self._n_experts
        return max(1, min(length, math.ceil(share)))

    def _real_rows(self, n_rows: int) -> Any:
        mask = row_mask()
        if mask is None or mask.shape[0] != n_rows:
            return jnp.ones(n_rows, jnp.int32)
        return (mask > 0).astype(jnp.int32)

    def _places(self, hits: Any, chosen: Any) -> Any:
        """Returns the place of each choice, (rows, length * k) int.

        Place e * capacity + i is the i-th of expert e; what finds none is given the
        one after the last.
        """
        n_rows, length, k, n_experts = hits.shape
        capacity = self._capacity(length)
        flat = jnp.reshape(hits, (n_rows, length * k, n_experts))
        before = jnp.sum((jnp.cumsum(flat, axis=1) - flat) * flat, axis=-1)
        has_room = (before < capacity) & (jnp.sum(flat, axis=-1) > 0)
        place = jnp.reshape(chosen, before.shape) * capacity + before
        return jnp.where(has_room, place, n_experts * capacity)

    def _token_at(self, places: Any, rows_shape: Any) -> Any:
        """Returns which token is at each place, (rows, places); length if none is."""
        n_rows, length, _ = rows_shape
        tokens = jnp.repeat(jnp.arange(length), self._k)
        empty = jnp.full((n_rows, self._n_experts * self._capacity(length)), length)
        return empty.at[jnp.arange(n_rows)[:, None], places].set(tokens, mode="drop")

    def _with_balance(self, y: Any, probs: Any, hits: Any, places: Any) -> Any:
        n_experts, dtype = self._n_experts, probs.dtype
        n_places = n_experts * self._capacity(probs.shape[1])
        counts = jnp.sum(hits, axis=(0, 1, 2)).astype(dtype)
        is_real = jnp.sum(hits[:, :, 0], axis=-1, keepdims=True).astype(dtype)
        total_p = jnp.sum(probs * is_real, axis=(0, 1))
        n_tokens, n_kept = jnp.sum(is_real), jnp.sum(places < n_places).astype(dtype)
        axis = data_axis()
        if axis is not None:
            sums = (counts, total_p, n_tokens, n_kept)
            counts, total_p, n_tokens, n_kept = jax.lax.psum(sums, axis)
        n_tokens = jnp.maximum(n_tokens, 1)
        n_choices = n_tokens * self._k
        loss = n_experts * jnp.sum(counts / n_choices * total_p / n_tokens)
        emit("moe_balance_loss", loss)
        emit("moe_dropped", (jnp.sum(counts) - n_kept) / n_choices)
        if self._return_loss:
            return y, loss
        if self._mode != "train" or self._balance_weight == 0:
            return y
        # Each device adds the gradient of the common loss, and gradients are summed.
        n_devices = 1 if axis is None else jax.lax.psum(1, axis)
        return _add_gradient_of(y, loss * (self._balance_weight / n_devices))


class Experts(Repeat):
    """Applies n equal blocks side by side, each to its own part of the input.

    x, y: (n, places, d); block i maps x[i].
    """

    def init_weights_and_state(self, input_signature: Any) -> None:
        """Initialises each block for its part."""
        part = ShapeDtype(input_signature.shape[1:], input_signature.dtype)
        super().init_weights_and_state(part)
        remember_output(self, input_signature, input_signature)

    def forward(self, x: Any) -> Any:
        """Runs all blocks."""
        keys = None if self.rng is None else jax.random.split(self.rng, self.n)

        def run_one(x: Any, weights: Any, state: Any, key: Any) -> tuple[Any, Any]:
            # The first axis is no longer that of the batch, which the mask speaks of.
            with open_run("forward", row_mask=None):
                return self.block.pure_fn(x, weights, state, key)

        y, self.state = jax.vmap(run_one)(x, self.weights, self.state, keys)
        return y


def _rows_shape(shape: Any) -> tuple[int, int, int]:
    return shape[0], math.prod(shape[1:-1]), shape[-1]


def _gather(x: Any, indices: Any) -> Any:
    """Takes x[row, indices[row]]; zeros where an index is past the end."""
    return jnp.take_along_axis(x, indices[..., None], axis=1, mode="fill", fill_value=0)


def _by_expert(x: Any, n_experts: int) -> Any:
    """(rows, experts * capacity, d) -> (experts, rows * capacity, d)"""
    n_rows, _, d = x.shape
    x = jnp.reshape(x, (n_rows, n_experts, -1, d))
    return jnp.reshape(jnp.swapaxes(x, 0, 1), (n_experts, -1, d))


def _by_row(x: Any, n_rows: int) -> Any:
    """The inverse of `_by_expert`."""
    n_experts, _, d = x.shape
    x = jnp.reshape(x, (n_experts, n_rows, -1, d))
    return jnp.reshape(jnp.swapaxes(x, 0, 1), (n_rows, -1, d))


@jax.custom_vjp
def _add_gradient_of(y: Any, loss: Any) -> Any:
    """Returns y; backwards the loss gets a cotangent of 1, as if it were added."""
    return y


def _add_gradient_forward(y: Any, loss: Any) -> tuple[Any, Any]:
    return y, loss


def _add_gradient_backward(loss: Any, cotangent: Any) -> tuple[Any, Any]:
    return cotangent, jnp.ones_like(loss)


_add_gradient_of.defvjp(_add_gradient_forward, _add_gradient_backward)
