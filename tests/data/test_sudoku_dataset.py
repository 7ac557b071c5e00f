"""Batches of Sudoku puzzles: tokens, orders, instances, position in the stream."""

import dataclasses

import numpy as np
import pytest

from retrax import data
from retrax.data.sudoku import SudokuDataset, generate, instance_tokens, stages
from retrax.data.sudoku_draws import Draws
from retrax.data.sudoku_symmetry import canonical, patterns


@pytest.fixture(scope="module")
def puzzles():
    return generate(40, box=2, n_clues=(5, 7), seed=1)


def read_back(batch, i):
    """One row of a batch, token by token: (clues, filled grid, cells in order)."""
    tokens, _, start, _, candidates = batch
    k, cells = candidates.shape[1:]
    n, s = int(cells**0.5), int(start[i, 0])
    row = tokens[i].tolist()
    assert row[3 * s : 3 * s + k] == [n + 1] * k
    del row[3 * s : 3 * s + k]
    clues, filled, order = [0] * cells, [0] * cells, []
    for j in range(cells):
        r, c, value = row[3 * j : 3 * j + 3]
        assert filled[r * n + c] == 0 and 1 <= value <= n
        filled[r * n + c] = value
        if j < s:
            clues[r * n + c] = value
        order.append(r * n + c)
    return clues, filled, order


def options(**more):
    return dict(augment=False, shuffle=False, repeat=False) | more


@pytest.mark.parametrize("n_latents", [0, 1, 3, 9])
def test_a_batch_holds_what_it_says(puzzles, n_latents):
    stream = SudokuDataset(puzzles, 16, n_latents, **options())
    assert stream.n_batches == 3 and stream.n_examples == 40 and not stream.is_endless
    batches = list(stream)
    assert [len(batch[0]) for batch in batches] == [16, 16, 8]
    for at, batch in enumerate(batches):
        tokens, solution, start, level, candidates = batch
        assert [x.dtype for x in batch] == [np.int32] * 5
        assert tokens.shape[1] == 48 + n_latents
        for i in range(len(tokens)):
            puzzle = 16 * at + i
            clues, filled, order = read_back(batch, i)
            assert clues == puzzles.clues[puzzle].tolist()
            assert filled == solution[i].tolist() == puzzles.solutions[puzzle].tolist()
            s = int(start[i, 0])
            assert s == sum(c > 0 for c in clues) and order[:s] == sorted(order[:s])
            grids, n = stages(clues, 2)
            assert level[i, 0] == min(max(2 + n[0], 3), 8)
            for j in range(n_latents):
                assert (candidates[i, j] == grids[min(j, n[0] - 1)]).all()
            when = [
                next((t for t, g in enumerate(grids) if g[c] & (g[c] - 1) == 0), n[0])
                for c in order[s:]
            ]
            assert when == sorted(when)
            assert when == stream.solved_at[puzzle][order[s:]].tolist()


def test_orders_of_empty_cells(puzzles):
    def order(row, **more):
        batch = next(SudokuDataset(puzzles, 40, 2, **options(**more)))
        return read_back(batch, row)[2][int(batch[2][row, 0]) :]

    assert order(3, order="fixed") == sorted(order(3))
    assert order(3, order="random") != sorted(order(3))
    assert sorted(order(3, order="random")) == sorted(order(3))
    assert order(3, seed=0) == order(3) != order(3, seed=1)
    # In fixed order also after a symmetry has moved the cells.
    moved = next(SudokuDataset(puzzles, 40, order="fixed"))
    for i in range(40):
        rest = read_back(moved, i)[2][int(moved[2][i, 0]) :]
        assert rest == sorted(rest)
    places = np.tile(np.arange(16)[::-1], (40, 1))
    from_file = dataclasses.replace(puzzles, places=places)
    batch = next(SudokuDataset(from_file, 40, **options(order="file")))
    rest = read_back(batch, 0)[2][int(batch[2][0, 0]) :]
    assert rest == sorted(rest, reverse=True)


def test_augmented_puzzles_are_true_copies(puzzles):
    stream = SudokuDataset(puzzles, 40, 3, shuffle=False)
    first, second = next(stream), next(stream)
    assert (first[1] != puzzles.solutions).any(1).sum() > 35
    assert (first[1] != second[1]).any()
    for batch in (first, second):
        read = [read_back(batch, i) for i in range(40)]
        copies = dataclasses.replace(puzzles, clues=np.array([r[0] for r in read]))
        np.testing.assert_array_equal(canonical(copies), canonical(puzzles))
        for i, (clues, filled, _) in enumerate(read):
            assert filled == batch[1][i].tolist()
            grids, n = stages(clues, 2)
            np.testing.assert_array_equal(batch[4][i, 2], grids[min(2, n[0] - 1)])


