"""CurriculumTrainer: stages, the gate, joint steps, resume, evaluation, the picture."""

import functools
import json
import shutil

import gin
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from retrax import cli, data, models, optimizers
from retrax.data.sudoku import SudokuDataset, generate, stages
from retrax.errors import ConfigError, DataError
from retrax.shapes import ShapeDtype, signature
from retrax.supervised.curriculum import CurriculumTrainer, LatentTrainTask
from retrax.supervised.latent_config import LatentConfig
from retrax.supervised.latent_decoding import decode, grade
from retrax.supervised.latent_evaluation import LatentEvaluation, Report
from retrax.supervised.latent_layers import LatentThoughtLoss, latent_model, thinking
from retrax.supervised.latent_losses import gate_terms, loss_terms
from retrax.supervised.latent_picture import draw_thoughts
from retrax.supervised.latent_step import StepPlan

COMPILES_QUICKLY = True

K = 2
CONFIG = LatentConfig(
    mode="depth", prefix_length=23, leak_weight=0.2, supervise_first=True
)
PUZZLES = generate(12, box=2, n_clues=(5, 7), seed=1)


def lm(mode="train", n_latents=K):
    sizes = dict(d_model=8, d_ff=8, n_layers=1, n_heads=2, dropout=0.0, conv_width=3)
    return models.LatentTransformerLM(4, n_latents, mode=mode, **sizes)


def model(mode="train", config=CONFIG):
    return latent_model(lm, config, mode)


def inputs(n_latents=K, n_eval=8):
    train = SudokuDataset(PUZZLES, 4, n_latents, seed=3)
    once = dict(augment=False, shuffle=False, repeat=False)
    return data.Inputs(train, SudokuDataset(PUZZLES[:n_eval], 4, n_latents, **once))


class Counted(CurriculumTrainer):
    """Notes what is traced."""

    def gradients(self, *args):
        self.traced = [*getattr(self, "traced", []), self.step_trainer.plan]
        return super().gradients(*args)


def made(output_dir=None, trainer_class=Counted, config=CONFIG, **options):
    return trainer_class(
        functools.partial(model, config=config),
        LatentThoughtLoss(config),
        optimizers.AdamW(1e-2),
        lambda step: 1e-2,
        inputs(),
        output_dir,
        **{"n_devices": 1, "beams": (), "ablate": False, **options},
    )


@pytest.fixture(scope="module")
def trainer():
    trainer = made(replay_share=0.25, mix_share=0.25, max_steps=None, min_steps=5)
    yield trainer
    trainer.close()


def bits(tree):
    return [np.asarray(x).tobytes() for x in jax.tree.leaves(tree)]


# --- Stages and plans ---------------------------------------------------------------


def test_plans_depend_on_seed_step_and_stage_alone(trainer):
    trainer.curriculum.begin(0, 0)
    assert {trainer.plan(step) for step in range(1, 50)} == {StepPlan((0,))}
    trainer.curriculum.begin(2, 0)
    plans = [trainer.plan(step) for step in range(1, 801)]
    assert plans == [trainer.plan(step) for step in range(1, 801)]
    kinds = {
        StepPlan((0,), backtrack=True): 1 / 8,
        StepPlan((1,), backtrack=True): 1 / 8,
        StepPlan((0, 1, 2)): 1 / 4,
        StepPlan((2,)): 1 / 2,
    }
    assert set(plans) == set(kinds)
    for kind, share in kinds.items():
        assert abs(plans.count(kind) / 800 - share) < 0.06
    trainer.curriculum.begin(0, 0)


def test_values_are_drawn_from_what_the_stages_allow(trainer):
    batch = next(SudokuDataset(PUZZLES, 8, K))
    tokens, _, start, _, candidates = batch
    plan = StepPlan((0, 1, 2))
    drawn = trainer.instances(batch, 7, plan)
    assert drawn[0].shape == (8, 3, 50)
    np.testing.assert_array_equal(drawn[0][:, 2], tokens)  # The solution.
    for i in range(8):
        base = 3 * start[i, 0] + K
        for t in range(2):
            one = drawn[0][i, t]
            value = (np.arange(50) >= base) & ((np.arange(50) - base) % 3 == 2)
            np.testing.assert_array_equal(one[~value], tokens[i][~value])
            for at in np.nonzero(value)[0]:
                mask = candidates[i, t, one[at - 2] * 4 + one[at - 1]]
                assert mask >> (one[at] - 1) & 1
    again = trainer.instances(batch, 7, plan)
    np.testing.assert_array_equal(again[0], drawn[0])
    other = trainer.instances(batch, 8, StepPlan((0,)))
    assert (other[0] != drawn[0][:, 0]).any()


