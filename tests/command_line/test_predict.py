"""`retrax predict`: what it prints, from runs of a few steps."""

import functools

import gin
import jax
import numpy as np
import pytest

from retrax import cli, data, models
from retrax.command_line import predict as command
from retrax.errors import ConfigError
from retrax.supervised import decoding
from retrax.trainer import load_trainer_state

TEXT = """
train.model = @TransformerLM
train.inputs = @shakespeare
train.steps = 2
train.eval_frequency = None
train.eval_steps = 1
shakespeare.batch_size = 2
shakespeare.length = 8
shakespeare.eval_batch_size = 2
TransformerLM.vocab_size = 72
TransformerLM.d_model = 8
TransformerLM.d_ff = 16
TransformerLM.n_layers = 1
TransformerLM.n_heads = 2
TransformerLM.max_len = 64
"""
SIZES = dict(vocab_size=72, d_model=8, d_ff=16, n_layers=1, n_heads=2, max_len=64)


@pytest.fixture(scope="module", autouse=True)
def _compile_fast():
    """Most of the time here goes into compiling."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.fixture(autouse=True)
def _own_gin(monkeypatch, tmp_path):
    gin.clear_config()
    monkeypatch.chdir(tmp_path)
    yield
    gin.clear_config()


@pytest.fixture
def predict(capsys):
    """Runs `retrax predict`; returns (exit code, standard output, standard error)."""

    def run(*argv):
        gin.clear_config()
        capsys.readouterr()
        code = cli.main(["predict", *map(str, argv)])
        out, err = capsys.readouterr()
        return code, out, err

    return run


def trained(folder, text):
    folder.mkdir()
    config = folder / "this.gin"
    config.write_text(text)
    gin.clear_config()
    run = folder / "run"
    assert cli.main(["train", f"--config_file={config}", f"--output_dir={run}"]) == 0
    gin.clear_config()
    return run


@pytest.fixture(scope="module")
def text_run(tmp_path_factory):
    return trained(tmp_path_factory.mktemp("text") / "a", TEXT)


@pytest.fixture(scope="module")
def wanted(text_run):
    """Makes samples with the library itself, without gin."""
    state = load_trainer_state(text_run, models.TransformerLM(**SIZES, mode="eval"))
    model = models.TransformerLM(**SIZES, mode="predict")
    model.weights = state.opt_state.weights
    tokenizer = data.text.CharTokenizer()

    def sample(prompts, n, **how):
        ids = np.stack([tokenizer.encode(p) for p in prompts])
        rows = decoding.autoregressive_sample(model, ids, max_length=n, **how)
        ends = [tokenizer.decode(row) for row in rows]
        return [p + end for p, end in zip(prompts, ends, strict=True)]

    return sample


def test_a_sample_of_the_trained_weights(predict, text_run, wanted):
    code, out, _ = predict(text_run, "--prompt=ROMEO:", "--length=5")
    assert code == 0
    assert [out] == [w + "\n" for w in wanted(["ROMEO:"], 5)]
    assert predict(text_run, "--prompt=ROMEO:", "--length=5")[1] == out
    assert predict(text_run, "--prompt=ROMEO:", "--length=5", "--seed=1")[1] != out


def test_ways_to_sample(predict, text_run, wanted):
    argv = (text_run, "--prompt=To be", "--length=5")
    _, out, _ = predict(*argv, "--temperature=0", "--seed=5")
    assert [out] == [w + "\n" for w in wanted(["To be"], 5, temperature=0.0)]
    _, out, _ = predict(*argv, "--top_k=3", "--top_p=0.9", "--temperature=2")
    how = dict(top_k=3, top_p=0.9, temperature=2.0)
    assert [out] == [w + "\n" for w in wanted(["To be"], 5, **how)]


def test_prompts_from_a_file_keep_their_order(predict, text_run, wanted, tmp_path):
    (tmp_path / "prompts.txt").write_text("To\nTo be\nBe\n")
    _, out, _ = predict(
        text_run, "--prompt_file=prompts.txt", "--length=5", "--temperature=0"
    )
    # Greedy samples may hold line ends, so the whole is compared.
    two = wanted(["To", "Be"], 5, temperature=0.0)
    (five,) = wanted(["To be"], 5, temperature=0.0)
    assert out == f"{two[0]}\n{five}\n{two[1]}\n"


def check_refused(result, *texts):
    code, _, err = result
    assert code == cli.EXIT_USER_ERROR
    assert "Traceback" not in err
    for text in texts:
        assert text in err


def test_mistakes(predict, text_run, tmp_path):
    (tmp_path / "empty.txt").write_text("")
    refused = {
        ("--prompt=é",): ["'é'", "not in the vocabulary"],
        ("--temperature=-1",): ["temperature", "-1.0"],
        ("--length=0",): ["max_length", "0"],
        ("--length=80",): [
            "prompt of 0 tokens and 80 new ones",
            "max_len=64",
            "--length=64 or less",
            "--config='TransformerLM.max_len = 80'",
        ],
        ("--prompt_file=empty.txt",): ["empty.txt holds no prompt"],
        ("--prompt_file=no.txt",): ["no.txt", "No such file"],
        ("--checkpoint=no.pkl",): ["no.pkl"],
    }
    for argv, texts in refused.items():
        check_refused(predict(text_run, *argv), *texts)
    check_refused(predict(tmp_path / "none"), "no directory of a run")
    check_refused(predict(tmp_path), "no config.gin")


@pytest.mark.parametrize("scan_layers", [False, True])
def test_as_many_tokens_as_fit(scan_layers):
    def of(make, wanted, *lengths):
        prompts = [np.zeros(n, np.int32) for n in lengths]
        return command._length(make(mode="predict"), make, prompts, wanted)

    lm = functools.partial(models.TransformerLM, **SIZES, scan_layers=scan_layers)
    assert of(lm, None, 6, 60) == 4 and of(lm, None, 64 - 7) == 7
    assert of(lm, 4, 6, 60) == 4
    with pytest.raises(ConfigError, match="prompt of 6 tokens and 59 .*--length=58 or"):
        of(lm, 59, 6)
    with pytest.raises(ConfigError, match="prompt of 64 tokens and 200 .*a shorter"):
        of(lm, None, 64)
    pair = functools.partial(
        models.Transformer,
        72,
        n_encoder_layers=1,
        n_decoder_layers=1,
        max_len=64,
        scan_layers=scan_layers,
    )
    assert of(pair, None, 60) == 64  # The prompt has places of its own.
    assert of(functools.partial(models.GRULM, 72, 8), None, 500) == 200


def test_without_a_prompt_and_with_a_longer_context(predict, text_run):
    code, out, _ = predict(
        text_run, "--length=70", "--config=TransformerLM.max_len = 128"
    )
    assert code == 0 and len(out) > 60


def test_a_model_of_images_is_refused(predict, tmp_path):
    run = trained(
        tmp_path / "digits",
        "include 'digits_mlp.gin'\ntrain.steps = 1\ntrain.eval_frequency = None\n"
        "MLP.layer_widths = (4, 10)",
    )
    check_refused(
        predict(run, "--prompt=x"), "not trained on text", "float32", "(8, 8)"
    )


def test_a_model_of_ids_without_text(predict, tmp_path):
    (tmp_path / "own.py").write_text(
        "import gin, numpy as np\n"
        "from retrax import data\n"
        "@gin.configurable\n"
        "def own_inputs():\n"
        "    x = np.full((2, 4), 3, np.int32)\n"
        "    return data.Inputs(lambda: iter([(x, x, np.ones((2, 4)))] * 9))\n"
    )
    text = "import own\n" + TEXT.replace("@shakespeare", "@own.own_inputs")
    text = "\n".join(line for line in text.splitlines() if "shakespeare." not in line)
    run = trained(tmp_path / "ids", text)
    code, out, _ = predict(run, "--prompt=3 4", "--length=3", "--temperature=0")
    assert code == 0
    words = out.split()
    assert words[:2] == ["3", "4"] and 3 <= len(words) <= 5
    assert all(0 <= int(word) < 72 for word in words)
    check_refused(predict(run, "--prompt=a b"), "ids such as '3 4 5'", "'a b'")
