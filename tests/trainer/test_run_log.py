"""What a run shows and writes; that failing writes never end it."""

import io
import json
import logging
import math
import resource
import select
import struct
import subprocess
import sys
import textwrap
import time
from types import SimpleNamespace

import numpy as np
import pytest

from retrax.trainer import curves, progress
from retrax.trainer.history import History
from retrax.trainer.run_log import RunLog


class Terminal(io.StringIO):
    def isatty(self):
        return True


class DeviceLoss:
    """A loss that counts how often it is read."""

    def __init__(self, value):
        self.value = value
        self.n_reads = 0

    def __float__(self):
        self.n_reads += 1
        return self.value


def json_lines(folder):
    return [json.loads(x) for x in (folder / "metrics.jsonl").read_text().splitlines()]


def events(folder):
    """Reads event files by the TFRecord layout: length, crc, data, crc."""
    from tensorboardX.proto.event_pb2 import Event

    found = []
    for path in sorted(folder.glob("events.out.tfevents.*")):
        data = path.read_bytes()
        while data:
            (n,) = struct.unpack("<Q", data[:8])
            found.append(Event.FromString(data[12 : 12 + n]))
            data = data[16 + n :]
    return found


def tb_scalars(folder):
    return [
        (value.tag, event.step, value.simple_value)
        for event in events(folder)
        for value in event.summary.value
        if value.HasField("simple_value")
    ]


def test_text_lines(tmp_path):
    stream = io.StringIO()
    with RunLog(stream=stream) as log:
        log.scalars("train", 100, {"metrics/loss": 0.12345678, "training/lr": 0.1})
        log.scalars("eval", 100, {"metrics/loss": 1, "accuracy": np.float32(0.5)})
    assert stream.getvalue().splitlines() == [
        "Step    100: train loss | 0.12345678",
        "Step    100: eval  loss     | 1.00000000",
        "Step    100: eval  accuracy | 0.50000000",
    ]
    assert list(tmp_path.iterdir()) == []


def test_jsonl_is_valid_json_at_once(tmp_path):
    before = time.time()
    log = RunLog(tmp_path / "new", stream=io.StringIO())
    values = {"metrics/loss": np.float32(0.5), "a": math.nan, "b": math.inf}
    log.scalars("train", np.int64(1), values | {"c": -math.inf})
    (line,) = json_lines(tmp_path / "new")  # Before the log is closed.
    log.close()
    assert before - 1 <= line.pop("time") <= time.time() + 1
    assert line == {
        "step": 1,
        "mode": "train",
        "metrics/loss": 0.5,
        "a": "NaN",
        "b": "Infinity",
        "c": "-Infinity",
    }
    assert math.isnan(float("NaN")) and float(line["c"]) == -math.inf


def test_tensorboard_has_exact_tags_at_once(tmp_path):
    log = RunLog(tmp_path, stream=io.StringIO())
    log.scalars("train", 3, {"training/steps per second": 7, "metrics/loss": 0.5})
    log.scalars("eval", 3, {"metrics/loss": 0.25})
    log.text("gin_config", "train.steps = 3\n# x")
    assert tb_scalars(tmp_path / "train") == [
        ("training/steps per second", 3, 7.0),
        ("metrics/loss", 3, 0.5),
    ]
    assert tb_scalars(tmp_path / "eval") == [("metrics/loss", 3, 0.25)]
    text = events(tmp_path / "train")[-1].summary.value[0]
    assert text.tag.startswith("gin_config")
    assert b"train.steps = 3\n" in text.tensor.string_val[0]
    log.close()
    log.close()
    assert log.failures == []


def test_tensorboard_can_be_left_out(tmp_path):
    with RunLog(tmp_path, stream=io.StringIO(), tensorboard=False) as log:
        log.scalars("train", 1, {"loss": 1.0})
        log.text("a", "b")
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_resume_drops_what_a_dead_run_wrote_later(tmp_path):
    log = RunLog(tmp_path, stream=io.StringIO())
    for step in (1, 2, 3):
        log.scalars("train", step, {"loss": step})
    with open(tmp_path / "metrics.jsonl", "ab") as file:
        file.write(b'{"step": 1, "mo')  # A kill in the middle of a line.
    log = RunLog(tmp_path, stream=io.StringIO())
    log.truncate_after(2)
    assert [line["step"] for line in json_lines(tmp_path)] == [1, 2]
    log.scalars("train", 3, {"loss": 30})
    log.close()
    assert [line["loss"] for line in json_lines(tmp_path)] == [1, 2, 30]
    starts = [e for e in events(tmp_path / "train") if e.HasField("session_log")]
    assert [(e.step, e.session_log.status) for e in starts] == [(3, 1)]
    assert len(list((tmp_path / "train").iterdir())) == 2