def test_settings_of_stages():
    wanted = [(1, 0), (2, 1), (2, 1)]
    for stage, (passes, slot) in enumerate(wanted):
        settings = StepPlan((stage,), backtrack=stage == 1).settings(stage, K)
        assert settings == dict(num_passes=passes, inst_slot=slot, backtrack=stage == 1)


def test_the_gate_wants_enough_steps_and_evaluations_in_a_row(trainer, monkeypatch):
    found = iter([0.04, 0.06, 0.05, 0.01, 9.0, 0.0, 0.0, 0.0])

    class Fake:
        def evaluate(self, batches, weights, state, num_passes, *args, **options):
            report = Report({"loss": 1.0}, {})
            if args:
                report.details[f"excess/stage_{trainer.stage}"] = next(found)
            return report

    monkeypatch.setattr(trainer, "_evaluation", Fake())
    trainer.curriculum.begin(0, 0)
    seen = []
    for step in range(1, 8):
        trainer._session.step = 10 * step
        trainer.evaluate(1)
        seen.append((trainer.stage, trainer.curriculum.n_passed))
    # Passed, failed, passed twice: on; failed, passed twice: on; one more is no gate.
    assert seen == [(0, 1), (0, 0), (0, 1), (1, 0), (1, 0), (1, 1), (2, 0)]
    assert trainer.num_passes == 2
    trainer._session.step = 0
    trainer.curriculum.begin(0, 0)
    trainer.curriculum.n_passed = 5
    trainer._judge(0.0)
    assert trainer.stage == 0  # Fewer than min_steps.
    trainer.curriculum.begin(0, 0)


def test_the_gate_is_measured_between_evaluations(tmp_path):
    trainer = made(tmp_path, gate_frequency=2, slack=100.0, draws_thoughts=False)
    trainer.run(9, None, 0)
    # Two measurements pass each stage; then solutions are trained, without a gate.
    assert (trainer.stage, trainer.curriculum.begun_at) == (2, 8)
    lines = [*map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines())]
    found = {
        name: {x["step"]: x[name] for x in lines if name in x}
        for name in (f"training/gate/{x}" for x in ("stage", "excess", "inside"))
    }
    assert found["training/gate/stage"] == {2: 0.0, 4: 0.0, 6: 1.0, 8: 1.0}
    assert set(found["training/gate/excess"]) == {2, 4, 6, 8}
    assert all(0 < p < 1 for p in found["training/gate/inside"].values())
    trainer.close()
    with pytest.raises(ValueError, match="gate_frequency must be at least 1, got 0"):
        made(gate_frequency=0)


def test_evaluation_data_must_end(trainer, monkeypatch):
    endless = data.Inputs(SudokuDataset(PUZZLES, 4, K))
    monkeypatch.setattr(trainer, "_inputs", endless)
    with pytest.raises(DataError, match="the evaluation data never ends"):
        trainer.evaluate(None)


def test_held_out_puzzles_have_to_fit_the_prefix(trainer, monkeypatch):
    puzzles = generate(4, box=2, n_clues=8, seed=1)
    once = dict(augment=False, shuffle=False, repeat=False)
    held_out = SudokuDataset(puzzles, 4, K, **once)
    both = data.Inputs(SudokuDataset(PUZZLES, 4, K), held_out)
    monkeypatch.setattr(trainer, "_inputs", both)
    for measure in (lambda: trainer.evaluate(None), trainer._measure_gate):
        with pytest.raises(DataError, match=r"has 8 clues, .*prefix_length is 23"):
            measure()


@pytest.mark.parametrize("stage", [-1, 3])
def test_a_stage_beyond_the_last_is_refused(trainer, stage):
    with pytest.raises(ConfigError, match=f"stage {stage} is beyond the last: with 2"):
        trainer.stage = stage


