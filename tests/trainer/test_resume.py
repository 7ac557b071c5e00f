"""A run that is killed anywhere and started again ends as if nothing had happened."""

import random
import signal

import pytest


def test_a_run_killed_at_random_moments_ends_bit_for_bit_the_same(run, whole_run):
    moments = random.Random(5)
    kills = 0
    while kills < 3:
        process = run.start(60)
        begun = len(run.steps_done())
        wanted = begun + moments.randint(1, 15)
        run.wait_for(process, lambda n=wanted: len(run.steps_done()) >= n)
        run.kill(process)
        kills += 1
        if max(run.steps_done()) >= 60:
            break
    code, text = run.train(60)
    assert code == 0, text
    assert kills >= 2 and len(run.steps_done()) >= 60
    assert run.digest() == whole_run.digest()
    for name in ("model_20.pkl", "model_40.pkl", "highest_accuracy.pkl"):
        assert run.digest(name) == whole_run.digest(name)


@pytest.mark.parametrize("moment", ["evaluate:40", "save:60"])
def test_a_run_killed_between_step_and_checkpoint_loses_no_measurement(
    run, whole_run, moment
):
    code, text = run.train(60, "--kill", moment)
    assert code == -signal.SIGKILL, text
    done = int(moment.split(":")[1])
    assert run.steps_done()[-1] == done
    code, text = run.train(60)
    assert code == 0, text
    assert run.digest() == whole_run.digest()
    assert run.digest("model_40.pkl") == whole_run.digest("model_40.pkl")


def test_twenty_steps_are_ten_and_ten_in_a_new_process(run, whole_run):
    assert run.train(20)[0] == 0
    assert run.digest() == whole_run.digest("model_20.pkl")
    code, text = run.train(60)
    assert code == 0 and "Continuing from" in text and "at step 20" in text
    assert run.steps_done() == list(range(1, 61))
    assert run.digest() == whole_run.digest()


def test_dropout_draws_other_masks_after_a_resume(whole_run):
    # Else the tests above would pass with the same mask in every step, too.
    losses = [
        loss for _, loss in whole_run.payload()["history"]["train"]["metrics/loss"]
    ]
    assert len(set(losses)) == len(losses) == 7
    assert losses[-1] < losses[0]
