"""Two processes of two devices each against one process with one device.

Both run hosts_run.py, which saves numbers; here they are judged. Then what processes
tell each other when they do not fit together.
"""

import importlib.util
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from retrax.errors import ConfigError, HostError
from retrax.trainer import hosts, meeting
from retrax.trainer.padding import cut_rows, pad_rows

SCRIPT = Path(__file__).with_name("hosts_run.py")
LIMIT = 240
QUICKLY = {"JAX_PLATFORMS": "cpu", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
COMPILES_QUICKLY = True


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def run_both(script, *arguments, n_devices=2):
    """Runs a script in two processes; returns [(exit code, text), ...]."""
    address = f"127.0.0.1:{free_port()}"
    flags = os.environ.get("XLA_FLAGS", "")
    flags += f" --xla_force_host_platform_device_count={n_devices}"
    env = {**os.environ, **QUICKLY, "XLA_FLAGS": flags}
    running = [
        subprocess.Popen(
            [
                sys.executable,
                "-W",
                "error",
                script,
                *arguments[i],
                address,
                "2",
                str(i),
            ],
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for i in range(2)
    ]
    try:
        texts = [process.communicate(timeout=LIMIT)[0] for process in running]
    finally:
        for process in running:
            process.kill()
            process.wait()
    return [(p.returncode, text) for p, text in zip(running, texts, strict=True)]


def alone():
    """The same numbers from this process with one device."""
    spec = importlib.util.spec_from_file_location("hosts_run", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hosts")
    files = [folder / f"{i}.npz" for i in range(2)]
    for code, text in run_both(SCRIPT, [files[0]], [files[1]]):
        assert code == 0, text
    return [dict(np.load(file)) for file in files]


@pytest.fixture(scope="module")
def expected():
    return alone().numbers(n_devices=1)


@pytest.mark.parametrize("name", ["plain", "norm", "accumulate", "fsdp"])
def test_two_processes_train_as_one_device_does(results, expected, name):
    # Uneven and masked weights, a share without weight, last batches of 10 and 5 rows.
    base = "plain" if name == "fsdp" else name
    got = {k: x for k, x in results[0].items() if k.startswith(f"{name}/")}
    assert len(got) >= 6
    for key, value in got.items():
        want = expected[key.replace(name, base, 1)]
        np.testing.assert_allclose(value, want, atol=1e-5, rtol=1e-5, err_msg=key)
    assert got[f"{name}/losses"][-1] < got[f"{name}/losses"][0]


def test_layer_by_layer_training_is_the_same_too(results, expected):
    np.testing.assert_allclose(
        results[0]["reversible"], expected["reversible"], atol=1e-5
    )


def test_metrics_of_all_processes_together_are_exact(results, expected):
    np.testing.assert_allclose(results[0]["metrics"], expected["metrics"], rtol=1e-6)


def test_processes_hold_the_same_bits(results):
    assert results[0].keys() == results[1].keys()
    for key, value in results[0].items():
        np.testing.assert_array_equal(value, results[1][key], err_msg=key)


def test_each_process_is_told_what_the_first_finds_and_which_weights_differ(results):
    told = [str(r["told"]) for r in results]
    assert told == ["no such file: x.pkl"] * 2
    for r in results:
        text = str(r["differs"])
        assert "process 1 (host" in text and "process 0 (host" in text
        assert "different values of 0.Dense/1 and 1 more" in text


def test_what_one_process_wishes_all_do_and_weights_that_drift_end_a_run(results):
    for r in results:
        assert bool(r["wish"])
        assert "weights differ between processes: process 1 (host" in str(r["drift"])
        assert "different values of 0.Dense/0 and 3 more" in str(r["drift"])


def test_different_configurations_are_refused_and_both_processes_named(results):
    for r in results:
        text = str(r["config"])
        assert "the configuration differs between processes: process 1 (host" in text
        assert "'train.steps = 10' in process 0, 'train.steps = 11' there" in text


# --- Rows of a process ----------------------------------------------------------------


@pytest.mark.parametrize("n_rows", [1, 2, 5, 8, 11])
def test_padded_shares_hold_every_row_once(n_rows):
    x, pieces = np.arange(1, n_rows + 1), 8
    padded = [pad_rows((x,), pieces, (i, 4)) for i in range(4)]
    sizes = {len(batch[0]) for batch, _ in padded}
    assert len(sizes) == 1 and sizes.pop() % 2 == 0
    whole = np.concatenate([batch[0] for batch, _ in padded])
    out = cut_rows({"per_example/x": whole, "loss": 1}, n_rows, pieces, 4)
    np.testing.assert_array_equal(out["per_example/x"], x)
    masks = [mask for _, mask in padded if mask is not None]
    n_real = sum(mask.sum() for mask in masks) if masks else len(whole)
    assert n_real == n_rows


# --- Meeting --------------------------------------------------------------------------


def test_a_place_comes_from_arguments_then_the_environment_then_slurm():
    env = {
        "JAX_COORDINATOR_ADDRESS": "a:1",
        "JAX_NUM_PROCESSES": "4",
        "JAX_PROCESS_ID": "2",
    }
    assert meeting.find_place({}) is None
    assert meeting.find_place(env) == ("a:1", 4, 2)
    assert meeting.find_place(env, process_id=3) == ("a:1", 4, 3)
    slurm = {
        "SLURM_JOB_ID": "1000",
        "SLURM_STEP_ID": "2",
        "SLURM_STEP_NUM_TASKS": "3",
        "SLURM_STEP_NODELIST": "gpu[007-009,12],x1",
        "SLURM_PROCID": "1",
    }
    assert meeting.find_place(slurm) == ("gpu007:64346", 3, 1)
    assert meeting.find_place(slurm | env).address == "a:1"
    assert meeting.find_place({**slurm, "SLURM_STEP_NUM_TASKS": "1"}) is None


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (("a:1", 2, None), "coordinator=a:1, num_processes=2 without process_id"),
        ((None, None, 1), "process_id=1 without coordinator, num_processes"),
        (("a:1", 2, 2), "process_id=2 of num_processes=2: .* from 0 to 1"),
        (("a", 2, 1), "must be HOST:PORT, such as node7:12345, got 'a'"),
        (("a:x", 2, 1), "must be HOST:PORT"),
        (("a:1", "two", 1), "num_processes must be a whole number, got 'two'"),
    ],
)
def test_what_makes_no_place_is_refused(given, text):
    with pytest.raises(ConfigError, match=text):
        meeting.find_place({}, *given)


def test_one_process_needs_no_meeting():
    assert meeting.connect("127.0.0.1:1", 1, 0) is None
    assert hosts.count() == 1 and hosts.is_first()
    assert hosts.from_first(lambda: b"x") == b"x"
    assert hosts.gathered([3]).tolist() == [[3]]
    assert hosts.share_weights({"w": 1}) == {"w": 1}


def test_a_missing_coordinator_is_told_with_its_address_in_time():
    address = f"127.0.0.1:{free_port()}"
    with pytest.raises(HostError, match=f"no coordinator at {address} within 0.3 s"):
        meeting.connect(address, 2, 1, timeout=0.3)


def test_processes_that_do_not_come_are_named():
    address = f"127.0.0.1:{free_port()}"
    with pytest.raises(HostError, match="1 of 3 processes came .* process 1, 2"):
        meeting.connect(address, 3, 0, timeout=0.3)


def test_a_process_that_does_not_fit_ends_the_roll_call_for_both():
    address, errors = f"127.0.0.1:{free_port()}", []

    def join(n, i):
        try:
            meeting.connect(address, n, i, timeout=20)
        except HostError as e:
            errors.append(str(e))

    threads = [threading.Thread(target=join, args=place) for place in [(2, 0), (3, 1)]]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(errors) == 2 and errors[0] == errors[1]
    assert "num_processes is 3 in process 1 on host" in errors[0]
    assert "and 2 in process 0" in errors[0]


def test_somebody_else_at_the_port_does_not_disturb():
    port, errors = free_port(), []

    def join():
        try:
            meeting.connect(f"127.0.0.1:{port}", 2, 0, timeout=2)
        except HostError as e:
            errors.append(str(e))

    thread = threading.Thread(target=join)
    thread.start()
    for text in (b"GET / HTTP/1.0\r\n\r\n", b'{"n": 2}\n', b""):
        for _ in range(100):
            try:
                with socket.create_connection(("127.0.0.1", port), 1) as peer:
                    peer.sendall(text)
                break
            except OSError:
                threading.Event().wait(0.02)
    thread.join()
    assert "missing: process 1" in errors[0]
