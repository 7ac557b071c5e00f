"""What a `LayerError` tells of the layer that failed: path, shapes, cause, hint.

Under `running`, which keeps the stack of running layers.
"""

from __future__ import annotations

from typing import Any

from retrax.shapes import signature

__all__ = ["facts_of"]


def facts_of(
    stack: list[tuple[Any, Any]],
    function_name: str,
    inputs: Any,
    weights: Any,
    e: BaseException,
) -> dict[str, Any]:
    """Returns the arguments of the LayerError for the innermost running layer."""
    layer = stack[-1][0]
    got = _signature_or_none(inputs)
    expected = layer.__dict__.get("_init_signature")
    lines = str(e).strip().splitlines() or [""]
    return dict(
        path=_path_text(stack),
        layer_name=layer.name,
        function_name=function_name,
        created_at=layer.created_at,
        cause=f"{type(e).__name__}: {lines[0]}".rstrip(": "),
        expected=expected if function_name == "pure_fn" else None,
        got=got,
        weights_signature=_signature_or_none(weights) or None,
        hint=_hint(layer, function_name, expected, got, weights),
    )


def _hint(
    layer: Any, function_name: str, expected: Any, got: Any, weights: Any
) -> str | None:
    if function_name != "pure_fn":
        return None
    if (
        expected is None
        and isinstance(weights, tuple)
        and not weights
        and layer.has_weights
    ):
        return "the layer has no weights yet: call init(signature(inputs)) first."
    if expected is not None and got is not None and _ranks(expected) != _ranks(got):
        return "the inputs differ in rank or number from those at init."
    return None


def _ranks(sig: Any) -> Any:
    if isinstance(sig, (tuple, list)):
        return [_ranks(s) for s in sig]
    return len(sig.shape)


def _signature_or_none(tree: Any) -> Any:
    try:
        return signature(tree)
    except TypeError:
        return None


def _path_text(stack: list[tuple[Any, int | str | None]]) -> str:
    parts = []
    for depth, (layer, _) in enumerate(stack):
        kind = type(layer).__name__
        if depth + 1 < len(stack):
            place = stack[depth + 1][1]
            parts.append(f"{kind}[{'?' if place is None else place}]")
        elif layer.name == kind or layer.name.startswith(kind + "_"):
            parts.append(layer.name)
        elif kind == "PureLayer":
            parts.append(layer.name)
        else:
            parts.append(f"{kind} '{layer.name}'")
    return " > ".join(parts)