def test_a_cut_line_does_not_spoil_the_next(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n{"step": 2, "lo')
    with RunLog(tmp_path, stream=io.StringIO()) as log:
        log.scalars("train", 2, {"loss": 2})
    assert [line["step"] for line in json_lines(tmp_path)] == [1, 2]


def test_wrong_arguments_raise(tmp_path):
    log = RunLog(stream=io.StringIO())
    with pytest.raises(ValueError, match="'step'.*metrics/step"):
        log.scalars("train", 1, {"step": 1})
    for mode in ("", "../x", "a/../b", "/abs", "a b"):
        with pytest.raises(ValueError, match="folder name"):
            log.scalars(mode, 1, {"loss": 1})
    with pytest.raises(TypeError):
        log.scalars("train", 1.5, {"loss": 1})  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        log.scalars("train", 1, {"loss": None})
    with pytest.raises(ValueError, match="'auto', 'bar'"):
        RunLog(progress="none")  # type: ignore[arg-type]


def test_an_impossible_folder_is_reported_once_and_survived(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    stream = io.StringIO()
    history = History()
    history.append("train", "loss", 1, 1.0)
    with caplog.at_level(logging.ERROR):
        with RunLog(tmp_path / "file" / "run", stream=stream) as log:
            for step in (1, 2):
                log.scalars("train", step, {"loss": 1})
                log.curves(history)
                log.truncate_after(1)
    assert len(log.failures) == len(caplog.records) == 3
    for what in ("metrics.jsonl", "TensorBoard", "curves.png"):
        assert any(f"cannot write {what}" in text for text in log.failures)
    assert stream.getvalue().count("\n") == 2


def test_a_full_disk_is_survived(tmp_path):
    log = RunLog(tmp_path, stream=io.StringIO())
    log.scalars("train", 1, {"loss": 1})
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, old[1]))
    try:
        log.scalars("train", 2, {"loss": 2})
        log.scalars("train", 3, {"loss": 3})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)
    log.scalars("train", 4, {"loss": 4})
    log.close()
    assert [line["step"] for line in json_lines(tmp_path)] == [1, 4]
    assert len([x for x in log.failures if "metrics.jsonl" in x]) == 1


def test_a_closed_stream_is_survived(tmp_path):
    stream = Terminal()
    log = RunLog(tmp_path, stream=stream, tensorboard=False)
    log.tick(1)
    stream.close()
    log.scalars("train", 1, {"loss": 1})
    log.close()
    assert any("text" in text for text in log.failures)
    assert json_lines(tmp_path)[0]["step"] == 1


@pytest.fixture
def clock(monkeypatch):
    now = SimpleNamespace(seconds=100.0)
    fake = SimpleNamespace(monotonic=lambda: now.seconds)
    monkeypatch.setattr(progress, "time", fake)
    return now


def test_bar_on_a_terminal(clock):
    stream = Terminal()
    log = RunLog(total_steps=50, stream=stream)
    for step in range(1, 11):
        clock.seconds += 1
        log.tick(step, 0.5)
    log.scalars("train", 10, {"loss": 1})
    shown = stream.getvalue()
    assert "10/50" in shown and "loss 0.5" in shown and "step" in shown
    assert "\nStep" in shown or "\rStep" in shown
    log.tick(11, 0.25)
    log.close()
    log.close()
    assert "11/50" in stream.getvalue().rsplit("\r", 1)[-1]


def test_bar_of_a_resumed_run_counts_only_its_own_steps(clock):
    stream = Terminal()
    log = RunLog(total_steps=2000, stream=stream)
    log.tick(1001)
    log.close()
    assert "1001/2000" in stream.getvalue()


def test_a_loss_on_a_device_is_read_late_and_rarely(clock):
    stream = Terminal()
    log = RunLog(total_steps=1000, stream=stream)
    losses = [DeviceLoss(float(i)) for i in range(1000)]
    for step, loss in enumerate(losses, 1):
        clock.seconds += 0.01
        log.tick(step, loss)
        assert loss.n_reads == 0  # Not in its own step, when it may not be computed.
    n_reads = sum(loss.n_reads for loss in losses)
    assert 40 <= n_reads <= 50  # 10 seconds, 5 times a second.
    log.close()


