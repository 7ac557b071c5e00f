"""The command line, in this process: exit codes, messages, no tracebacks."""

import json
import re
import shutil
from pathlib import Path

import gin
import pytest

from retrax import cli

SHORT = [
    "--config_file=digits_mlp.gin",
    "--config=MLP.layer_widths = (8, 10)",
    "--config=train.eval_frequency = 4",
]


@pytest.fixture(autouse=True)
def _own_gin(monkeypatch, tmp_path):
    """Every command starts from an empty configuration, in an empty directory."""
    gin.clear_config()
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield
    gin.clear_config()


@pytest.fixture
def command(capsys):
    """Runs a command; returns (exit code, standard output, standard error)."""

    def run(*argv):
        gin.clear_config()
        code = cli.main(argv)
        out, err = capsys.readouterr()
        return code, out, err

    return run


def check_refused(result, *wanted):
    code, _, err = result
    assert code == cli.EXIT_USER_ERROR
    assert "Traceback" not in err
    assert "0x" not in err  # No addresses of objects.
    for text in wanted:
        assert text in err


@pytest.fixture(scope="module")
def finished_run(tmp_path_factory):
    """The directory of a run of 6 steps."""
    folder = tmp_path_factory.mktemp("finished") / "run"
    gin.clear_config()
    argv = ["train", *SHORT, "--config=train.steps = 6", f"--output_dir={folder}"]
    assert cli.main(argv) == 0
    gin.clear_config()
    return folder


@pytest.fixture
def run_copy(finished_run, tmp_path):
    return Path(shutil.copytree(finished_run, tmp_path / "run"))


# --- Mistakes -----------------------------------------------------------------------


def test_no_command_prints_help(command):
    code, out, _ = command()
    assert code == 2
    assert all(name in out for name in ("train", "eval", "configs", "doctor"))


def test_unknown_command_is_refused(capsys):
    with pytest.raises(SystemExit) as stopped:
        cli.main(["tarin"])
    assert stopped.value.code == 2
    assert "'train'" in capsys.readouterr().err


def test_no_configuration(command):
    check_refused(command("train"), "--config_file", "digits_mlp.gin")


def test_unknown_configuration_file_lists_those_that_ship(command):
    result = command("train", "--config_file=digit_mlp.gin")
    check_refused(result, "'digit_mlp.gin'", "Did you mean digits_mlp.gin?")


@pytest.mark.parametrize(
    ("binding", "wanted"),
    [
        ("train.stps = 3", ["'train'", "'stps'", "Did you mean steps?"]),
        ("Adam.lerning_rate = 3", ["'lerning_rate'", "Did you mean learning_rate"]),
        ("train.xyzzy = 3", ["'xyzzy'", "It has: ", "eval_frequency", "steps"]),
        ("trian.steps = 3", ["'trian'", "Did you mean train?"]),
        ("train.model = @MPL", ["'@MPL'", "Did you mean MLP?"]),
        ("train.model = @Xyzzy", ["'@Xyzzy'", "There are: ", "MLP", "digits"]),
        ("train.optimizer = @optimizers/Adaam", ["Adaam", "Did you mean Adam"]),
        ("train.lr_schedule_fn = @constant", ["'constant'", "lr_schedules.constant"]),
        ("train.steps = ", ["--config='train.steps = '"]),
        ("train.steps = 3 4", ["--config='train.steps = 3 4'", "newline"]),
    ],
)
def test_mistake_in_a_binding(command, binding, wanted):
    result = command("train", "--config_file=digits_mlp.gin", f"--config={binding}")
    check_refused(result, *wanted)


def test_mistake_in_a_file_names_file_and_line(command):
    Path("mine.gin").write_text("train.steps = 3\ntrain.model = \n")
    result = command("train", "--config_file=mine.gin")
    check_refused(result, "mine.gin", "line 2")


def test_module_that_is_not_there(command):
    Path("mine.gin").write_text("import no_such_module\n")
    result = command("train", "--config_file=mine.gin")
    check_refused(result, "no_such_module", "mine.gin", "current directory")


