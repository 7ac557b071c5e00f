"""Puzzles in memory and in files: `Puzzles`, `read_puzzles`, and a checked cache.

Above `sudoku_solver`, under `sudoku_generator` and `sudoku`. Three formats are read:

* lines of one character a cell, row by row, with 0 or . for an empty cell; after a
  comma or blank there may be the solution (81 characters for 9x9);
* rows of integers, separated by blanks or commas: the number of clues, then for each
  cell (row, column, value, strategy), clues first, then in the order of a solver. This
  is the format of the public data of Shah et al. 2024, https://arxiv.org/abs/2409.10502;
* .npy files of either: (n_puzzles, cells) or (n_puzzles, 1 + 4 cells) integers.
"""

import dataclasses
import hashlib
import io
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from retrax.data.sudoku_board import board
from retrax.data.sudoku_solver import solve
from retrax.errors import DataError

__all__ = ["Puzzles", "read_cache", "read_puzzles", "write_cache"]


@dataclasses.dataclass(frozen=True, eq=False)
class Puzzles:
    """Puzzles with one solution each, and their solutions.

    Attributes:
      box: side of a box.
      clues: (n_puzzles, cells) int8; 0 is an empty cell.
      solutions: (n_puzzles, cells) int8.
      places: (n_puzzles, cells) int16, the place of each cell in a solver's order as
        the file gave it, from 0; None if it gave none.
    """

    box: int
    clues: np.ndarray
    solutions: np.ndarray
    places: np.ndarray | None = None

    def __len__(self) -> int:
        """Number of puzzles."""
        return len(self.clues)

    def __getitem__(self, which: Any) -> "Puzzles":
        """Returns the puzzles of a slice, of indices or of a mask."""
        places = None if self.places is None else self.places[which]
        return Puzzles(self.box, self.clues[which], self.solutions[which], places)

    @property
    def n_clues(self) -> np.ndarray:
        """(n_puzzles,) numbers of clues."""
        return np.count_nonzero(self.clues, axis=1)


def read_puzzles(path: str | os.PathLike[str], box: int = 3) -> Puzzles:
    """Reads puzzles from a text or .npy file; see the module for the formats.

    Args:
      path: the file.
      box: side of a box.

    Raises:
      DataError: a row is malformed (the text names its line, from 1), a puzzle has no
        solution or several, or a given solution is none.
    """
    path = Path(path)
    if path.suffix == ".npy":
        array = np.load(path, allow_pickle=False)
        if array.ndim != 2 or not np.issubdtype(array.dtype, np.integer):
            raise DataError(
                f"{path} holds {array.dtype} of shape {array.shape}; a bank of puzzles "
                "is (n_puzzles, cells) or (n_puzzles, 1 + 4 cells) integers."
            )
        lines: list[tuple[int, Any]] = list(enumerate(array, start=1))
        what = "row"
    else:
        text = path.read_text().splitlines()
        lines = [(i, x.strip()) for i, x in enumerate(text, start=1) if x.strip()]
        what = "line"
    if not lines:
        raise DataError(f"{path} holds no puzzle.")
    parsed = []
    for i, line in lines:
        try:
            parsed.append(_parsed(line, box))
        except ValueError as e:
            raise DataError(f"{path}, {what} {i}: {e}") from None
    return _solved(path, what, [i for i, _ in lines], parsed, box)


Row = tuple[np.ndarray, np.ndarray | None, np.ndarray | None]


def _parsed(line: Any, box: int) -> Row:
    """Returns (clues, solution or None, places or None) of one row."""
    cells = board(box).cells
    if not isinstance(line, str):
        return _of_numbers(line, box) if len(line) != cells else (line, None, None)
    parts = line.replace(",", " ").split()
    if len(parts) <= 2 and len(parts[0]) == cells:
        grids = [_of_characters(part, box) for part in parts]
        return grids[0], grids[1] if len(grids) == 2 else None, None
    try:
        numbers = np.array([int(part) for part in parts])
    except ValueError:
        raise ValueError(
            f"neither a puzzle of {cells} characters nor a row of integers: "
            f"{line[:40]!r}{'...' if len(line) > 40 else ''}"
        ) from None
    return _of_numbers(numbers, box)


