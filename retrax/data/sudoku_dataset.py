"""`SudokuDataset`: puzzles with their candidate sets, as a stream with a position.

Above the other Sudoku modules of `retrax.data`, under `sudoku`.
"""

import operator
import zlib

import numpy as np

from retrax.data.streams import Batch, Position, Stream, check_kind
from retrax.data.sudoku_board import board
from retrax.data.sudoku_draws import Draws
from retrax.data.sudoku_format import Puzzles
from retrax.data.sudoku_solver import stages
from retrax.data.sudoku_symmetry import random_symmetries
from retrax.data.sudoku_tokens import drawn_digits, tokens_of

__all__ = ["SudokuDataset"]

ORDERS = ("solver", "sorted", "fixed", "random", "file")
_BATCHES, _INSTANCES = 0, 1  # Keep the random numbers of the two apart.


class SudokuDataset(Stream):
    """Streams batches of puzzles with their candidate sets.

    A batch is, with s = number of clues, C = number of cells and K = n_latents:

    * tokens: (batch, 3 C + K) int32, see `sudoku_tokens`;
    * solution: (batch, C) int32;
    * start_index: (batch, 1) int32, s;
    * level: (batch, 1) int32, 2 + number of stages, clipped to 3 to 8;
    * candidates: (batch, K, C) int32, masks after 0, 1, ... waves of elimination, the
      last stage again and again; 0 at clues.

    Everything random is fixed by the seed and the place in the stream, so a restored
    stream goes on with the very batch that was next.

    Args:
      puzzles: see `generate` and `read_puzzles`.
      batch_size: puzzles in a batch.
      n_latents: K, number of placeholders.
      order: of empty cells: 'solver' (by the wave that solves them; within a wave
        random), 'sorted' (the same, but within a wave by row and column), 'fixed' (by
        row and column), 'random', or 'file' (as the file said).
      augment: replace each puzzle by a random symmetric copy whenever it comes.
      shuffle: whether each epoch has another order of puzzles.
      repeat: go on without end, with batches of one size. If not, each puzzle comes
        once, and the last batch may be smaller.
      stage: None for the solution's values. A number t makes each value of an empty
        cell a random one of its candidates at stage t (or the last): one instance of
        what is possible then.
      seed: non-negative.
      strong: see `sudoku_solver.wave`.

    Raises:
      ValueError: an argument is out of range.

    >>> from retrax.data.sudoku_generator import generate
    >>> data = SudokuDataset(generate(8, box=2, n_clues=6), batch_size=4, n_latents=2)
    >>> [part.shape for part in next(data)]
    [(4, 50), (4, 16), (4, 1), (4, 1), (4, 2, 16)]
    """

    def __init__(
        self,
        puzzles: Puzzles,
        batch_size: int,
        n_latents: int = 0,
        order: str = "solver",
        augment: bool = True,
        shuffle: bool = True,
        repeat: bool = True,
        stage: int | None = None,
        seed: int = 0,
        strong: bool = False,
    ):
        if order not in ORDERS:
            raise ValueError(f"order must be one of {ORDERS}, got {order!r}.")
        if order == "file" and puzzles.places is None:
            raise ValueError(
                "order='file' needs puzzles from rows with a solver's order; these "
                "have none. Use 'solver'."
            )
        if n_latents < 0 or seed < 0 or (stage is not None and stage < 0):
            raise ValueError(
                "n_latents, seed and stage must not be negative, got n_latents="
                f"{n_latents}, seed={seed}, stage={stage}."
            )
        if not 1 <= batch_size or (repeat and batch_size > len(puzzles)):
            raise ValueError(
                f"batch_size must be 1 to {len(puzzles)}, the number of puzzles, got "
                f"{batch_size}."
            )
        self._puzzles, self._batch_size = puzzles, operator.index(batch_size)
        self.n_latents, self._order = operator.index(n_latents), order
        self._augment, self._shuffle, self._repeat = augment, shuffle, repeat
        self._stage, self._seed, self._strong = stage, operator.index(seed), strong
        grids, self._n_stages = stages(puzzles.clues, puzzles.box, strong)
        ends = self._n_stages.cumsum()
        self._first = ends - self._n_stages
        several = np.bitwise_count(grids) > 1
        self._solved_at = np.add.reduceat(several, self._first, dtype=np.int16)
        self._grids = grids.astype(board(puzzles.box).dtype)
        self._digest = zlib.crc32(puzzles.clues.tobytes())
        self._epoch = self._next = self._n_instances = 0
        self._rows: np.ndarray | None = None
        self._closed = False
        self.is_endless = bool(repeat)
        if not repeat:
            self.n_batches = -(-len(puzzles) // batch_size)
            self.n_examples = len(puzzles)

    @property
    def puzzles(self) -> Puzzles:
        """The puzzles."""
        return self._puzzles

    @property
    def n_stages(self) -> np.ndarray:
        """(n_puzzles,) numbers of stages of elimination."""
        return self._n_stages

    @property
    def solved_at(self) -> np.ndarray:
        """(n_puzzles, cells): the first stage at which a cell is single.

        The number of stages for cells that never are, 0 for clues.
        """
        return self._solved_at

    def read(self) -> Batch:
        n = len(self._puzzles)
        end = n - self._batch_size if self._repeat else n - 1
        if self._closed or (self._next > end and not self._repeat):
            raise StopIteration
        if self._next > end:
            self._epoch, self._next, self._rows = self._epoch + 1, 0, None
        if self._rows is None:
            self._rows = np.arange(n)
            if self._shuffle:
                self._rows = Draws(self._seed, self._epoch).orders(n)
        place = self._next
        self._next = min(place + self._batch_size, n)
        draws = Draws(self._seed, _BATCHES, self._epoch, place)
        return self._batch(self._rows[place : self._next], self._stage, draws)

    def sample_instance_batch(self, batch_size: int, stage: int) -> Batch:
        """Returns a batch of random puzzles with random candidates for values.

        Args:
          batch_size: how many puzzles.
          stage: values are drawn uniformly and independently from the candidates at
            this stage, or at a puzzle's last one. That of a puzzle which elimination
            solves is its solution.

        Raises:
          ValueError: an argument is out of range.
        """
        if batch_size < 1 or stage < 0:
            raise ValueError(
                "batch_size must be at least 1 and stage not negative, got batch_size="
                f"{batch_size}, stage={stage}."
            )
        draws = Draws(self._seed, _INSTANCES, self._n_instances)
        self._n_instances += 1
        rows = draws.integers(0, len(self._puzzles), (batch_size,))
        return self._batch(rows, stage, draws)

    def _batch(self, rows: np.ndarray, stage: int | None, draws: Draws) -> Batch:
        puzzles, box = self._puzzles[rows], self._puzzles.box
        clues, solution = puzzles.clues, puzzles.solutions
        n_stages, solved_at = self._n_stages[rows], self._solved_at[rows]
        at = np.arange(self.n_latents)
        wanted = np.minimum(at, n_stages[:, None] - 1) + self._first[rows, None]
        candidates = self._grids[wanted].astype(np.int32)
        places, values = puzzles.places, None
        if stage is not None:
            here = np.minimum(stage, n_stages - 1) + self._first[rows]
            values = self._grids[here].astype(np.int32)
        if self._augment:
            symmetry = random_symmetries(len(rows), box, draws)
            clues, solution = symmetry.grids(clues), symmetry.grids(solution)
            solved_at = symmetry.moved(solved_at)
            candidates = symmetry.masks(candidates)
            places = None if places is None else symmetry.moved(places)
            values = None if values is None else symmetry.masks(values)
        order = self._ordered(clues, solved_at, places, draws)
        filled = solution
        if values is not None:
            filled = np.where(clues > 0, clues, drawn_digits(values, draws))
        n_clues = np.count_nonzero(clues, axis=1)[:, None]
        return (
            tokens_of(filled, order, n_clues, self.n_latents),
            solution.astype(np.int32),
            n_clues.astype(np.int32),
            np.clip(2 + n_stages, 3, 8)[:, None].astype(np.int32),
            candidates,
        )

    def _ordered(
        self,
        clues: np.ndarray,
        solved_at: np.ndarray,
        places: np.ndarray | None,
        draws: Draws,
    ) -> np.ndarray:
        """(n, cells) the cells in order, clues first by row and column."""
        cell = np.arange(clues.shape[1])
        rank = np.broadcast_to(cell.astype(np.float64), clues.shape)
        if self._order == "solver":
            rank = solved_at + draws.random(clues.shape)
        elif self._order == "sorted":
            rank = solved_at + cell / cell.size
        elif self._order == "random":
            rank = draws.random(clues.shape)
        elif self._order == "file" and places is not None:
            rank = places
        # One too many, so that clues come before the first empty cell.
        return np.argsort(np.where(clues > 0, cell - cell.size, rank), axis=1)

    def position(self) -> Position:
        return {
            "kind": "sudoku",
            "epoch": self._epoch,
            "position": self._next,
            "instances": self._n_instances,
            "seed": self._seed,
            "batch_size": self._batch_size,
            "n_latents": self.n_latents,
            "order": self._order,
            "augment": self._augment,
            "shuffle": self._shuffle,
            "stage": self._stage,
            "n_puzzles": len(self._puzzles),
            "puzzles_crc32": self._digest,
        }

    def seek(self, position: Position) -> None:
        mine = self.position()
        check_kind(position, "sudoku", tuple(mine))
        for key in mine.keys() - {"epoch", "position", "instances"}:
            if position[key] != mine[key]:
                raise ValueError(
                    f"the state was saved with {key}={position[key]}, this stream has "
                    f"{key}={mine[key]}; build the stream as it was, or do not restore"
                )
        self._epoch, self._next = position["epoch"], position["position"]
        self._n_instances, self._rows = position["instances"], None

    def fresh(self) -> "SudokuDataset":
        return SudokuDataset(
            self._puzzles,
            self._batch_size,
            self.n_latents,
            self._order,
            self._augment,
            self._shuffle,
            self._repeat,
            self._stage,
            self._seed,
            self._strong,
        )

    def close(self) -> None:
        super().close()
        self._closed = True
