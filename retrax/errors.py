"""Errors that tell a person where a mistake is and how to mend it.

Every one of them is a ValueError, so code that only wants to catch "bad input" can.
The command line prints them without a traceback.
"""

from __future__ import annotations

from typing import Any

__all__ = ["CheckpointError", "ConfigError", "DataError", "HostError", "LayerError"]


class ConfigError(ValueError):
    """A run is configured in a way that cannot work."""


class CheckpointError(ValueError):
    """A checkpoint cannot be written, read, or does not belong to this model."""


class DataError(ValueError):
    """A stream gives batches that the training step cannot take."""


class HostError(ValueError):
    """The processes of one run do not find each other, do not agree, or one is gone."""


class LayerError(ValueError):
    """An exception inside a layer, told from the outermost layer down.

    Attributes:
      path: the way through the tree, e.g. "Serial[2] > Serial[0] > Dense 'ff'".
      layer_name: name of the failing layer.
      function_name: 'init', 'pure_fn' or 'output_signature'.
      created_at: 'file.py:line' where the failing layer was made.
      expected: input signature the layer was initialised for, or None.
      got: input signature of the failing call, or None.
      weights_signature: signature of the layer's weights, or None.
      cause: the failure in one line.
      hint: what probably helps, or None.
    """

    def __init__(
        self,
        path: str,
        layer_name: str,
        function_name: str,
        created_at: str,
        cause: str,
        expected: Any = None,
        got: Any = None,
        weights_signature: Any = None,
        hint: str | None = None,
    ) -> None:
        self.path = path
        self.layer_name = layer_name
        self.function_name = function_name
        self.created_at = created_at
        self.cause = cause
        self.expected = expected
        self.got = got
        self.weights_signature = weights_signature
        self.hint = hint
        super().__init__(self._text())

    def _text(self) -> str:
        lines = [
            f"Exception passing through layer {self.layer_name} "
            f"(in {self.function_name}):",
            f"  path: {self.path}",
            f"  layer created at: {self.created_at}",
        ]
        if self.expected is not None and self.expected != self.got:
            lines.append(f"  initialised for: {self.expected}")
        if self.got is not None:
            lines.append(f"  layer input shapes: {self.got}")
        if self.weights_signature:
            lines.append(f"  layer weights: {self.weights_signature}")
        lines.append(f"  cause: {self.cause}")
        if self.hint:
            lines.append(f"  hint: {self.hint}")
        return "\n".join(lines)

    def __reduce__(self) -> Any:
        fields = (
            self.path,
            self.layer_name,
            self.function_name,
            self.created_at,
            self.cause,
            self.expected,
            self.got,
            self.weights_signature,
            self.hint,
        )
        return (LayerError, fields)