@pytest.mark.parametrize(
    "options, error, message",
    [
        (dict(replay_share=0.7, mix_share=0.7), ConfigError, "got 0.7 and 0.7"),
        (dict(patience=0), ConfigError, "patience must be at least 1, got 0"),
        (dict(max_steps=3, min_steps=4), ConfigError, "max_steps must be at least 4"),
        (
            dict(checkpoint_highest="solved"),  # Nothing is decoded here.
            ConfigError,
            "checkpoint_highest='solved' is no metric of this run",
        ),
        (
            dict(config=LatentConfig(aux_weight=0.0), replay_share=0.1),
            ConfigError,
            "replay_share=0.1 trains the candidate head .* aux_weight=0",
        ),
    ],
)
def test_options_that_cannot_work_are_told(options, error, message):
    with pytest.raises(error, match=message):
        made(**options)


def test_parts_that_do_not_fit_are_told():
    adam, rate = optimizers.Adam(1e-3), lambda step: 1e-3
    with pytest.raises(TypeError, match="loss_fn to be a LatentThoughtLoss"):
        CurriculumTrainer(model, model(), adam, rate, inputs())
    with pytest.raises(TypeError, match="model that is a LatentThoughts"):
        CurriculumTrainer(lm, LatentThoughtLoss(CONFIG), adam, rate, inputs())
    with pytest.raises(ConfigError, match="the model thinks by .* its loss goes by"):
        CurriculumTrainer(model, LatentThoughtLoss(), adam, rate, inputs())
    short = LatentConfig(prefix_length=17)
    batch = next(SudokuDataset(PUZZLES, 12, K))
    with pytest.raises(DataError, match="7 clues, .* first 23 tokens, but .* is 17"):
        CurriculumTrainer.instances(
            type("T", (), {"_loss_config": short}), batch, 1, StepPlan((0,))
        )
    task = LatentTrainTask(inputs().train_stream(), adam, config=CONFIG)
    assert task.loss_layer.config == CONFIG and task.learning_rate(1) > 0


# --- Steps --------------------------------------------------------------------------


def test_a_joint_step_takes_the_mean_of_the_gradients(trainer):
    step_trainer = trainer.step_trainer
    weights, state = step_trainer.carry[:2]
    batch = next(SudokuDataset(PUZZLES, 4, K))
    plans = [StepPlan((0,)), StepPlan((1,)), StepPlan((0, 1))]
    *alone, both = (trainer.instances(batch, 3, plan) for plan in plans)

    @jax.jit
    def run(key):
        found = []
        for plan, one in zip(plans, (*alone, both), strict=True):
            step_trainer.plan = plan
            grads, aux = step_trainer.gradients(weights, state, key, one)
            found.append((grads, aux.loss, aux.metrics))
        return found

    first, second, joint = run(jax.random.key(0))
    step_trainer.plan = None
    mean = jax.tree.map(lambda a, b: (a + b) / 2, first, second)
    for a, b in zip(jax.tree.leaves(joint[:2]), jax.tree.leaves(mean[:2]), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6)
    for name, (value, weight) in joint[2].items():
        np.testing.assert_allclose(value, mean[2][name][0], atol=1e-6)
        assert weight == second[2][name][1] > 0
    assert abs(first[1] - second[1]) > 1e-3


def test_a_resumed_run_goes_on_in_the_middle_of_a_stage(tmp_path):
    options = dict(max_steps=3, draws_thoughts=False)
    whole = made(tmp_path / "whole", **options)
    whole.run(4, None, 0)
    shutil.copytree(tmp_path / "whole", tmp_path / "resumed")
    (tmp_path / "resumed" / "run.lock").unlink(missing_ok=True)
    assert (whole.stage, whole.curriculum.begun_at) == (1, 3)
    whole.run(6, None, 0)
    resumed = made(tmp_path / "resumed", **options)
    assert resumed.step == 4 and resumed.curriculum.begun_at == 3
    resumed.run(6, None, 0)
    assert whole.curriculum.state() == resumed.curriculum.state()
    for name in ("model_weights", "step_trainer.slots", "train_stream.state"):
        a, b = (functools.reduce(getattr, name.split("."), t) for t in (whole, resumed))
        a, b = (x() if callable(x) else x for x in (a, b))
        assert bits(a) == bits(b), name
    # A program for each depth, and the resumed run begins with that of its stage.
    assert whole.traced == [StepPlan((0,)), StepPlan((1,))]
    assert resumed.traced == [StepPlan((1,))]
    # Solutions are values, not another depth.
    whole.run(8, None, 0)
    assert whole.stage == 2 and len(whole.traced) == 2
    whole.close()
    resumed.close()


