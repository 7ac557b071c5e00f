"""Signals end the running step, then the run; the same command goes on."""

import contextlib
import os
import signal
import subprocess
import threading

import pytest

from retrax.trainer.interrupts import Interrupts


@pytest.mark.parametrize(
    ("signum", "step"),
    [(signal.SIGTERM, 17), (signal.SIGTERM, 60), (signal.SIGINT, 30)],
    ids=["within", "last", "evaluated"],
)
def test_a_signal_saves_the_last_finished_step(run, whole_run, signum, step):
    process = run.start(60, "--stop-at", str(step))
    run.wait_until_stopped(process)
    process.send_signal(signum)
    code, text = run.finish(process, "go on\n")
    assert code == 128 + signum == {2: 130, 15: 143}[signum], text
    assert f"Interrupted by {signum.name} after step {step}, saved in" in text
    assert "Run the same command again to continue." in text
    assert run.steps_done() == list(range(1, step + 1))
    assert run.payload()["step"] == step

    code, text = run.train(60)
    assert code == 0, text
    assert run.steps_done() == list(range(1, 61))
    assert run.digest() == whole_run.digest()
    for name in ("model_20.pkl", "model_60.pkl"):
        assert run.digest(name) == whole_run.digest(name)


def test_a_second_ctrl_c_ends_the_run_at_once(run):
    process = run.start(60, "--stop-at", "15")
    run.wait_until_stopped(process)
    # Two that come too close are one, so one is sent after the other until it ends.
    for _ in range(100):
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=0.3)
            break
    code, text = run.finish(process)
    assert code != 0 and "KeyboardInterrupt" in text
    assert run.payload()["step"] == 10


def test_handlers_are_put_back():
    before = [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)]
    with pytest.raises(RuntimeError), Interrupts() as interrupts:
        assert interrupts.name == "" and interrupts.signum is None
        os.kill(os.getpid(), signal.SIGTERM)
        assert interrupts.name == "SIGTERM" and interrupts.signum == signal.SIGTERM
        os.kill(os.getpid(), signal.SIGTERM)  # Noted already.
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
        raise RuntimeError
    assert [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)] == before


def test_other_threads_change_no_handler():
    before = signal.getsignal(signal.SIGTERM)
    seen = []

    def work():
        with Interrupts():
            seen.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [before]