@pytest.mark.parametrize(
    ("binding", "wanted"),
    [
        ("train.steps = 0", ["steps must be at least 1, got 0", "'train'"]),
        ("train.steps = -3", ["got -3"]),
        ("train.steps = 2.5", ["whole number, got 2.5"]),
        ("train.checkpoint_highest = 'acuracy'", ["'acuracy'", "accuracy, loss"]),
        ("num_devices.value = 999", ["n_devices=999", "XLA_FLAGS"]),
        ("MLP.layer_widths = (10, 0)", ["(10, 0)"]),
        ("train.loss_fn = @WeightedCategoryCrossEntropy()", ["AddLossWeights"]),
    ],
)
def test_values_that_cannot_work(command, binding, wanted):
    result = command("train", *SHORT, f"--config={binding}", "--output_dir=out")
    check_refused(result, *wanted)
    assert not list(Path().rglob("*.pkl"))


def test_output_dir_is_a_file(command):
    Path("taken").write_text("something of value")
    result = command("train", *SHORT, "--output_dir=taken")
    check_refused(result, "output_dir taken is a file", "directory")
    assert Path("taken").read_text() == "something of value"


def test_debug_shows_where_it_was_raised():
    with pytest.raises(ValueError, match="steps must be at least 1"):
        cli.main(["train", *SHORT, "--config=train.steps = 0", "--debug"])


def test_failures_of_the_library_keep_their_traceback(monkeypatch):
    def fails(args):
        raise AssertionError("a fault")

    monkeypatch.setattr("retrax.command_line.commands.run", fails)
    with pytest.raises(AssertionError, match="a fault"):
        cli.main(["configs"])


def test_ctrl_c_before_training_starts(monkeypatch, command):
    def stops(args):
        raise KeyboardInterrupt

    monkeypatch.setattr("retrax.command_line.commands.run", stops)
    code, _, err = command("configs")
    assert (code, "Interrupted" in err) == (130, True)


# --- Training -----------------------------------------------------------------------


def test_training_reports_and_leaves_its_files(finished_run):
    names = {path.name for path in finished_run.iterdir()}
    assert names >= {"model.pkl", "config.gin", "metrics.jsonl", "curves.png"}
    steps = [json.loads(line)["step"] for line in _lines(finished_run)]
    assert steps == sorted(steps)
    assert steps[-1] == 6


def test_training_again_says_that_it_is_done(run_copy, command):
    before = (run_copy / "model.pkl").read_bytes()
    argv = [*SHORT, "--config=train.steps = 6", f"--output_dir={run_copy}"]
    code, out, _ = command("train", *argv)
    assert code == 0
    assert "This run is done: it has 6 of 6 steps." in out
    assert "train.steps = 12" in out
    assert (run_copy / "model.pkl").read_bytes() == before


def test_more_steps_continue(run_copy, command):
    before = _lines(run_copy)
    argv = [*SHORT, "--config=train.steps = 9", f"--output_dir={run_copy}"]
    code, out, _ = command("train", *argv)
    assert code == 0
    assert "Continuing from" in out and "at step 6." in out
    assert "Step      9: Training done." in out
    assert "Step      1: train loss" not in out
    after = _lines(run_copy)
    assert after[: len(before)] == before
    new_steps = {json.loads(line)["step"] for line in after[len(before) :]}
    assert min(new_steps) > 6 and max(new_steps) == 9


def test_another_model_in_the_same_directory_is_refused(run_copy, command):
    argv = [*SHORT, "--config=MLP.layer_widths = (9, 10)"]
    argv += ["--config=train.steps = 9", f"--output_dir={run_copy}"]
    check_refused(command("train", *argv), "model.pkl", "(64, 8)", "output_dir")


def test_model_of_a_module_in_the_current_directory(command):
    Path("retrax_test_models.py").write_text(
        "import gin\n"
        "from retrax import layers as tl\n"
        "@gin.configurable\n"
        "def TwoLayers(width=4, mode='train'):\n"
        "    return tl.Serial(tl.Flatten(), tl.Dense(width), tl.Dense(10))\n"
    )
    Path("mine.gin").write_text(
        "import retrax_test_models\n"
        "include 'digits_mlp.gin'\n"
        "train.model = @TwoLayers\n"
        "train.steps = 2\n"
    )
    code, out, err = command("train", "--config_file=mine.gin", "--output_dir=out")
    assert (code, err) == (0, "")
    assert f"trainable weights: {64 * 4 + 4 + 4 * 10 + 10}" in out
    result = command("train", "--config_file=mine.gin", "--config=TwoLayers.widht = 5")
    check_refused(result, "'widht'", "Did you mean width?")
    code, out, _ = command("eval", "out")
    assert code == 0


