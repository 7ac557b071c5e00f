"""Sudoku for language models that think in steps.

Last of the Sudoku modules of `retrax.data`, and where their public names are found:
`generate`, `solve`, `stages`, `read_puzzles`, `SudokuDataset`, and `sudoku`, which
bundles the data of a run.
"""

import os

import gin

from retrax.data.inputs import Inputs
from retrax.data.sudoku_dataset import SudokuDataset
from retrax.data.sudoku_format import Puzzles, read_puzzles
from retrax.data.sudoku_generator import generate
from retrax.data.sudoku_solver import solve, stages
from retrax.data.sudoku_symmetry import split
from retrax.data.sudoku_tokens import instance_tokens

__all__ = [
    "Puzzles",
    "SudokuDataset",
    "generate",
    "instance_tokens",
    "read_puzzles",
    "solve",
    "split",
    "stages",
    "sudoku",
]


@gin.configurable(module="retrax.data")
def sudoku(
    box: int = 2,
    n_train: int = 4000,
    n_eval: int = 256,
    n_clues: int | tuple[int, int] = (5, 7),
    n_latents: int = 3,
    batch_size: int = 64,
    eval_batch_size: int = 128,
    order: str = "solver",
    augment: bool = True,
    strong: bool = False,
    seed: int = 0,
    workers: int = 0,
    cache_dir: str | os.PathLike[str] | None = None,
    train_path: str | os.PathLike[str] | None = None,
    eval_path: str | os.PathLike[str] | None = None,
) -> Inputs:
    """Returns Sudoku puzzles to train on and others to evaluate on, as `Inputs`.

    The patterns of clues of held-out puzzles are never trained on, not in a symmetric
    copy either; see `sudoku_symmetry.split`. Batches are those of `SudokuDataset`.

    Args:
      box: side of a box; 2 for 4x4, 3 for 9x9.
      n_train: puzzles to make for training, about.
      n_eval: puzzles to hold out.
      n_clues: number of clues, or (least, most).
      n_latents: number of placeholders for latent thoughts; 0 for a plain model.
      batch_size: training puzzles in a batch, over all devices together.
      eval_batch_size: held-out puzzles in a batch.
      order: order of the empty cells, see `SudokuDataset`.
      augment: train on random symmetric copies.
      strong: eliminate by more rules, see `sudoku_solver.wave`.
      seed: non-negative; it fixes all puzzles and batches.
      workers: processes that make puzzles, see `generate`.
      cache_dir: directory to keep made puzzles in.
      train_path: file to read puzzles from instead of making them.
      eval_path: file of puzzles to evaluate on; None holds out some of the others.

    Raises:
      ValueError: an argument is out of range.
      DataError: a file is malformed, or holds a puzzle without one solution.
    """
    if train_path is not None:
        puzzles = read_puzzles(train_path, box)
    else:
        puzzles = generate(n_train + n_eval, box, n_clues, seed, workers, cache_dir)
    if eval_path is not None:
        train, evaluation = puzzles, read_puzzles(eval_path, box)
    else:
        train, evaluation = split(puzzles, n_eval, seed)
    stream = SudokuDataset(
        train, batch_size, n_latents, order, augment, seed=seed, strong=strong
    )

    def once(puzzles: Puzzles) -> SudokuDataset:
        return SudokuDataset(
            puzzles,
            eval_batch_size,
            n_latents,
            order,
            augment=False,
            shuffle=False,
            repeat=False,
            seed=seed + 1,
            strong=strong,
        )

    return Inputs(stream, once(evaluation), once(train[: len(evaluation)]))