def test_plain_lines_elsewhere(clock):
    stream = io.StringIO()
    log = RunLog(total_steps=2000, stream=stream)
    log.tick(1)
    for step in range(2, 612):
        clock.seconds += 0.1
        log.tick(step, 0.125)
    lines = stream.getvalue().splitlines()
    assert len(lines) == 2
    assert "of 2000 (15%)" in lines[0] and "10 steps/s" in lines[0]
    assert "ETA 0:02:49" in lines[0] or "ETA 0:02:50" in lines[0]
    assert "loss 0.125" in lines[0]
    log.close()
    assert "\r" not in stream.getvalue()


def test_off_shows_nothing(clock):
    stream = Terminal()
    with RunLog(total_steps=5, stream=stream, progress="off") as log:
        for step in range(1, 6):
            clock.seconds += 100
            log.tick(step)
    assert stream.getvalue() == ""


def test_tick_costs_less_than_a_microsecond():
    log = RunLog(total_steps=10**6, stream=Terminal())
    loss = DeviceLoss(1.0)
    n = 20_000
    best = math.inf
    for start in range(0, 10 * n, n):
        begin = time.perf_counter()
        for step in range(start, start + n):
            log.tick(step, loss)
        best = min(best, (time.perf_counter() - begin) / n)
    log.close()
    assert best < 1e-6


def png_size(path):
    data = path.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    return struct.unpack(">II", data[16:24])


def test_curves_grow_with_the_metrics(tmp_path):
    history = History()
    log = RunLog(tmp_path, stream=io.StringIO())
    log.curves(history)
    assert list(tmp_path.iterdir()) == []
    for step in (1, 2, 3):
        history.append("train", "metrics/loss", step, 10.0**-step)
        history.append("eval", "metrics/loss", step, 10.0**-step)
    log.curves(history)
    width, height = png_size(tmp_path / "curves.png")
    history.append("eval", "metrics/$odd_{name", 3, math.nan)
    history.append("train", "training/learning_rate", 3, 0.0)
    history.append("train", "training/gradients_l2", 3, 1.0)
    log.curves(history)
    assert png_size(tmp_path / "curves.png") == (2 * width, 2 * height)
    assert [path.name for path in tmp_path.iterdir()] == ["curves.png"]
    assert log.failures == []


def test_curves_panels_and_scale():
    history = History()
    for metric in ("metrics/accuracy", "training/learning_rate", "metrics/loss"):
        history.append("eval", metric, 1, 1.0)
        history.append("train", metric, 1, 0.05)
    panels = curves._panels(history)
    assert [name for name, _ in panels] == [
        "metrics/loss",
        "metrics/accuracy",
        "training/learning_rate",
    ]
    assert list(panels[0][1]) == ["train", "eval"]
    assert curves._spans_decade(panels[0][1])
    assert not curves._spans_decade({"train": [(1, 1.0), (2, 0.5)]})
    assert not curves._spans_decade({"train": [(1, 1.0), (2, -50.0)]})


def test_spread_keeps_labels_apart_and_near():
    assert curves._spread([0.0, 50.0], 12.0) == [0.0, 50.0]
    assert curves._spread([10.0, 12.0], 12.0) == [5.0, 17.0]
    spread = curves._spread([0.0, 10.0, 15.0, 40.0], 12.0)
    assert min(np.diff(spread)) >= 12.0 - 1e-9
    assert spread[-1] == 40.0


def test_libraries_are_imported_when_used_and_nothing_global_changes(tmp_path):
    script = """
        import sys
        from retrax.trainer.run_log import RunLog
        from retrax.trainer.history import History
        late = ("matplotlib", "tensorboardX", "tqdm", "tensorflow")
        assert not [name for name in late if name in sys.modules]
        history = History()
        history.append("train", "loss", 1, 0.5)
        with RunLog(sys.argv[1]) as log:
            log.scalars("train", 1, {"loss": 0.5})
            log.curves(history)
        assert not log.failures, log.failures
        assert "matplotlib.pyplot" not in sys.modules
        import threading
        assert threading.active_count() == 1, threading.enumerate()
    """
    subprocess.run(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(script), tmp_path],
        check=True,
        timeout=120,
    )
    assert (tmp_path / "curves.png").exists()


def test_bar_on_a_terminal_without_a_size(tmp_path):
    """A pseudo-terminal has 0 rows and columns until someone sets them."""
    pty = pytest.importorskip("pty")
    main, side = pty.openpty()
    with open(side, "w") as stream, open(main, "rb", buffering=0) as screen:
        with RunLog(total_steps=7, stream=stream) as log:
            log.tick(3)
        shown = b""
        while b"3/7" not in shown:  # A pseudo-terminal gives what there is so far.
            assert select.select([screen], [], [], 30)[0], shown
            shown += screen.read(4096)