# --- The other commands -------------------------------------------------------------


def test_eval_gives_the_last_logged_metrics(finished_run, command):
    logged = [json.loads(line) for line in _lines(finished_run)]
    last = [x for x in logged if x["mode"] == "eval"][-1]
    code, out, _ = command("eval", str(finished_run))
    assert code == 0
    result = json.loads(out.splitlines()[-1])
    assert result["step"] == last["step"] == 6
    for name in ("loss", "accuracy"):
        assert result[name] == pytest.approx(last[f"metrics/{name}"], abs=1e-6)


def test_eval_is_in_the_precision_of_the_run(tmp_path, command):
    bindings = ["train.steps = 2", "train.precision = 'mixed_bfloat16'"]
    given = [f"--config={binding}" for binding in bindings]
    folder = str(tmp_path / "half")
    code, _, _ = command(
        "train", "--config_file=digits_mlp.gin", *given, f"--output_dir={folder}"
    )
    assert code == 0
    logged = [json.loads(line) for line in _lines(Path(folder))]
    last = [x for x in logged if x["mode"] == "eval"][-1]
    found = {}
    for precision in ("mixed_bfloat16", "float32"):
        binding = f"--config=train.precision = '{precision}'"
        code, out, _ = command("eval", folder, binding)
        assert code == 0
        found[precision] = json.loads(out.splitlines()[-1])["loss"]
    assert found["mixed_bfloat16"] == pytest.approx(last["metrics/loss"], abs=1e-6)
    assert abs(found["float32"] - last["metrics/loss"]) > 1e-6


def test_eval_of_a_part_and_of_another_checkpoint(finished_run, command):
    best = str(finished_run / "highest_accuracy.pkl")
    code, out, _ = command(
        "eval", str(finished_run), f"--checkpoint={best}", "--n_batches=1"
    )
    assert code == 0
    # The first of two batches has 256 examples.
    accuracy = json.loads(out.splitlines()[-1])["accuracy"] * 256
    assert accuracy == pytest.approx(round(accuracy), abs=1e-4)


def test_eval_without_a_directory_or_run(command):
    check_refused(command("eval", "nowhere"), "nowhere", "no directory")
    Path("empty").mkdir()
    check_refused(command("eval", "empty"), "empty", "no config.gin")
    Path("empty/config.gin").write_text("train.steps = 3\n")
    check_refused(command("eval", "empty"), "train.model")


def test_eval_without_a_checkpoint(run_copy, command):
    for path in run_copy.glob("*.pkl"):
        path.unlink()
    check_refused(command("eval", str(run_copy)), "model.pkl")


def test_eval_of_a_truncated_checkpoint_falls_back(run_copy, command, caplog):
    _truncate(run_copy / "model.pkl")
    code, out, _ = command("eval", str(run_copy))
    assert code == 0
    assert json.loads(out.splitlines()[-1])["step"] == 4  # The evaluation before.
    assert re.search(r"model\.pkl is cut short.*model\.previous\.pkl", caplog.text)


def test_eval_of_truncated_checkpoints_is_refused(run_copy, command):
    _truncate(run_copy / "model.pkl")
    _truncate(run_copy / "model.previous.pkl")
    check_refused(command("eval", str(run_copy)), "model.pkl", "cut short")


def test_configs_lists_what_ships(command):
    code, out, _ = command("configs")
    assert code == 0
    names = [line.split()[0] for line in out.splitlines()]
    folder = Path(cli.__file__).parent / "gin"
    assert names == sorted(path.name for path in folder.glob("*.gin"))
    assert all(len(line.split()) > 3 for line in out.splitlines())  # A description.


def test_doctor_lists_versions_and_devices(command):
    code, out, _ = command("doctor")
    assert code == 0
    for wanted in ("python", "jax ", "jaxlib", "devices", "memory", "all that is"):
        assert wanted in out
    assert "MISSING" not in out


def test_doctor_says_what_is_missing(monkeypatch, command):
    from retrax.command_line import commands

    monkeypatch.setattr(commands, "_CORE_FILES", ("no-such-package",))
    code, out, _ = command("doctor")
    assert code == 1
    assert "pip install no-such-package" in out


def _lines(folder):
    return (folder / "metrics.jsonl").read_text().splitlines()


def _truncate(path):
    path.write_bytes(path.read_bytes()[:1000])
