"""What a whole training step needs, in each way of saving memory.

Above `costs`. The compiled ways are asked of the compiler: `StepTrainer`'s own step is
compiled for shapes, without values. Layer-by-layer training is followed unit by unit
with the programs of `ReversibleSerialTrainer`, see `layer_by_layer`.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator
from typing import Any

from retrax.layers.base import Layer
from retrax.layers.running import MEMORY_MODES
from retrax.optimizers.base import Optimizer
from retrax.trainer.inspect.layer_by_layer import needs
from retrax.trainer.precision import Policy
from retrax.trainer.step_trainer import StepTrainer

__all__ = ["LAYER_BY_LAYER", "MODES", "Total", "totals", "without_values"]

LAYER_BY_LAYER = "layer by layer"
# The fastest first.
MODES = ("plain", "reversible", "remat", LAYER_BY_LAYER)


@dataclasses.dataclass(frozen=True)
class Total:
    """What a training step needs in one way of saving memory.

    Attributes:
      mode: 'plain', 'reversible', 'remat' or 'layer by layer'.
      held: bytes on the device before and after a step: weights, slots, state, batch.
      temporary: bytes on the device beside them, during a step.
      host: bytes on the host that training layer by layer needs for what visits the
        device; 0 for the others.
      flops: operations of a step, as XLA counts them; None where it is not asked.
      problem: why this way cannot be had; '' if it can.
    """

    mode: str
    held: int = 0
    temporary: int = 0
    host: int = 0
    flops: float | None = None
    problem: str = ""

    @property
    def peak(self) -> int:
        """Most bytes on the device."""
        return self.held + self.temporary

    def fits(self, memory: int, host_is_device: bool) -> bool:
        """Whether it fits into so many bytes, of a device or of all there is."""
        needed = self.peak + (self.host if host_is_device else 0)
        return not self.problem and needed <= memory


def totals(
    model_with_loss: Layer,
    signature: Any,
    optimizer: Optimizer,
    modes: tuple[str, ...] = MODES,
    precision: str | Policy | None = None,
) -> list[Total]:
    """Finds what a step needs in each mode.

    Args:
      model_with_loss: layer from a whole batch to one number; need not be
        initialised, and stays as it is.
      signature: shapes and dtypes of the parts of a batch.
      optimizer: makes the slots and updates the weights.
      modes: the modes to look at.
      precision: see `StepTrainer`.
    """
    found = []
    known: dict[str, Total] = {}  # Modes may lower to the same program.
    for mode in modes:
        if mode in MEMORY_MODES:
            lowered = StepTrainer(
                without_values(model_with_loss),
                optimizer,
                n_devices=1,
                memory=mode,
                precision=precision,
            ).lowered(signature)
            text = lowered.as_text()
            total = known.get(text) or _compiled(lowered)
            found.append(dataclasses.replace(total, mode=mode))
            known[text] = total
            continue
        try:
            model = without_values(model_with_loss)
            need = needs(model, signature, optimizer, precision)
        except ValueError as e:
            found.append(Total(mode, problem=str(e).splitlines()[0]))
            continue
        found.append(Total(mode, need.held, need.peak - need.held, need.host))
    return found


def without_values(model: Layer) -> Layer:
    """Returns a copy of a model that holds neither weights nor state."""
    layers = list(_all_layers(model, set()))
    for layer in layers:
        if layer._owner is not None:
            layer._owner.pull()
    held = [x for layer in layers for x in (layer._weights, layer._state)]
    return copy.deepcopy(model, {id(x): () for x in held if x != ()})


def _compiled(lowered: Any) -> Total:
    compiled = lowered.compile()
    memory = compiled.memory_analysis()
    found = compiled.cost_analysis() or {}
    new = memory.output_size_in_bytes - memory.alias_size_in_bytes
    return Total(
        "",
        memory.argument_size_in_bytes,
        memory.temp_size_in_bytes + max(new, 0),
        flops=float(found.get("flops", 0.0)),
    )


def _all_layers(layer: Layer, seen: set[int]) -> Iterator[Layer]:
    if id(layer) in seen:
        return
    seen.add(id(layer))
    yield layer
    template = layer._template
    for child in [*layer.sublayers, *([] if template is None else [template])]:
        yield from _all_layers(child, seen)