# --- Evaluation ---------------------------------------------------------------------


def random_weights(layer, batch):
    wanted, state = layer.weights_and_state_signature(signature(batch))
    rng = np.random.default_rng(0)
    weights = jax.tree.map(lambda s: rng.normal(size=s.shape).astype("f") / 2, wanted)
    return weights, state


@pytest.fixture(scope="module")
def evaluated():
    """An evaluation of random weights, with its batch and what the model says to it."""
    thoughts, cached = model("eval"), model("predict")
    batch = next(SudokuDataset(PUZZLES, 6, K, augment=False, shuffle=False))
    weights, state = random_weights(thoughts, batch)
    evaluation = LatentEvaluation(thoughts, cached)
    report = evaluation.evaluate(
        [batch], weights, state, 2, gate_stages=(0, 1), beams=(1, 3), ablate=True
    )

    @functools.partial(jax.jit, static_argnums=1)
    def run(tokens, passes):
        with thinking(num_passes=passes):
            return thoughts.pure_fn((tokens, *batch[1:]), weights, state, None)[0][:2]

    return report, batch, run, (evaluation, weights, state)


def greedily(batch, run, width):
    """Decodes by whole runs of the model, with all beams of a row in a list."""
    tokens, _, start = batch[:3]
    beams = [[(0.0, row.copy())] for row in tokens]
    for t in range(tokens.shape[1] - 1):
        rows = [[row for _, row in some] for some in beams]
        padded = [some + [some[0]] * (width - len(some)) for some in rows]
        log_p = []
        for k in range(width):
            logits = np.asarray(run(np.stack([p[k] for p in padded]), 2)[0][0, :, t])
            log_p.append(logits - np.log(np.exp(logits).sum(-1, keepdims=True)))
        for i, some in enumerate(beams):
            if t + 1 < 3 * start[i, 0] + K:
                continue
            options = []
            for k, (score, row) in enumerate(some):
                for token in range(6):
                    longer = row.copy()
                    longer[t + 1] = token
                    options.append((score + log_p[k][i, token], longer))
            beams[i] = sorted(options, key=lambda x: -x[0])[:width]
    return np.stack([some[0][1] for some in beams])


@pytest.mark.parametrize("width", [1, 3])
def test_decoding_takes_the_most_probable_tokens(evaluated, width):
    report, batch, run, (evaluation, weights, state) = evaluated
    wanted = greedily(batch, run, width)
    latents, *_ = evaluation._program("think", 2)(weights, state, batch)
    got = evaluation._program("decode", width)(weights, batch[0], batch[2], latents)
    np.testing.assert_array_equal(got, wanted)
    graded = grade(wanted, batch[1], batch[2], K)
    if width == 1:
        assert report.metrics["cell_accuracy"] == graded.cell_accuracy
        assert report.metrics["solved"] == graded.solved.mean()
        read, tokens = report.example
        np.testing.assert_array_equal(tokens, wanted)
        cand = np.asarray(run(batch[0], 2)[1])[0]
        assert ((cand > np.log(5.0)) == read).all()
    else:
        assert report.details["cells/beam_3"] == graded.cell_accuracy


def test_what_is_measured_follows_from_the_models_outputs(evaluated):
    report, batch, run, _ = evaluated
    tokens, solution, start, _, candidates = batch
    logits, cand = (np.asarray(x)[0] for x in run(tokens, 2))
    config = dict(mode="depth", leak_weight=0.2, supervise_first=True, num_passes=2)
    terms = jax.jit(functools.partial(loss_terms, **config))(
        tokens, *batch[2:], logits[None], cand[None]
    )
    assert abs(report.metrics["loss"] - float(terms["total"])) < 1e-5
    right = n_values = 0
    for i in range(len(tokens)):
        for j in range(int(start[i, 0]), 16):
            at = 3 * j + K
            cell = tokens[i, at] * 4 + tokens[i, at + 1]
            right += logits[i, at + 1, 1:5].argmax() + 1 == solution[i, cell]
            n_values += 1
    assert abs(report.metrics["value_accuracy"] - right / n_values) < 1e-6
    # Weighed five times, a digit of probability 1/2 has the logit log 5.
    held = cand > np.log(5.0)
    assert (held != (cand > 0)).any()
    for k in range(K):
        sets = [
            sum(1 << d for d in range(4) if held[i, k, c, d]) == candidates[i, k, c]
            for i in range(len(tokens))
            for c in range(16)
            if candidates[i, k, c]
        ]
        assert abs(report.details[f"candidates/slot_{k}"] - np.mean(sets)) < 1e-6


