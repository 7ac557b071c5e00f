"""A table of a model's layers: outputs, weights and bytes, without making any array.

Builds on `base` and `tree`; `Layer.summary` is the usual way in.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from typing import Any

import jax

from retrax import trees
from retrax.layers.base import Layer, is_marker
from retrax.layers.running import open_run
from retrax.layers.tree import label, trainable_list
from retrax.shapes import signature

__all__ = ["table"]

_WIDTH = 100
_HEAD = ("layer", "output", "weights", "size")


def table(layer: Layer, input_signature: Any) -> str:
    """Returns a table of `layer` and all layers under it, one row for each.

    A row's weights and bytes include those of the layers under it. Layers inside a
    loop (Scan, Chunk, Repeat) show the outputs of one turn; those of a Repeat show the
    weights of all its blocks. A layer that never ran shows no output.

    Args:
      layer: the model; need not be initialised, and stays as it is.
      input_signature: what `layer.init` takes.

    Raises:
      LayerError: the model cannot take such inputs.

    Example:
      >>> from retrax import layers as tl
      >>> from retrax.shapes import ShapeDtype
      >>> print(table(tl.Serial(tl.Dense(3), tl.Relu()), ShapeDtype((8, 4))))
      layer      output          weights  size
      ----------------------------------------
      Serial     (8, 3) float32       15  60 B
        0.Dense  (8, 3) float32       15  60 B
        1.Relu   (8, 3) float32        0   0 B
      ----------------------------------------
      trainable               15 weights  60 B
      frozen                   0 weights   0 B
      state                                0 B
    """
    outputs, weights, state = _trace(layer, input_signature)
    rows = list(_rows(layer, weights, outputs))
    trained, frozen = trees.partition(weights, trainable_list(layer, weights))
    totals = [
        ("trainable", f"{_count(trained):,} weights", _size(trained)),
        ("frozen", f"{_count(frozen):,} weights", _size(frozen)),
        ("state", "", _size(state)),
    ]
    return _layout(rows, totals)


def _trace(layer: Layer, input_signature: Any) -> tuple[dict[Any, str], Any, Any]:
    """Runs init and forward abstractly: (outputs by place, weights, state)."""
    sig = signature(input_signature)
    inputs = jax.tree.map(
        lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype),
        sig,
        is_leaf=lambda s: hasattr(s, "shape"),
    )
    outputs: dict[Any, str] = {}

    def observe(stack: list[tuple[Layer, Any]], y: Any) -> None:
        outputs[tuple(place for _, place in stack[1:])] = _shapes(y)

    def run(x: Any, key: Any) -> tuple[Any, Any]:
        weights, state = layer.init(sig, rng=key)
        with open_run("forward", observer=observe):
            layer.pure_fn(x, weights, state, key)
        return weights, state

    weights, state = jax.eval_shape(run, inputs, jax.random.key(0))
    return outputs, weights, state


def _rows(
    layer: Layer,
    weights: Any,
    outputs: dict[Any, str],
    place: tuple[Any, ...] = (),
    trainable: bool = True,
) -> Iterator[tuple[str, str, str, str]]:
    name = label(layer) if not place else f"{place[-1]}.{label(layer)}"
    shared = is_marker(weights) and layer.has_weights
    trainable = trainable and layer.trainable
    if shared:
        name += " (shared)"
    elif not trainable and jax.tree.leaves(weights):
        name += " (frozen)"
    yield (
        "  " * len(place) + name,
        outputs.get(place, "-"),
        "-" if shared else f"{_count(weights):,}",
        "-" if shared else _size(weights),
    )
    if is_marker(weights):
        return
    template = layer._template
    if template is not None:
        yield from _rows(template, weights, outputs, (*place, "block"), trainable)
    for i, child in enumerate(layer.sublayers):
        yield from _rows(child, weights[i], outputs, (*place, i), trainable)


def _layout(
    rows: list[tuple[str, str, str, str]], totals: list[tuple[str, str, str]]
) -> str:
    """Sets the columns so that lines keep to the width where names allow it."""
    cells = [_HEAD, *rows]
    n_name = max(len(r[0]) for r in cells)
    n_count = max(len(r[2]) for r in cells)
    n_size = max(len(r[3]) for r in [*cells, *(("", "", n, s) for _, n, s in totals)])
    room = max(20, _WIDTH - n_name - n_count - n_size - 6)
    n_out = min(room, max(len(r[1]) for r in cells))
    needed = max(len(t[0]) + len(t[1]) for t in totals) + 2
    n_out = max(n_out, needed - n_name - n_count - 4)
    lines = []
    for name, output, count, size in cells:
        first, *more = textwrap.wrap(output, n_out, break_long_words=False) or [""]
        lines.append(
            f"{name:<{n_name}}  {first:<{n_out}}  {count:>{n_count}}  {size:>{n_size}}"
        )
        lines.extend(f"{'':<{n_name}}  {text}" for text in more)
    width = n_name + n_out + n_count + n_size + 6
    rule = "-" * width
    lines.insert(1, rule)
    lines.append(rule)
    for name, count, size in totals:
        middle = width - len(name) - n_size - 2
        lines.append(f"{name}{count:>{middle}}  {size:>{n_size}}")
    return "\n".join(line.rstrip() for line in lines)


def _shapes(outputs: Any) -> str:
    """'(2, 3) float32' of one tensor; of several, equal dtypes are named once."""
    parts: list[str] = []
    leaves = [x for x in jax.tree.leaves(outputs) if hasattr(x, "dtype")]
    for i, x in enumerate(leaves):
        last = i + 1 == len(leaves) or leaves[i + 1].dtype != x.dtype
        parts.append(f"{tuple(x.shape)}" + (f" {x.dtype}" if last else ""))
    return ", ".join(parts) or "()"


def _count(tree: Any) -> int:
    return trees.n_bytes(tree, lambda x: x.size)


def _size(tree: Any) -> str:
    n: float = trees.n_bytes(tree, lambda x: x.size * x.dtype.itemsize)
    for unit in ("B", "KiB", "MiB"):
        if n < 1024:
            return f"{n:.0f} {unit}" if unit == "B" else f"{n:.1f} {unit}"
        n /= 1024
    return f"{n:.1f} GiB"