def _of_characters(text: str, box: int) -> np.ndarray:
    n, cells = board(box).n, board(box).cells
    if len(text) != cells:
        raise ValueError(f"expected {cells} characters, got {len(text)}")
    digits = "0123456789ABCDEFGHIJKLMNOP"[: n + 1]
    values = [max(digits.find(c), 0 if c == "." else -1) for c in text.upper()]
    if -1 in values:
        i = values.index(-1)
        raise ValueError(
            f"character {i + 1} is {text[i]!r}; a cell is one of {digits} or ."
        )
    return np.array(values)


def _of_numbers(numbers: np.ndarray, box: int) -> Row:
    b = board(box)
    if len(numbers) != 1 + 4 * b.cells:
        raise ValueError(
            f"expected {1 + 4 * b.cells} integers (number of clues, then row, column, "
            f"value, strategy of {b.cells} cells), got {len(numbers)}"
        )
    n_clues, rest = int(numbers[0]), np.asarray(numbers[1:]).reshape(b.cells, 4)
    row, column, value, strategy = rest.T
    if not 0 <= n_clues <= b.cells:
        raise ValueError(f"the number of clues is {n_clues}, not in 0 to {b.cells}")
    outside = (np.minimum(row, column) < 0) | (np.maximum(row, column) >= b.n)
    outside |= (value < 1) | (value > b.n)
    if outside.any():
        i = int(outside.argmax())
        raise ValueError(
            f"entry {i} is row {row[i]}, column {column[i]}, value {value[i]}; rows "
            f"and columns are 0 to {b.n - 1}, values 1 to {b.n}"
        )
    cell = row * b.n + column
    twice = np.bincount(cell, minlength=b.cells) != 1
    if twice.any():
        i = int(twice.argmax())
        raise ValueError(
            f"the cell at row {i // b.n}, column {i % b.n} comes "
            f"{np.count_nonzero(cell == i)} times; each cell comes once"
        )
    if (strategy[:n_clues] != 0).any():
        raise ValueError(
            f"entry {int((strategy[:n_clues] != 0).argmax())} is one of the {n_clues} "
            "clues, but its strategy is not 0"
        )
    solution, places = np.zeros(b.cells, int), np.zeros(b.cells, int)
    solution[cell], places[cell] = value, np.arange(b.cells)
    return np.where(places < n_clues, solution, 0), solution, places


def _solved(
    path: Path, what: str, numbers: Sequence[int], rows: Sequence[Row], box: int
) -> Puzzles:
    """Solves the puzzles, and compares with the solutions that are given."""
    grids = []
    for i, (row, _, _) in zip(numbers, rows, strict=True):
        try:
            grids.append(board(box).checked(row)[0])
        except DataError as e:
            raise DataError(f"{path}, {what} {i}: {e}") from None
    clues = np.stack(grids)
    try:
        solutions = solve(clues, box)
    except DataError:
        for i, grid in zip(numbers, clues, strict=True):
            try:
                solve(grid, box)
            except DataError as e:
                text = str(e).replace("puzzle 0", "the puzzle")
                raise DataError(f"{path}, {what} {i}: {text}") from None
        raise
    for i, (_, given, _), solution in zip(numbers, rows, solutions, strict=True):
        if given is not None and (given != solution).any():
            cell = int((given != solution).argmax())
            raise DataError(
                f"{path}, {what} {i}: the value given for cell {cell} is "
                f"{given[cell]}, but the puzzle's only solution has {solution[cell]}."
            )
    places = [place for _, _, place in rows if place is not None]
    whole = len(places) == len(rows)
    return Puzzles(
        box, clues, solutions, np.stack(places).astype(np.int16) if whole else None
    )


# --- Cache --------------------------------------------------------------------------


def write_cache(path: Path, puzzles: Puzzles) -> None:
    """Writes generated puzzles, whole or not at all, with a checksum before them."""
    buffer = io.BytesIO()
    np.save(buffer, np.stack([puzzles.clues, puzzles.solutions]), allow_pickle=False)
    body = buffer.getvalue()
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=path.name, suffix=".tmp")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(hashlib.sha256(body).hexdigest().encode() + b"\n" + body)
            file.flush()
            os.fsync(file.fileno())
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise


def read_cache(path: Path, box: int) -> Puzzles:
    """Reads what `write_cache` wrote.

    Raises:
      FileNotFoundError: there is no such file.
      DataError: the file is not what was written.
    """
    digest, _, body = path.read_bytes().partition(b"\n")
    if digest.decode("latin1") != hashlib.sha256(body).hexdigest():
        raise DataError(f"{path} is damaged: its checksum is another.")
    clues, solutions = np.load(io.BytesIO(body), allow_pickle=False)
    return Puzzles(box, clues, solutions)
