"""Checks of layers' input and output shapes against an einsum-like specification.

Above `base`. A specification lists the shapes of tensors, separated by commas, with an
arrow between inputs and outputs: 'bld,df->blf'. Each letter stands for one size, the
same wherever it occurs; a digit for that very size; '...' for any number of axes, the
same ones wherever it occurs. Shapes are known while JAX traces, so that compiled code
checks nothing and costs nothing.
"""

from __future__ import annotations

import functools
import string
from collections.abc import Callable, Sequence
from typing import Any

from retrax.layers.base import Layer, to_list

__all__ = ["AssertFunction", "AssertShape", "assert_shape"]

_ELLIPSIS = "."


def assert_shape(specification: str) -> Callable[[Any], Any]:
    """Makes a decorator that checks what a layer takes and gives.

    It goes on a Layer class, or on a function that makes layers; those stay what they
    are, in prints and in the tree of weights. A wrong shape raises a ValueError with
    the specification, the tensor and all sizes known.

    Raises:
      ValueError: the specification cannot be read.

    Example:
      >>> from retrax import layers as tl
      >>> @assert_shape('...d->...')
      ... def SumOfLast():
      ...     return tl.Fn('SumOfLast', lambda x: x.sum(-1))
      >>> SumOfLast()
      SumOfLast
    """
    spec = _Spec(specification)

    def decorate(made: Any) -> Any:
        if isinstance(made, type):
            if not issubclass(made, Layer):
                raise TypeError(
                    f"assert_shape is for Layer classes and functions that make "
                    f"layers, got the class {made.__name__}."
                )
            made.forward = _checked(made.forward, spec)
            return made

        @functools.wraps(made)
        def make(*args: Any, **kwargs: Any) -> Any:
            return AssertFunction(specification, made(*args, **kwargs))

        return make

    return decorate


def AssertFunction(
    specification: str, layer: Layer, message: str | None = None
) -> Layer:
    """Makes a layer check what it takes and gives, and returns it.

    Trax returns a new Serial around the layer; here it is the layer itself.

    Args:
      specification: as for `assert_shape`.
      layer: the layer.
      message: added to the error text.
    """
    base = type(layer)
    spec = _Spec(specification, message)
    checks = layer.__dict__.get("_shape_checks", ())
    layer._shape_checks = (*checks, spec)  # type: ignore[attr-defined]
    if not issubclass(base, _ChecksShapes):
        layer.__class__ = _checking_class(base)
    return layer


class AssertShape(Layer):
    """Returns its inputs, having checked their shapes.

    Example:
      >>> from retrax import layers as tl
      >>> tl.Serial(AssertShape('bl'), tl.Dense(4))
      Serial[
        Dense_4
      ]
    """

    def __init__(
        self,
        spec: str,
        message: str | None = None,
        visible_layer: bool = False,
        name: str | None = None,
    ) -> None:
        """Makes a check.

        Args:
          spec: shapes of the inputs, without an arrow.
          message: added to the error text.
          visible_layer: whether the layer appears when a model is printed.
          name: name of the layer.
        """
        self._spec = _Spec(f"{spec}->", message)
        n = len(self._spec.inputs)
        super().__init__(n_in=n, n_out=n, name=name)
        self._visible_layer = visible_layer

    def forward(self, xs: Any) -> Any:
        """Checks the shapes."""
        self._spec.check("input", self._spec.inputs, xs, {}, self.name)
        return xs

    def __repr__(self) -> str:
        return super().__repr__() if self._visible_layer else ""


# --- Helpers ------------------------------------------------------------------------


