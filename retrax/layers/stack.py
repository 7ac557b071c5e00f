"""The data stack, and what combinators share, also those of users.

Above `base`; under all combinators. The top of the stack is the front of a tuple; a
stack of one item is the bare item.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from retrax.layers.base import Layer, to_list
from retrax.layers.running import current_run
from retrax.shapes import ShapeDtype, signature

__all__ = [
    "arities",
    "child_rngs",
    "ensure_layers",
    "inputs_from_stack",
    "no_layer",
    "outputs_onto_stack",
    "packed",
    "remember_output",
]


def arities(layers: Sequence[Layer]) -> tuple[int, int]:
    """Returns the stack items a chain of layers needs, and those it leaves of them."""
    if not layers:
        return 1, 1
    depth = needed = 0
    for layer in layers:
        depth += layer.n_in
        needed = max(needed, depth)
        depth -= layer.n_out
    return needed, needed - depth


def inputs_from_stack(stack: Any, n: int) -> Any:
    """Returns the top n items of the stack; one item is returned bare."""
    items = stack if isinstance(stack, (tuple, list)) else (stack,)
    if n > len(items):
        raise ValueError(
            f"{n} inputs are needed but the data stack holds {len(items)}: does the "
            "batch have enough parts, and do the layers before leave enough outputs?"
        )
    return items[0] if n == 1 else tuple(items[:n])


def outputs_onto_stack(outputs: Any, stack: Any, n: int) -> Any:
    """Returns the stack with its top n items replaced by `outputs`; bare if one."""
    items = stack if isinstance(stack, (tuple, list)) else (stack,)
    return packed([*to_list(outputs), *items[n:]])


def child_rngs(layer: Layer) -> tuple[Any, ...]:
    """Returns one key per sublayer of the running layer, Nones if it runs without."""
    run = current_run()
    frame = None if run is None else run.find(layer)
    if frame is None:
        return (None,) * len(layer.sublayers)
    return frame.child_rngs()


def remember_output(layer: Layer, input_signature: Any, outputs: Any) -> None:
    """Notes output signatures found by init, so that nobody has to trace for them."""
    run = current_run()
    if run is not None and run.kind == "init":
        run.output_signatures[id(layer)] = (input_signature, signature(outputs))


def ensure_layers(items: Any, where: str) -> list[Layer]:
    """Flattens nested lists and tuples of layers; None items vanish.

    Raises:
      TypeError: an item is no layer; says which, what it is and what helps.
    """
    flat: list[Any] = []

    def add(item: Any) -> None:
        if isinstance(item, (tuple, list)):
            for x in item:
                add(x)
        elif item is not None:
            flat.append(item)

    add(items)
    for i, item in enumerate(flat):
        if not isinstance(item, Layer):
            raise TypeError(f"{where}: item {i} is no layer but {no_layer(item)}")
    return flat


def no_layer(item: Any) -> str:
    """Says what an item is that should be a layer, and what to do about it."""
    if isinstance(item, type) and issubclass(item, Layer):
        return f"the class {item.__name__}; make an instance: {item.__name__}(...)."
    if isinstance(item, ShapeDtype) or hasattr(item, "shape"):
        return f"an array or signature ({type(item).__name__}); pass it to init()."
    if callable(item):
        name = getattr(item, "__name__", type(item).__name__)
        return (
            f"the function {name}; call it if it makes a layer, {name}(...), or wrap "
            f"it: Fn('{name}', {name})."
        )
    return f"{item!r} of type {type(item).__name__}."


def packed(items: Sequence[Any]) -> Any:
    """Returns a stack of the items: bare if there is one."""
    return items[0] if len(items) == 1 else tuple(items)
