"""Encoder-decoders learn copying, reversing and sorting, wholly, in seconds.

What counts is what a user gets: whole sequences that were not trained on, decoded
greedily by the model of mode 'predict', with their ends.
"""

import jax
import numpy as np
import pytest

from retrax import data, lr, models, optimizers
from retrax import layers as tl
from retrax.shapes import signature
from retrax.supervised.decoding import autoregressive_sample
from retrax.trainer import StepTrainer

V, LENGTH = 12, 5  # 10 symbols: 111,110 sequences.
BATCH, N_EVAL = 64, 1024
N_STEPS = {"Transformer": 400, "LSTMSeq2SeqAttn": 1000}
PEAK = {"Transformer": 3e-3, "LSTMSeq2SeqAttn": 1e-2}


def make(name, mode):
    if name == "Transformer":
        return models.Transformer(
            V,
            d_model=64,
            d_ff=128,
            n_encoder_layers=1,
            n_decoder_layers=1,
            n_heads=4,
            max_len=16,
            dropout=0.0,
            mode=mode,
        )
    return models.LSTMSeq2SeqAttn(V, V, 96, 1, 1, n_attention_heads=4, mode=mode)


class Learner:
    """Trains one model on one task after another, with one compiled step."""

    def __init__(self, name):
        self.name = name
        self.model = make(name, "train")
        self.with_loss = tl.Serial(self.model, tl.WeightedCategoryCrossEntropy())
        self.predict = make(name, "predict")
        self.trainer = None

    def learn(self, task, seed):
        """Returns (targets, what the trained model gives for their inputs)."""
        inputs = task(
            batch_size=BATCH,
            vocab_size=V,
            max_length=LENGTH,
            n_eval=N_EVAL,
            eval_batch_size=N_EVAL,
            seed=seed,
        )
        stream = inputs.train_stream()
        init = jax.jit(lambda key: self.with_loss.init(signature(stream.peek()), key))
        weights, state = init(jax.random.key(seed))
        if self.trainer is None:
            self.with_loss.weights, self.with_loss.state = weights, state
            rule = optimizers.AdamW(weight_decay_rate=0.1, clip_grad_norm=1.0)
            self.trainer = StepTrainer(self.with_loss, rule, n_devices=1)
        else:
            self.trainer.weights, self.trainer.state = weights, state
            self.trainer.reset_optimizer()
        n_steps = N_STEPS[self.name]
        rate = lr.warmup_cosine(50, PEAK[self.name], n_steps)
        seen = set()
        for step in range(1, n_steps + 1):
            batch = next(stream)
            seen.update(row.tobytes() for row in batch[0])
            self.trainer.one_step(batch, jax.random.key(seed), step, rate(step))
        source, targets, _ = next(inputs.eval_stream())
        fresh = np.array([row.tobytes() not in seen for row in source])
        assert fresh.sum() > 200
        self.predict.weights = self.model.weights
        got = autoregressive_sample(
            self.predict,
            source,
            len(source),
            temperature=0.0,
            eos_id=data.tasks.EOS_ID,
            max_length=LENGTH + 1,
        )
        got = np.pad(got, ((0, 0), (0, LENGTH + 1 - got.shape[1])))
        return targets[fresh], got[fresh]


@pytest.mark.parametrize("name", ["Transformer", "LSTMSeq2SeqAttn"])
def test_sequences_never_seen_come_out_right(name):
    learner = Learner(name)
    for task in (data.copy_task, data.reverse_task, data.sort_task):
        targets, got = learner.learn(task, seed=0)
        accuracy = np.mean(np.all(got == targets, axis=1))
        assert accuracy >= 0.99, (task.__name__, accuracy)