class _Spec:
    """A specification that was read: shapes of inputs and of outputs."""

    def __init__(self, text: str, message: str | None = None) -> None:
        self.text = text.removesuffix("->")
        self.message = message
        inputs, arrow, outputs = text.partition("->")
        if not arrow:
            raise ValueError(
                f"the shape specification {text!r} needs an arrow between inputs and "
                "outputs, as in '...a->...b'."
            )
        self.inputs = [self._read(part) for part in inputs.split(",")]
        self.outputs = [self._read(part) for part in outputs.split(",")]

    def _read(self, part: str) -> str:
        short = part.strip().replace("...", _ELLIPSIS)
        known = string.ascii_letters + string.digits + _ELLIPSIS
        if set(short) - set(known) or short.count(_ELLIPSIS) > 1:
            raise ValueError(
                f"cannot read {part!r} in the shape specification {self.text!r}: it "
                "may hold letters, digits and one '...' for each tensor."
            )
        return short

    def check(
        self,
        what: str,
        parts: Sequence[str],
        tensors: Any,
        sizes: dict[str, Any],
        layer_name: str,
    ) -> None:
        """Compares tensors with `parts`, reading and filling in the known sizes."""
        items = to_list(tensors)
        if len(items) != len(parts):
            self._fail(
                f"{layer_name} has {len(items)} {what}s where {len(parts)} are "
                f"specified, of shapes {[tuple(x.shape) for x in items]}",
                sizes,
            )
        for i, (x, part) in enumerate(zip(items, parts, strict=True)):
            shape = tuple(x.shape)
            wrong = _mismatch(shape, part, sizes)
            if wrong:
                written = part.replace(_ELLIPSIS, "...")
                self._fail(
                    f"{what} {i} of {layer_name} has shape {shape}, specified as "
                    f"'{written}': {wrong}",
                    sizes,
                )

    def _fail(self, text: str, sizes: dict[str, Any]) -> None:
        known = {k.replace(_ELLIPSIS, "..."): v for k, v in sizes.items()}
        more = f" {self.message}" if self.message else ""
        raise ValueError(f"{text} (in {self.text!r}; known sizes: {known}).{more}")


def _mismatch(shape: tuple[int, ...], part: str, sizes: dict[str, Any]) -> str | None:
    """Says what is wrong with a shape, or None; notes sizes met for the first time."""
    before, ellipsis, after = part.partition(_ELLIPSIS)
    n_named = len(before) + len(after)
    if len(shape) != n_named and not (ellipsis and len(shape) > n_named):
        return f"it must have {'at least ' if ellipsis else ''}{n_named} axes"
    n_end = len(shape) - len(after)
    named: list[tuple[str, Any]] = list(zip(before, shape, strict=False))
    named += zip(after, shape[n_end:], strict=True)
    if ellipsis:
        named.append((_ELLIPSIS, shape[len(before) : n_end]))
    for symbol, size in named:
        wanted = int(symbol) if symbol.isdigit() else sizes.setdefault(symbol, size)
        if size != wanted:
            written = "..." if symbol == _ELLIPSIS else symbol
            return f"{written} is {size} but must be {wanted}"
    return None


def _check_around(
    layer: Layer, spec: _Spec, forward: Callable[[Any], Any], inputs: Any
) -> Any:
    sizes: dict[str, Any] = {}
    # A side without tensors cannot be told from one with a scalar: both are ''.
    if layer.n_in:
        spec.check("input", spec.inputs, inputs, sizes, layer.name)
    outputs = forward(inputs)
    if layer.n_out:
        spec.check("output", spec.outputs, outputs, sizes, layer.name)
    return outputs


def _checked(forward: Callable[..., Any], spec: _Spec) -> Callable[..., Any]:
    """Wraps the forward method of a class."""

    @functools.wraps(forward)
    def checked_forward(self: Layer, inputs: Any) -> Any:
        return _check_around(self, spec, functools.partial(forward, self), inputs)

    return checked_forward


class _ChecksShapes:
    """Marks the classes that `_checking_class` makes."""


@functools.cache
def _checking_class(base: type[Layer]) -> type[Layer]:
    """Makes a subclass of `base`, of its name, that heeds an instance's checks.

    One layer can be checked this way without a wrapper around it, which would change
    its print and its place in the tree of weights.
    """

    def forward(self: Any, inputs: Any) -> Any:
        run = functools.partial(base.forward, self)
        for spec in self._shape_checks:
            run = functools.partial(_check_around, self, spec, run)
        return run(inputs)

    def reduce_ex(self: Any, protocol: Any) -> Any:
        # Copies and pickles name `base`: this class exists in this process only.
        return _new_checking, (base,), self.__getstate__()

    body = {
        "forward": forward,
        "__reduce_ex__": reduce_ex,
        "__module__": base.__module__,
    }
    return type(base.__name__, (base, _ChecksShapes), body)


def _new_checking(base: type[Layer]) -> Layer:
    cls = _checking_class(base)
    return cls.__new__(cls)