def test_values_of_instances_are_uniform_on_the_candidates(puzzles):
    one = puzzles[:1]
    grids, n = stages(one.clues, 2)
    stream = SudokuDataset(one, 1, 3, augment=False)
    for stage in (0, 1, 99):
        batch = stream.sample_instance_batch(3000, stage)
        filled = np.array([read_back(batch, i)[1] for i in range(0, 3000, 2)])
        masks = grids[min(stage, n[0] - 1)]
        for cell in np.nonzero(masks)[0]:
            counts = np.bincount(filled[:, cell], minlength=5)[1:]
            allowed = masks[cell] >> np.arange(4) & 1
            expected = allowed * len(filled) / allowed.sum()
            assert (counts[allowed == 0] == 0).all()
            spread = 5 * np.sqrt(expected + 1)
            assert (abs(counts - expected) <= spread).all(), (stage, cell, counts)
        np.testing.assert_array_equal(batch[1], np.tile(one.solutions, (3000, 1)))
        assert (filled[:, one.clues[0] > 0] == one.clues[0][one.clues[0] > 0]).all()
    np.testing.assert_array_equal(filled[0], one.solutions[0])  # Elimination solves it.


def test_a_stream_of_instances_and_instances_of_a_batch(puzzles):
    plain = next(SudokuDataset(puzzles, 40, 3, **options()))
    drawn = next(SudokuDataset(puzzles, 40, 3, **options(stage=0)))
    later = instance_tokens(plain, 0, Draws(7))
    np.testing.assert_array_equal(plain[1], drawn[1])
    n_other = 0
    for tokens in (drawn[0], later):
        batch = (tokens, *plain[1:])
        for i in range(40):
            clues, filled, _ = read_back(batch, i)
            assert clues == puzzles.clues[i].tolist()
            masks = plain[4][i, 0]
            for cell in range(16):
                if clues[cell] == 0:
                    assert masks[cell] >> (filled[cell] - 1) & 1
            n_other += filled != plain[1][i].tolist()
    assert n_other > 70
    np.testing.assert_array_equal(later, instance_tokens(plain, 0, Draws(7)))
    with pytest.raises(ValueError, match="stage=3 is beyond the last: .*n_latents=3"):
        instance_tokens(plain, 3, Draws(7))


@pytest.mark.parametrize("stage", [None, 1])
def test_a_restored_stream_goes_on_with_the_next_batch(puzzles, stage):
    def make(**more):
        return SudokuDataset(puzzles, 12, 2, stage=stage, **more)

    stream = make()
    batches = []
    for i in range(7):  # Three batches an epoch.
        state = stream.state()
        batches.append((state, next(stream), stream.sample_instance_batch(3, i)))
    for state, batch, instances in batches:
        other = make()
        other.peek()
        other.restore(state)
        for a, b in zip(batch, next(other), strict=True):
            np.testing.assert_array_equal(a, b)
        for a, b in zip(
            instances,
            other.sample_instance_batch(
                3, batches.index(next(x for x in batches if x[0] is state))
            ),
            strict=True,
        ):
            np.testing.assert_array_equal(a, b)
    np.testing.assert_array_equal(next(make().fresh())[0], batches[0][1][0])
    firsts = {batch[0].tobytes() for _, batch, _ in batches}
    assert len(firsts) == 7
    with pytest.raises(ValueError, match="saved with seed=0, this stream has seed=1"):
        make(seed=1).restore(stream.state())
    stream.close()
    with pytest.raises(StopIteration):
        next(stream)


@pytest.mark.parametrize(
    "arguments, message",
    [
        (dict(order="sloved"), "order must be one of .* got 'sloved'"),
        (dict(order="file"), "order='file' needs puzzles from rows"),
        (dict(n_latents=-1), "n_latents=-1"),
        (dict(stage=-1), "stage=-1"),
        (dict(batch_size=41), "batch_size must be 1 to 40"),
    ],
)
def test_bad_arguments_are_told(puzzles, arguments, message):
    with pytest.raises(ValueError, match=message):
        SudokuDataset(puzzles, **{"batch_size": 4, **arguments})
    with pytest.raises(ValueError, match="stage not negative, got .* stage=-2"):
        SudokuDataset(puzzles, 4).sample_instance_batch(2, -2)


def test_inputs_hold_out_patterns_of_clues(tmp_path):
    inputs = data.sudoku(n_train=300, n_eval=30, batch_size=8, seed=3)
    batch = next(inputs.train_stream())
    assert batch[0].shape == (8, 51)
    held_out, train = inputs.eval_stream(), inputs.train_stream()
    (evaluation,) = list(held_out)
    assert len(evaluation[0]) == 30
    clues = [read_back(evaluation, i)[0] for i in range(30)]
    names = set(patterns(dataclasses.replace(train.puzzles, clues=np.array(clues))))
    assert not names & set(patterns(train.puzzles))
    (seen,) = list(inputs.train_eval_stream())
    clues = [read_back(seen, i)[0] for i in range(30)]
    assert clues == train.puzzles.clues[:30].tolist()
    lines = ["".join(map(str, grid)) for grid in train.puzzles.clues]
    (tmp_path / "a.txt").write_text("\n".join(lines))
    (tmp_path / "b.txt").write_text("\n".join(lines[:5]))
    files = data.sudoku(
        train_path=tmp_path / "a.txt", eval_path=tmp_path / "b.txt", batch_size=8
    )
    np.testing.assert_array_equal(
        next(files.eval_stream())[1], train.puzzles.solutions[:5]
    )
