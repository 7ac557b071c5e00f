"""How well a model that thinks fills in grids, and what its thoughts hold.

Above `latent_layers` and `latent_decoding`, under `curriculum`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from retrax.data.sudoku import instance_tokens, stages
from retrax.data.sudoku_draws import Draws
from retrax.errors import ConfigError
from retrax.supervised.latent import Latents
from retrax.supervised.latent_decoding import Graded, decode, grade
from retrax.supervised.latent_layers import LatentThoughts, thinking
from retrax.supervised.latent_losses import (
    candidates_at,
    gate_terms,
    joined,
    loss_sums,
    read_candidates,
    solution_tokens,
)

__all__ = ["LatentEvaluation", "Report"]

_GATE_SEED = 0x67617465  # Instances to judge a stage by are the same each time.
ABLATIONS = ("zeroed", "shuffled")


class Report(NamedTuple):
    """What an evaluation found.

    Attributes:
      metrics: name -> value of what a run is judged by: 'loss', 'value_accuracy' (of
        the best digit, given the right tokens before), and if sequences were decoded
        'solved' and 'cell_accuracy'.
      details: name -> value of the rest: 'solved/clues_6', 'cells/level_4',
        'cells/stage_2' (cells that elimination solves at that stage), 'solved/beam_3',
        'solved/zeroed' (with thoughts set to 0), 'solved/shuffled' (with those of
        another puzzle), 'candidates/slot_0' (share of empty cells whose candidate set
        is exactly right), 'leak/stage_0' (mean -log p(S)), 'inside/stage_0' (mean
        p(S)), 'excess/stage_0' (mean CE - log |S|).
      example: (candidates read from thoughts (batch, K, cells, digits) bool, decoded
        tokens (batch, length) int) of the first batch; None if nothing was decoded
        greedily.
    """

    metrics: dict[str, float]
    details: dict[str, float]
    example: tuple[Any, Any] | None = None


class LatentEvaluation:
    """Evaluates a model on batches of `data.SudokuDataset`.

    Programs are compiled once for each number of passes and batch shape. Random
    thoughts are replaced by their means.
    """

    def __init__(self, thoughts: Any, cached: Any) -> None:
        """Makes an evaluation.

        Args:
          thoughts: the model in mode 'eval'.
          cached: the model in mode 'predict'.

        Raises:
          ConfigError: one of them is no `LatentThoughts`.
        """
        for what, layer in (("'eval'", thoughts), ("'predict'", cached)):
            if not isinstance(layer, LatentThoughts):
                raise ConfigError(
                    f"evaluating thoughts needs a model of mode {what} that is a "
                    f"LatentThoughts (latent_model in gin), got {layer!r}."
                )
        self._thoughts: LatentThoughts = thoughts
        self._cached: LatentThoughts = cached
        self._programs: dict[Any, Any] = {}

    def evaluate(
        self,
        batches: Iterable[tuple[Any, ...]],
        weights: Any,
        state: Any,
        num_passes: int,
        gate_stages: Iterable[int] = (),
        beams: Iterable[int] = (1,),
        ablate: bool = False,
    ) -> Report:
        """Evaluates on all batches.

        Args:
          batches: batches of `data.SudokuDataset`.
          weights: weights of `LatentThoughts`.
          state: its state.
          num_passes: thoughts that are built.
          gate_stages: stages to measure 'leak', 'inside' and 'excess' at.
          beams: widths of beam search; 1 is greedy and gives 'solved'; () decodes
            nothing.
          ablate: also decode with thoughts set to 0, and with those of another puzzle.
        """
        sums: dict[str, Any] = {}
        graded: dict[str, list[Graded]] = {}
        rows: list[tuple[Any, ...]] = []
        example = None
        for number, batch in enumerate(batches):
            batch = tuple(np.asarray(part) for part in batch)
            rows.append(batch)
            think = self._program("think", num_passes)
            latents, read, found, _ = think(weights, state, batch)
            for stage in gate_stages:
                gate = self._gate(weights, state, batch, stage, number)
                found |= {f"{name}/stage_{stage}": pair for name, pair in gate.items()}
            for name, pair in jax.device_get(found).items():
                sums[name] = sums.get(name, 0) + np.asarray(pair, np.float64)
            for name, (width, changed) in _ways(latents, beams, ablate).items():
                run = self._program("decode", width)
                tokens = run(weights, batch[0], batch[2], changed)
                if name == "greedy" and not number:
                    example = np.asarray(read), np.asarray(tokens)
                result = grade(tokens, batch[1], batch[2], batch[4].shape[1])
                graded.setdefault(name, []).append(result)
        if not rows:
            raise ConfigError("evaluation got no batch: is the evaluation set empty?")
        values = {name: float(v / w) if w else 0.0 for name, (v, w) in sums.items()}
        metrics = {name: values.pop(name) for name in ("loss", "value_accuracy")}
        for name, parts in graded.items():
            joined_parts = Graded(*map(np.concatenate, zip(*parts, strict=True)))
            if name == "greedy":
                metrics |= _summary(joined_parts, "solved", "cell_accuracy")
                values |= _by_kind(joined_parts, rows)
            else:
                values |= _summary(joined_parts, f"solved/{name}", f"cells/{name}")
        return Report(metrics, values, example)

    def gate(
        self,
        batches: Iterable[tuple[Any, ...]],
        weights: Any,
        state: Any,
        stage: int,
    ) -> dict[str, float]:
        """Returns how well a stage is learned.

        Returns:
          'excess': mean CE - log |S| in nats, 0 is perfect; 'leak': mean -log p(S);
          'inside': mean p(S), the probability of the candidates, 1 is perfect.
        """
        sums: dict[str, Any] = {}
        for number, batch in enumerate(batches):
            found = self._gate(weights, state, batch, stage, number)
            for name, pair in jax.device_get(found).items():
                sums[name] = sums.get(name, 0) + np.asarray(pair, np.float64)
        return {name: float(v / max(w, 1)) for name, (v, w) in sums.items()}

    # --- Compiled parts ---------------------------------------------------------------

    def _program(self, what: str, value: int) -> Any:
        if (what, value) not in self._programs:
            make = self._decoder if what == "decode" else self._thinker
            self._programs[what, value] = jax.jit(make(value))
        return self._programs[what, value]

    def _gate(
        self, weights: Any, state: Any, batch: Any, stage: int, number: int
    ) -> dict[str, Any]:
        draws = Draws(_GATE_SEED, stage, number)
        batch = (instance_tokens(batch, stage, draws), *batch[1:])
        return self._program("think", stage + 1)(weights, state, batch)[-1]

    def _thinker(self, num_passes: int) -> Any:
        """One program for all that is measured, as compiling takes longer than that."""
        takes_mean = self._thoughts.base_config.noise

        def run(weights: Any, state: Any, batch: Any) -> Any:
            with thinking(num_passes=num_passes, noise=False, backtrack=False):
                latents, logits, cand = self._thoughts.answer(
                    weights, state, batch, takes_mean=takes_mean
                )
                read = read_candidates(cand, self._thoughts.config.pos_weight)
                sums = self._sums(batch, logits, cand, read)
            gate = _gate_sums(batch, logits, num_passes - 1) if num_passes else {}
            return latents, read, sums, gate

        return run

    def _sums(self, batch: Any, logits: Any, cand: Any, read: Any) -> dict[str, Any]:
        """Name -> (sum, count) of what is measured given the right tokens before."""
        tokens, _, start_index, level, candidates = batch
        config = self._thoughts.config
        sums = loss_sums(
            tokens, start_index, level, candidates, logits[None], cand[None], config
        )
        total = joined(sums, config)["total"]
        n_rows, n_latents = candidates.shape[:2]
        supervised, is_value = solution_tokens(tokens, start_index, n_latents)
        counted = supervised & is_value
        n_digits = cand.shape[-1]
        best = jnp.argmax(logits[..., 1 : n_digits + 1], axis=-1) + 1
        right = jnp.sum(counted & (best == tokens[:, 1:]))
        found = {
            "loss": jnp.stack([total * n_rows, jnp.float32(n_rows)]),
            "value_accuracy": jnp.stack([right, jnp.sum(counted)]),
        }
        bits = candidates[..., None] >> jnp.arange(n_digits) & 1
        exact = (read == (bits == 1)).all(-1) & (candidates != 0)
        for k in range(n_latents):
            active = sums.active[:, k, None]
            n_exact = jnp.sum(exact[:, k] & active)
            n_cells = jnp.sum((candidates[:, k] != 0) & active)
            found[f"candidates/slot_{k}"] = jnp.stack([n_exact, n_cells])
        return found

    def _decoder(self, n_beams: int) -> Any:
        model: Any = self._cached.model
        has_head = self._cached.has_noise_head
        model = model.sublayers[0] if has_head else model
        give_first = not self._thoughts.base_config.supervise_first

        def run(weights: Any, tokens: Any, start_index: Any, latents: Any) -> Any:
            inner = weights[0][0] if has_head else weights[0]
            return decode(
                model, inner, tokens, start_index, latents, n_beams, give_first
            )

        return run


def _gate_sums(batch: Any, logits: Any, stage: int) -> dict[str, Any]:
    tokens, _, start_index, _, candidates = batch
    n_latents = candidates.shape[1]
    masks = candidates_at(tokens, candidates[:, stage])
    supervised, is_value = solution_tokens(tokens, start_index, n_latents)
    counted = supervised & is_value & (masks != 0)
    terms = gate_terms(logits, masks, round(candidates.shape[2] ** 0.5))
    count = jnp.sum(counted).astype(jnp.float32)

    def pair(values: Any) -> Any:
        return jnp.stack([jnp.sum(jnp.where(counted, values, 0.0)), count])

    excess = terms["ce"] - terms["log_size"]
    leak = terms["leak"]
    return {"leak": pair(leak), "inside": pair(jnp.exp(-leak)), "excess": pair(excess)}


# --- On the host --------------------------------------------------------------------


def _ways(
    latents: Latents, beams: Iterable[int], ablate: bool
) -> Mapping[str, tuple[int, Latents]]:
    """Returns name -> (width of beam search, thoughts) of all ways to decode."""
    ways = {"greedy" if w == 1 else f"beam_{w}": (w, latents) for w in beams}
    if ablate and latents.values.shape[1]:
        values = latents.values
        zeroed = latents._replace(values=jnp.zeros_like(values))
        other = latents._replace(values=jnp.roll(values, 1, axis=0))
        ways |= {"zeroed": (1, zeroed), "shuffled": (1, other)}
    return ways


def _summary(graded: Graded, solved: str, cells: str) -> dict[str, float]:
    return {solved: float(graded.solved.mean()), cells: graded.cell_accuracy}


def _by_kind(graded: Graded, rows: list[tuple[Any, ...]]) -> dict[str, float]:
    """Solved puzzles and right cells by level, by number of clues, and by stage."""
    _, solution, start_index, level, _ = (
        np.concatenate(part) for part in zip(*rows, strict=True)
    )
    found = {}
    for name, kind in (("level", level[:, 0]), ("clues", start_index[:, 0])):
        for value in np.unique(kind):
            where = kind == value
            part = Graded(*(x[where] for x in graded))
            summary = _summary(part, f"solved/{name}_{value}", f"cells/{name}_{value}")
            found |= summary
    clues = np.where(graded.empty, 0, solution)
    side = round(clues.shape[1] ** 0.5)
    grids, n_stages = stages(clues, round(side**0.5))
    first = n_stages.cumsum() - n_stages
    solved_at = np.add.reduceat(np.bitwise_count(grids) > 1, first, dtype=np.int64)
    for stage in np.unique(solved_at[graded.empty]):
        where = graded.empty & (solved_at == stage)
        found[f"cells/stage_{stage}"] = float(graded.right[where].mean())
    return found