@pytest.mark.parametrize("stage", [0, 1])
def test_the_gate_is_measured_on_instances(evaluated, stage):
    report, batch, run, (evaluation, weights, state) = evaluated
    from retrax.data.sudoku import instance_tokens
    from retrax.data.sudoku_draws import Draws

    tokens = instance_tokens(batch, stage, Draws(0x67617465, stage, 0))
    logits = np.asarray(run(tokens, stage + 1)[0][0])
    found = []
    for i in range(len(tokens)):
        for j in range(int(batch[2][i, 0]), 16):
            at = 3 * j + K
            mask = batch[4][i, stage, tokens[i, at] * 4 + tokens[i, at + 1]]
            found.append((logits[i, at + 1], mask))
    z, masks = (np.array(x) for x in zip(*found, strict=True))
    terms = gate_terms(jnp.asarray(z), jnp.asarray(masks), 4)
    excess = float(np.mean(terms["ce"] - terms["log_size"]))
    assert abs(report.details[f"excess/stage_{stage}"] - excess) < 1e-5
    leak = float(np.mean(terms["leak"]))
    assert abs(report.details[f"leak/stage_{stage}"] - leak) < 1e-5
    inside = float(np.mean(np.exp(-terms["leak"])))
    assert abs(report.details[f"inside/stage_{stage}"] - inside) < 1e-5
    gate = evaluation.gate([batch], weights, state, stage)
    for name, value in (("excess", excess), ("leak", leak), ("inside", inside)):
        assert abs(gate[name] - value) < 1e-5


def test_shares_of_kinds_add_up_to_the_whole(evaluated):
    report, batch, _, _ = evaluated
    details, metrics = report.details, report.metrics
    for name, kind in (("level", batch[3]), ("clues", batch[2])):
        values, counts = np.unique(kind, return_counts=True)
        solved = [details[f"solved/{name}_{v}"] for v in values]
        assert abs(np.dot(solved, counts) / counts.sum() - metrics["solved"]) < 1e-9
    grids, n = stages(np.where(batch[4][:, 0] > 0, 0, batch[1]), 2)
    per_stage = [
        (grids[a : a + m] & (grids[a : a + m] - 1) > 0).sum(0)[grids[a] > 0]
        for a, m in zip(n.cumsum() - n, n, strict=True)
    ]
    values, counts = np.unique(np.concatenate(per_stage), return_counts=True)
    cells = [details[f"cells/stage_{v}"] for v in values]
    whole = np.dot(cells, counts) / counts.sum()
    assert abs(whole - metrics["cell_accuracy"]) < 1e-9
    assert {"solved/zeroed", "cells/shuffled", "solved/beam_3"} <= set(details)


