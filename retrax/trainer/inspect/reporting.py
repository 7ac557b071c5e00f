"""`report`: all that can be said of a model's needs, as values and as text.

Above `costs`, `totals` and `reversal`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import psutil

from retrax import layers as tl
from retrax.layers.base import Layer, to_list
from retrax.layers.stack import packed
from retrax.optimizers import Adam
from retrax.optimizers.base import Optimizer
from retrax.trainer.inspect.costs import Cost, costs
from retrax.trainer.inspect.reversal import WORST, Reversal, reversals
from retrax.trainer.inspect.totals import LAYER_BY_LAYER, MODES, Total, totals
from retrax.trainer.inspect.walk import Visit, structs, visits
from retrax.trainer.precision import Policy

__all__ = ["Report", "as_bytes", "report"]

_HEAD = ("layer", "n", "weights", "slots", "kept", "temporary")
_HEAD += ("FLOPs", "forward", "backward")
_LONGEST = 44


@dataclasses.dataclass(frozen=True)
class Report:
    """What a model needs for training.

    Attributes:
      visits: its layers along the data stack, one for all equal blocks.
      costs: what each of them costs.
      totals: what a step needs in each way of saving memory.
      reversals: what reversing gets wrong; empty if it was not measured, or nothing is
        reversible.
      memory: bytes there are.
      notes: what else there is to say.
    """

    visits: Sequence[Visit]
    costs: Sequence[Cost]
    totals: Sequence[Total]
    reversals: Sequence[Reversal]
    memory: int
    notes: Sequence[str]

    @property
    def fitting(self) -> list[str]:
        """The ways that fit into the memory, the fastest first."""
        on_host = jax.local_devices()[0].platform == "cpu"
        return [t.mode for t in self.totals if t.fits(self.memory, on_host)]

    @property
    def warnings(self) -> list[str]:
        """What is worth a warning: gradients that reversing spoils."""
        bad = [r for r in self.reversals if not r.gradients <= WORST]
        if not bad:
            return []
        first = min(bad, key=lambda r: r.depth)
        return [
            f"reversing {first.depth} layers, down to {first.path}, makes an error of "
            f"{100 * first.gradients:.2g} % of the gradient (more than "
            f"{100 * WORST:.0f} %): keep the streams in float32, make residuals "
            "smaller, or train with memory='remat'."
        ]

    def text(self) -> str:
        """Returns tables for a person."""
        parts = [_layer_table(self.visits, self.costs), self._total_table()]
        if self.reversals:
            parts.append(_reversal_table(self.reversals))
        problems = [f"{t.mode}: {t.problem}" for t in self.totals if t.problem]
        parts += [f"note: {note}" for note in [*problems, *self.notes]]
        parts += [f"WARNING: {warning}" for warning in self.warnings]
        return "\n\n".join(parts)

    def _total_table(self) -> str:
        rows: list[list[str]] = [
            ["one step", "on the device", "held", "temporary", "on the host", ""]
        ]
        fitting = self.fitting
        for t in self.totals:
            if t.problem:
                rows.append([t.mode, "-", "-", "-", "-", "not possible"])
                continue
            sizes = map(as_bytes, (t.peak, t.held, t.temporary, t.host))
            rows.append([t.mode, *sizes, "fits" if t.mode in fitting else "too large"])
        memory = as_bytes(self.memory)
        if fitting:
            best = f"Fits into {memory}, the fastest way first: {', '.join(fitting)}."
        else:
            best = f"Nothing fits into {memory}."
        return f"{_aligned(rows)}\n{best}"


def report(
    model: Layer,
    signature: Any,
    loss: Layer | None = None,
    optimizer: Optimizer | None = None,
    memory: int | None = None,
    run: bool = True,
    modes: tuple[str, ...] = MODES,
    precision: str | Policy | None = None,
) -> Report:
    """Finds what a model needs to be trained, and how well it can be reversed.

    All is for one device. Nothing of the size of the model is made but with `run`; then
    layers run one at a time, and reversible ones once in a row.

    Args:
      model: the model, or the model with its loss; need not be initialised, and stays
        as it is.
      signature: shapes and dtypes of the parts of a batch (or a batch).
      loss: loss layer after the model; None if the model ends with one. A model that
        does not gets the mean of its squared outputs.
      optimizer: the optimizer; None for Adam.
      memory: bytes there are; None for what this machine has.
      run: whether to run layers for their times, and reverse them for their errors.
      modes: ways of saving memory to look at, of 'plain', 'reversible', 'remat' and
        'layer by layer'.
      precision: of the whole step, see `StepTrainer`; single layers are measured in the
        dtypes of the signature.

    Raises:
      LayerError: the model cannot take such inputs.

    Example:
      >>> from retrax.shapes import ShapeDtype
      >>> model = tl.Serial(tl.Dense(4), tl.Relu(), tl.Dense(2))
      >>> made = report(model, ShapeDtype((8, 3)), run=False)
      >>> [cost.weights for cost in made.costs]
      [64, 0, 40, 0]
      >>> made.fitting[0]
      'plain'
    """
    optimizer = Adam() if optimizer is None else optimizer
    parts: list[Any] = to_list(signature)
    batch: tuple[Any, ...] = tuple(structs(x) for x in parts)
    sig: Any = packed(batch)
    model_with_loss, notes = _with_loss(model, sig, loss)
    found = visits(model_with_loss, sig)
    memory = psutil.virtual_memory().total if memory is None else memory
    sums = totals(model_with_loss, batch, optimizer, modes, precision)
    if run and min((t.peak for t in sums if not t.problem), default=0) > memory:
        run = False
        notes.append("no layer was run, since the model is too large for the memory.")
    if optimizer.clip_grad_norm and LAYER_BY_LAYER in modes:
        notes.append(
            "the optimizer clips by the norm of all gradients, which training layer by "
            "layer does with global_norm='two_pass' or 'per_layer'."
        )
    if precision is not None:
        notes.append("single layers are those of a step without a precision.")
    each = costs(found, optimizer, run)
    kept_all = sum(c.kept * v.n_times for v, c in zip(found, each, strict=True))
    errors: list[Reversal] = []
    if run and kept_all < memory / 2:
        errors = reversals(model_with_loss, packed(parts))
    return Report(found, each, sums, errors, memory, notes)


def as_bytes(n: float) -> str:
    """Returns a number of bytes for a person, such as '1.5 GiB'."""
    for unit in ("B", "KiB", "MiB"):
        if n < 1024:
            return f"{n:.0f} {unit}" if unit == "B" else f"{n:.1f} {unit}"
        n /= 1024
    return f"{n:.1f} GiB"


# --- Helpers ------------------------------------------------------------------------


def _with_loss(model: Layer, sig: Any, loss: Layer | None) -> tuple[Layer, list[str]]:
    if loss is not None:
        return tl.Serial(model, loss), []
    outputs = list(visits(model, sig)[-1].outputs)
    if model.n_out == 1 and outputs[0].shape == ():
        return model, []
    square = tl.Fn("MeanOfSquares", lambda y: jnp.mean(jnp.square(y)))
    note = "the model has no loss; the mean of its squared outputs stands for it."
    rest = tl.Select([0], n_in=model.n_out) if model.n_out > 1 else None
    return tl.Serial(model, square, rest), [note]


def _layer_table(found: Sequence[Visit], each: Sequence[Cost]) -> str:
    rows: list[list[str]] = [list(_HEAD)]
    for visit, cost in zip(found, each, strict=True):
        rows.append(
            [
                _shortened(visit.path) + (" <>" if visit.is_reversible else ""),
                str(visit.n_times),
                *map(as_bytes, (cost.weights, cost.slots, cost.kept, cost.temporary)),
                _count(cost.flops),
                _ms(cost.forward_ms),
                _ms(cost.backward_ms),
            ]
        )
    pairs = list(zip(found, each, strict=True))

    def total(name: str) -> float:
        return sum(v.n_times * (getattr(c, name) or 0) for v, c in pairs)

    timed = all(c.forward_ms is not None for c in each)
    rows.append(
        [
            "all",
            str(sum(v.n_times for v in found)),
            *(as_bytes(total(name)) for name in ("weights", "slots", "kept")),
            as_bytes(max((c.temporary for c in each), default=0)),
            _count(total("flops")),
            _ms(total("forward_ms") if timed else None),
            _ms(total("backward_ms") if timed else None),
        ]
    )
    table = _aligned(rows)
    if any(v.is_reversible for v in found):
        table += (
            "\n<> keeps nothing but in mode 'plain': it is reversed. Numbers are of "
            "one of n equal layers."
        )
    return table


def _reversal_table(errors: Sequence[Reversal]) -> str:
    rows: list[list[str]] = [
        ["reversed", "down to", "error of inputs", "error of gradients"]
    ]
    deepest = max(r.depth for r in errors)
    shown = {2**i for i in range(deepest.bit_length())} | {deepest}
    for r in errors:
        if r.depth in shown:
            numbers = (f"{r.inputs:.1e}", f"{r.gradients:.1e}")
            rows.append([str(r.depth), _shortened(r.path), *numbers])
    return _aligned(rows)


def _shortened(path: str) -> str:
    return path if len(path) <= _LONGEST else "..." + path[-_LONGEST + 3 :]


def _count(n: float) -> str:
    for unit in ("", "k", "M", "G"):
        if n < 1000:
            return f"{n:.3g}{unit}"
        n /= 1000
    return f"{n:.3g}T"


def _ms(x: float | None) -> str:
    return "-" if x is None else f"{x:.3g} ms"


def _aligned(rows: list[list[str]]) -> str:
    """Sets columns: the first to the left, numbers to the right."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = []
    for row in rows:
        first, *others = row
        cells = [f"{first:<{widths[0]}}"]
        cells += [f"{x:>{n}}" for x, n in zip(others, widths[1:], strict=True)]
        lines.append("  ".join(cells).rstrip())
    lines.insert(1, "-" * max(map(len, lines)))
    return "\n".join(lines)
