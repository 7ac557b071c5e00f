"""Sudoku puzzles: solver, stages, generator, formats, symmetries, splitting."""

import itertools
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from retrax.data import sudoku_generator
from retrax.data.sudoku import Puzzles, generate, read_puzzles, solve, split, stages
from retrax.data.sudoku_board import board
from retrax.data.sudoku_draws import Draws
from retrax.data.sudoku_solver import search
from retrax.data.sudoku_strong import ruled_out
from retrax.data.sudoku_symmetry import canonical, patterns, random_symmetries
from retrax.errors import DataError

VECTORS = json.loads(
    (Path(__file__).parent / "vectors" / "latent_public.json").read_text()
)


def peers(cell, box):
    n = box * box
    row, column = divmod(cell, n)
    for other in range(n * n):
        r, c = divmod(other, n)
        same_box = (r // box, c // box) == (row // box, column // box)
        if other != cell and (r == row or c == column or same_box):
            yield other


def brute_force(grid, box, limit):
    """Solutions by plain backtracking."""
    grid, found = list(grid), []
    neighbours = [list(peers(cell, box)) for cell in range(len(grid))]

    def fill():
        options = {
            cell: set(range(1, box * box + 1)) - {grid[p] for p in neighbours[cell]}
            for cell, value in enumerate(grid)
            if value == 0
        }
        if not options:
            found.append(tuple(grid))
            return
        cell = min(options, key=lambda c: len(options[c]))
        for value in sorted(options[cell]):
            grid[cell] = value
            fill()
            grid[cell] = 0
            if len(found) >= limit:
                return

    bad = any(v and v == grid[p] for c, v in enumerate(grid) for p in neighbours[c])
    if not bad:
        fill()
    return found


@pytest.fixture(scope="module")
def nines():
    return generate(12, box=3, n_clues=(26, 34), seed=3)


@pytest.fixture(scope="module")
def fours():
    return generate(300, box=2, n_clues=(5, 7), seed=1)


# --- Solver and stages --------------------------------------------------------------


@pytest.mark.parametrize("i", range(6))
def test_stages_are_those_of_the_vectors(i):
    vector = VECTORS["solver_stages"][i]
    box = {4: 2, 9: 3}[vector["n"]]
    grids, n_stages = stages(vector["clues"], box)
    assert grids.tolist() == vector["stages"]
    assert n_stages.tolist() == [len(vector["stages"])]
    assert solve(vector["clues"], box).tolist() == vector["solution"]


def test_candidates_of_the_vectors_follow_from_their_clues():
    for given in VECTORS["inputs"].values():
        for puzzle, wanted in zip(given["puzzles"], given["cand_targets"], strict=True):
            grids, n = stages(puzzle["clues"], given["box"])
            assert n[0] == puzzle["n_stages"]
            for j, masks in enumerate(wanted):
                assert grids[min(j, n[0] - 1)].tolist() == masks


def test_counting_agrees_with_brute_force():
    rng = np.random.default_rng(0)
    full = generate(1, box=2, n_clues=16).solutions[0]
    puzzles = []
    for _ in range(80):
        grid = np.where(rng.random(16) < rng.uniform(0.1, 0.7), full, 0)
        if rng.random() < 0.4:  # Often a contradiction.
            grid[rng.integers(16)] = rng.integers(1, 5)
        puzzles.append(grid)
    counts, found = search(board(2).masks(np.array(puzzles)), board(2), limit=3)
    wanted = [brute_force(grid, 2, 3) for grid in puzzles]
    assert np.minimum(counts, 3).tolist() == [len(w) for w in wanted]
    assert {len(w) for w in wanted} == {0, 1, 2, 3}
    for grid, solutions in zip(found, wanted, strict=True):
        if len(solutions) in (1, 2):
            assert tuple(grid) in solutions


def test_batches_of_puzzles_have_the_stages_of_each_alone(nines):
    grids, n = stages(nines.clues)
    alone = [stages(grid) for grid in nines.clues]
    assert n.tolist() == [m[0] for _, m in alone]
    np.testing.assert_array_equal(grids, np.concatenate([g for g, _ in alone]))
    assert len(set(n.tolist())) > 2


def ruled_out_slowly(masks, box):
    """Locked candidates and naked pairs, one digit, unit and pair after the other."""
    n = box * box
    rows = [{r * n + c for c in range(n)} for r in range(n)]
    columns = [{r * n + c for r in range(n)} for c in range(n)]
    boxes = [
        {c for c in range(n * n) if (c // n // box, c % n // box) == (i, j)}
        for i in range(box)
        for j in range(box)
    ]
    out = [0] * (n * n)
    for lines, blocks in ((rows + columns, boxes), (boxes, rows + columns)):
        for line, block in itertools.product(lines, blocks):
            for d in range(n):
                where = {c for c in line if masks[c] >> d & 1}
                if where and where <= block:
                    for c in block - line:
                        out[c] |= 1 << d
    for unit in rows + columns + boxes:
        for a, b in itertools.combinations(unit, 2):
            if masks[a] == masks[b] and bin(masks[a]).count("1") == 2:
                for c in unit - {a, b}:
                    out[c] |= masks[a]
    return [m & o for m, o in zip(masks, out, strict=True)]


@pytest.mark.parametrize("box", [2, 3])
def test_stronger_rules_rule_out_what_they_say(box):
    puzzles = generate(12, box, {2: 4, 3: (23, 25)}[box], seed=6)
    grids, n = stages(puzzles.clues, box)
    filled = board(box).masks(puzzles.clues) % board(box).full
    full_grids = grids | filled[np.repeat(np.arange(12), n)]
    found = ruled_out(full_grids.T, board(box)).T & full_grids
    for masks, out in zip(full_grids.tolist(), found.tolist(), strict=True):
        assert out == ruled_out_slowly(masks, box)


def test_stronger_rules_solve_more_and_lose_no_solution():
    puzzles = generate(60, 3, (23, 25), seed=6)
    solution = board(3).masks(puzzles.solutions)
    solved = {}
    for strong in (False, True):
        grids, n = stages(puzzles.clues, strong=strong)
        owner = np.repeat(np.arange(60), n)
        is_clue = puzzles.clues[owner] > 0
        assert np.all(is_clue | (grids & solution[owner] == solution[owner]))
        last = grids[n.cumsum() - 1]
        solved[strong] = (np.bitwise_count(last) <= 1).all(1)
    assert (solved[True] >= solved[False]).all()
    assert solved[False].sum() + 10 < solved[True].sum()


@pytest.mark.parametrize(
    "clues, message",
    [
        ([1, 1] + [0] * 14, "puzzle 0 has no solution"),
        ([1] + [0] * 15, "puzzle 0 has several solutions: its 1 clues"),
        ([5] + [0] * 15, "puzzle 0 holds 5 at cell 0; digits are 1 to 4"),
        ([0] * 15, r"have 16 cells, got an array of shape \(15,\)"),
    ],
)
def test_puzzles_without_one_solution_are_refused(clues, message):
    with pytest.raises(DataError, match=message):
        solve(clues, box=2)


# --- Generator ----------------------------------------------------------------------


def test_puzzles_have_one_solution_by_brute_force(nines, fours):
    for puzzles, n_looked_at in ((nines, 6), (fours, 40)):
        for clues, solution in zip(
            puzzles.clues[:n_looked_at], puzzles.solutions, strict=False
        ):
            found = brute_force(clues.tolist(), puzzles.box, 2)
            assert found == [tuple(solution.tolist())]
    assert set(nines.n_clues) <= set(range(26, 35)) and len(set(nines.n_clues)) > 3
    assert set(fours.n_clues) == {5, 6, 7}


def test_a_seed_fixes_the_puzzles_and_sizes_are_free(nines):
    again = generate(12, box=3, n_clues=(26, 34), seed=3)
    np.testing.assert_array_equal(again.clues, nines.clues)
    other = generate(12, box=3, n_clues=(26, 34), seed=4)
    assert (other.clues != nines.clues).any(1).all()
    large = generate(1, box=4, n_clues=170)
    assert large.n_clues == [170]
    np.testing.assert_array_equal(solve(large.clues, box=4), large.solutions)


WORKERS = """
import sys, numpy as np
from retrax.data import sudoku_generator
if __name__ == "__main__":
    sudoku_generator._CHUNK = 4
    puzzles = sudoku_generator.generate(10, 2, (5, 6), seed=9, workers=2)
    np.save(sys.argv[1], puzzles.clues)
"""


def test_worker_processes_make_the_same_puzzles(tmp_path, monkeypatch):
    script = tmp_path / "script.py"
    script.write_text(WORKERS)
    subprocess.run(
        [sys.executable, "-W", "error", script, tmp_path / "clues.npy"],
        check=True,
        timeout=120,
    )
    monkeypatch.setattr(sudoku_generator, "_CHUNK", 4)
    here = generate(10, 2, (5, 6), seed=9)
    np.testing.assert_array_equal(np.load(tmp_path / "clues.npy"), here.clues)


def test_the_cache_is_read_and_a_damaged_one_is_made_anew(tmp_path, monkeypatch):
    arguments = dict(box=2, n_clues=(5, 6), seed=2, cache_dir=tmp_path)
    first = generate(5, **arguments)
    (path,) = tmp_path.iterdir()
    whole = path.read_bytes()

    def fail(*args):
        raise RuntimeError("made anew")

    with monkeypatch.context() as patch:
        patch.setattr(sudoku_generator, "_chunk", fail)
        np.testing.assert_array_equal(generate(5, **arguments).clues, first.clues)
        path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
        with pytest.raises(RuntimeError, match="made anew"):
            generate(5, **arguments)
    np.testing.assert_array_equal(generate(5, **arguments).clues, first.clues)
    assert path.read_bytes() == whole
    generate(6, **arguments)
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize(
    "arguments, error, message",
    [
        (dict(n_clues=0), ValueError, "n_clues must be 1 to 16"),
        (dict(n_clues=(6, 5)), ValueError, "the least first"),
        (dict(seed=-1), ValueError, "seed=-1"),
        (dict(box=7), ValueError, "box must be 2, 3, 4 or 5"),
        (dict(n_clues=3), DataError, "ask for more clues"),
    ],
)
def test_what_cannot_be_generated_is_told(arguments, error, message, monkeypatch):
    monkeypatch.setattr(sudoku_generator, "_MAX_ROUNDS", 2)
    with pytest.raises(error, match=message):
        generate(4, **{"box": 2, "n_clues": 5, **arguments})


# --- Formats ------------------------------------------------------------------------


def row_of(clues, solution, order):
    n = int(len(clues) ** 0.5)
    first = [c for c in range(len(clues)) if clues[c]]
    cells = first + [c for c in order if not clues[c]]
    entries = [(c // n, c % n, int(solution[c]), int(not clues[c])) for c in cells]
    return [len(first), *itertools.chain(*entries)], cells


def test_all_formats_give_the_same_puzzles(nines, tmp_path):
    rng = np.random.default_rng(0)
    some = nines[:3]
    pairs = zip(some.clues, some.solutions, strict=True)
    both = [row_of(c, s, rng.permutation(81)) for c, s in pairs]
    rows, orders = [row for row, _ in both], [order for _, order in both]
    texts = ["".join(map(str, grid)) for grid in some.clues]
    solved = ["".join(map(str, grid)) for grid in some.solutions]
    files = {
        "rows.txt": "\n".join(" ".join(map(str, row)) for row in rows),
        "rows.csv": "\n\n".join(",".join(map(str, row)) for row in rows),
        "lines.txt": "\n".join(text.replace("0", ".") for text in texts),
        "pairs.csv": "\n".join(map(",".join, zip(texts, solved, strict=True))),
    }
    for name, text in files.items():
        (tmp_path / name).write_text(text + "\n")
    np.save(tmp_path / "rows.npy", np.array(rows, np.int16))
    np.save(tmp_path / "lines.npy", some.clues)
    for path in tmp_path.iterdir():
        read = read_puzzles(path)
        np.testing.assert_array_equal(read.clues, some.clues, err_msg=path.name)
        np.testing.assert_array_equal(read.solutions, some.solutions)
        if "rows" in path.name:
            assert read.places is not None
            assert read.places.argsort(1).tolist() == [list(o) for o in orders]
        else:
            assert read.places is None


GOOD = "1.....3..1.....2"
ROW = row_of(
    [1, 0, 0, 0, 0, 0, 3, 0, 0, 1, 0, 0, 0, 0, 0, 2],
    solve([1, 0, 0, 0, 0, 0, 3, 0, 0, 1, 0, 0, 0, 0, 0, 2], 2),
    range(16),
)[0]


def changed(**at):
    row = list(ROW)
    for place, value in at.items():
        row[int(place[1:])] = value
    return " ".join(map(str, row))


@pytest.mark.parametrize(
    "line, message",
    [
        ("1...x..3.1.....2", "neither a puzzle of 16 characters|character 5 is 'x'"),
        ("12 a", "neither a puzzle of 16 characters nor a row of integers: '12 a'"),
        ("1 2 3", "expected 65 integers .* got 3"),
        (changed(_0=17), "the number of clues is 17"),
        (changed(_1=4), "entry 0 is row 4, column 0, value 1; rows and columns"),
        (changed(_3=0), "value 0"),
        (changed(_1=1, _2=2), "the cell at row 0, column 0 comes 0 times"),
        (changed(_4=2), "entry 0 is one of the 4 clues, but its strategy is not 0"),
        (changed(_19=1), "the value given for cell 1"),
        ("1" * 16, "the puzzle has no solution"),
        ("." * 16, "the puzzle has several solutions"),
        (f"{GOOD},{GOOD}", "the value given for cell 1 is 0"),
        (f"{GOOD},12", "expected 16 characters, got 2"),
    ],
)
def test_malformed_rows_are_told_with_their_line(line, message, tmp_path):
    path = tmp_path / "bank.txt"
    path.write_text(f"{GOOD}\n\n{line}\n")
    with pytest.raises(DataError, match=f"bank.txt, line 3: .*({message})"):
        read_puzzles(path, box=2)


def test_banks_of_another_kind_are_refused(tmp_path):
    np.save(tmp_path / "bank.npy", np.zeros((2, 16)))
    with pytest.raises(DataError, match=r"holds float64 of shape \(2, 16\)"):
        read_puzzles(tmp_path / "bank.npy", 2)
    np.save(tmp_path / "bank.npy", np.zeros((2, 15), int))
    with pytest.raises(DataError, match="row 1: expected 65 integers"):
        read_puzzles(tmp_path / "bank.npy", 2)
    (tmp_path / "empty.txt").write_text("\n")
    with pytest.raises(DataError, match="holds no puzzle"):
        read_puzzles(tmp_path / "empty.txt", 2)


# --- Symmetries ---------------------------------------------------------------------


@pytest.mark.parametrize("strong", [False, True])
@pytest.mark.parametrize("box", [2, 3])
def test_elimination_and_symmetries_commute(box, strong, nines, fours):
    puzzles = {2: fours[:40], 3: nines}[box]
    symmetry = random_symmetries(len(puzzles), box, Draws(5))
    moved = symmetry.grids(puzzles.clues)
    assert (moved != puzzles.clues).any()
    np.testing.assert_array_equal(solve(moved, box), symmetry.grids(puzzles.solutions))
    grids, n = stages(puzzles.clues, box, strong)
    moved_grids, moved_n = stages(moved, box, strong)
    np.testing.assert_array_equal(n, moved_n)
    last, moved_last = grids[n.cumsum() - 1], moved_grids[n.cumsum() - 1]
    np.testing.assert_array_equal(moved_last, symmetry.masks(last))
    stack = np.stack([last, last], 1)
    np.testing.assert_array_equal(symmetry.masks(stack)[:, 1], moved_last)


def test_all_symmetries_are_drawn():
    symmetry = random_symmetries(6000, 2, Draws(0))
    places, counts = np.unique(symmetry.cells, axis=0, return_counts=True)
    assert len(places) == 128
    assert 20 < counts.min() and counts.max() < 90  # 47 expected, deviation 7.
    assert len(np.unique(symmetry.digits, axis=0)) == 24


def test_copies_have_one_name_and_others_another(fours):
    some = fours[:30]
    symmetry = random_symmetries(30, 2, Draws(2))
    copies = Puzzles(2, symmetry.grids(some.clues), symmetry.grids(some.solutions))
    np.testing.assert_array_equal(canonical(some), canonical(copies))
    np.testing.assert_array_equal(patterns(some), patterns(copies))
    names = {}  # By brute force: all 3072 symmetric copies of each puzzle.
    moves = np.unique(random_symmetries(4000, 2, Draws(0)).cells, axis=0)
    renamings = [[0, *p] for p in itertools.permutations(range(1, 5))]
    for grid, name in zip(some.clues, canonical(some), strict=True):
        moved = grid[moves]
        least = min(min(map(tuple, np.array(r)[moved].tolist())) for r in renamings)
        assert names.setdefault(least, name) == name
    assert len(set(names.values())) == len(names)


def test_held_out_puzzles_are_of_no_pattern_that_is_trained_on(fours, nines):
    train, held_out = split(fours, 40, seed=0)
    assert len(held_out) == 40 == len(set(canonical(held_out)))
    assert not set(patterns(held_out)) & set(patterns(train))
    assert not set(canonical(held_out)) & set(canonical(train))
    assert len(train) > 150
    train, held_out = split(nines, 4)
    assert (len(train), len(held_out)) == (8, 4)
    moved = random_symmetries(12, 3, Draws(1)).grids(nines.clues)
    copies = Puzzles(3, moved, nines.solutions)
    assert patterns(copies).tolist() == patterns(nines).tolist()
    with pytest.raises(ValueError, match="too few to hold out n_eval=299"):
        split(fours, 299)