def test_grading_counts_cells_that_are_empty_right_and_there():
    solution = np.arange(16)[None] % 4 + 1
    order = np.arange(16)
    triples = np.stack([order // 4, order % 4, solution[0]], 1)
    given = np.concatenate([triples[:2].ravel(), [5, 5], triples[2:].ravel()])

    def graded(*changes):
        tokens = given.copy()
        for at, value in changes:
            tokens[at] = value
        return grade(tokens[None], solution, np.array([[2]]), 2)

    whole = graded()
    assert whole.solved[0] and whole.cell_accuracy == 1.0
    assert whole.empty[0].tolist() == [False] * 2 + [True] * 14
    for changes in (
        [(10, 0)],  # A value of 0 is none of them.
        [(8, 5)],  # A row out of the grid.
        [(11, 0), (12, 2), (13, 3)],  # A cell again, in another one's place.
        [(8, 0), (9, 0), (10, 1)],  # A clue, rightly.
    ):
        one = graded(*changes)
        assert not one.solved[0] and one.right.sum() == 13


def test_without_slots_there_is_one_stage_and_no_gate():
    thoughts, cached = (
        latent_model(lambda mode: lm(mode, 0), LatentConfig(), m)
        for m in ("eval", "predict")
    )
    batch = next(SudokuDataset(PUZZLES, 4, 0, augment=False))
    weights, state = random_weights(thoughts, batch)
    report = LatentEvaluation(thoughts, cached).evaluate(
        [batch], weights, state, 0, beams=(), ablate=True
    )
    assert set(report.metrics) == {"loss", "value_accuracy"} and not report.details
    with pytest.raises(ConfigError, match="is the evaluation set empty"):
        LatentEvaluation(thoughts, cached).evaluate([], weights, state, 0)
    with pytest.raises(ConfigError, match="model of mode 'predict' that is"):
        LatentEvaluation(thoughts, lm("predict"))


def test_the_picture_shows_a_puzzle(tmp_path):
    batch = next(SudokuDataset(PUZZLES, 2, 3, augment=False, shuffle=False))
    rng = np.random.default_rng(0)
    cand = rng.normal(size=(2, 3, 16, 4)) > 0
    path = tmp_path / "thoughts.png"
    draw_thoughts(batch, cand, batch[0], path, "step 7")
    picture = path.read_bytes()
    assert picture.startswith(b"\x89PNG") and len(picture) > 8000
    tokens = batch[0].copy()
    tokens[:, 30:] = 5  # Nothing that belongs into a grid.
    draw_thoughts(batch, cand, tokens, path)
    assert path.read_bytes() != picture


def test_decoding_can_be_given_the_first_token(evaluated):
    _, batch, _, (evaluation, weights, state) = evaluated
    tokens, start = batch[0], batch[2]
    latents, *_ = evaluation._program("think", 2)(weights, state, batch)

    @jax.jit
    def run(tokens):
        inner = model("predict").model
        return decode(inner, weights[0], tokens, start, latents, give_first=True)

    rows, base = np.arange(6), 3 * start[:, 0] + K
    for first in (1, 3):
        given = tokens.copy()
        given[rows, base] = first
        out = np.asarray(run(given))
        assert (out[rows, base] == first).all()
        for i in range(6):
            np.testing.assert_array_equal(out[i, : base[i]], tokens[i, : base[i]])


def test_the_shipped_configuration_trains_from_the_command_line(tmp_path):
    small = [
        "sudoku.n_train = 80",
        "sudoku.n_eval = 4",
        "sudoku.batch_size = 4",
        "sudoku.n_latents = 1",
        "LatentTransformerLM.n_latents = 1",
        "LatentTransformerLM.d_model = 8",
        "LatentTransformerLM.d_ff = 8",
        "LatentTransformerLM.n_layers = 1",
        "LatentTransformerLM.n_heads = 2",
        "train.steps = 2",
        "train.eval_frequency = None",
    ]
    arguments = [f"--config={line}" for line in small]
    run = tmp_path / "run"
    command = ["train", "--config_file=sudoku4_latent.gin", f"--output_dir={run}"]
    try:
        assert cli.main([*command, *arguments]) == 0
    finally:
        gin.clear_config()
    last = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
    assert last["step"] == 2 and 0 <= last["training/cells/zeroed"] <= 1
    written = {path.name for path in run.iterdir()}
    assert {"thoughts.png", "highest_solved.pkl", "curves.png"} <= written
    assert "CurriculumTrainer.replay_share = 0.05" in (run / "config.gin").read_text()


@pytest.mark.parametrize(
    "name, n_weights, n_latents",
    [
        ("sudoku4_latent", 546_880, 3),
        ("sudoku9_latent", 922_073, 3),
        ("sudoku9_baseline", 827_648, 0),
        ("sudoku9_paper", 42_690_240, 0),
    ],
)
def test_models_of_the_shipped_configurations_fit_their_data(
    name, n_weights, n_latents
):
    try:
        gin.parse_config_file(f"{name}.gin")
        n = gin.query_parameter("LatentTransformerLM.side")
        cells, rows = n * n, 4
        sig = (
            ShapeDtype((rows, 3 * cells + n_latents), np.int32),
            ShapeDtype((rows, cells), np.int32),
            ShapeDtype((rows, 1), np.int32),
            ShapeDtype((rows, 1), np.int32),
            ShapeDtype((rows, n_latents, cells), np.int32),
        )
        assert gin.query_parameter("sudoku.n_latents") == n_latents
        thoughts = latent_model(mode="train")
        weights, _ = thoughts.weights_and_state_signature(sig)
    finally:
        gin.clear_config()
    assert sum(np.prod(w.shape) for w in jax.tree.leaves(weights)) == n_weights
    config = thoughts.config
    has_prefixes = (config.prefix_length is None, config.shared_prefix is None)
    assert has_prefixes == (n_latents == 0,) * 2
