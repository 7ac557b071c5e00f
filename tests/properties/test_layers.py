"""One table of all layers, and one test per property over all of them.

A layer that joins the package joins the table; `test_table_is_complete` sees to it. A
property that a layer cannot have is named in its `but`, with the reason.
"""

import copy
import dataclasses
import functools
import inspect
import pickle
import zlib
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from retrax import layers as tl
from retrax import trees
from retrax.errors import LayerError
from retrax.layers import summary, tree
from retrax.shapes import ShapeDtype, signature

KEY = jax.random.key(11)


@dataclasses.dataclass(frozen=True)
class Input:
    """One input: its shape, and how to fill it."""

    shape: tuple[int, ...]
    below: int = 0  # Integers from 0 to below - 1; floats if 0.
    positive: bool = False
    dtype: type = np.float32

    @property
    def signature(self):
        return ShapeDtype(self.shape, np.int32 if self.below else self.dtype)

    def make(self, rng):
        if self.below:
            return rng.integers(0, self.below, self.shape).astype(np.int32)
        x = rng.normal(size=self.shape)
        if self.positive:
            x = rng.uniform(0.2, 0.8, size=self.shape)
        return x.astype(self.dtype)


def f(*shape):
    return Input(shape)


def ids(below, *shape):
    return Input(shape, below=below)


def pos(*shape):
    return Input(shape, positive=True)


@dataclasses.dataclass(frozen=True)
class Case:
    """A layer, what it takes, and the properties it lacks."""

    name: str  # The exported name; ':variant' may follow.
    make: Callable[[], tl.Layer]
    inputs: tuple[Input, ...]
    but: dict[str, str] = dataclasses.field(default_factory=dict, hash=False)

    @property
    def signature(self):
        return packed([i.signature for i in self.inputs])

    def values(self, seed=0):
        rng = np.random.default_rng([zlib.crc32(self.name.encode()), seed])
        return packed([i.make(rng) for i in self.inputs])


def packed(items):
    return items[0] if len(items) == 1 else tuple(items)


def case(name, make, *inputs, **but):
    return Case(name, make, inputs, but)


def dense(n=4):
    return tl.Dense(n)


def mix():
    return tl.Fn("Mix", lambda x, c: (x * c, jnp.tanh(x + c)), n_out=2)


def logits_and(*more):
    return (f(3, 4, 5), ids(5, 3, 4), *more)


MASK = ids(2, 2, 1, 1, 3)

CARRY = "the weights are float32, so the carry would change from bfloat16 to float32"
BLOCK = "the weights are float32, so a block would change bfloat16 to float32"
NO_FLOATS = "there is no float to differentiate by"
NO_INPUTS = "there are no inputs to map over"
BRANCHES = "the branch with float32 weights gives float32, the other bfloat16"

ACTIVATIONS = [
    "Relu Tanh Sigmoid HardSigmoid HardTanh Softplus Exp Elu Selu LeakyRelu Gelu",
    "FastGelu Swish Glu ParametricRelu ThresholdedLinearUnit",
]

TABLE = [
    *(
        case(name, getattr(tl, name), f(3, 4))
        for line in ACTIVATIONS
        for name in line.split()
    ),
    case("Log", tl.Log, pos(3, 4)),
    # Functions.
    case("ArgMax", tl.ArgMax, f(3, 4)),
    case("ArgMax:axis0", lambda: tl.ArgMax(axis=0), f(3, 4)),
    case("Flatten", tl.Flatten, f(2, 3, 4)),
    case("Flatten:2", lambda: tl.Flatten(n_axes_to_keep=2), f(2, 3, 2, 2)),
    case("LogSoftmax", tl.LogSoftmax, f(3, 4)),
    case("Softmax", tl.Softmax, f(3, 4)),
    case("LogSumExp", tl.LogSumExp, f(3, 4)),
    case("Max", tl.Max, f(3, 4)),
    case("Mean", tl.Mean, f(3, 4)),
    case("Mean:all", lambda: tl.Mean(axis=None), f(3, 4)),
    case("Min", lambda: tl.Min(axis=1, keepdims=True), f(3, 4)),
    case("Sum", tl.Sum, f(3, 4)),
    case("Negate", tl.Negate, f(3, 4)),
    case("PrintShape", tl.PrintShape, f(3, 4)),
    case("PrintShape:2", lambda: tl.PrintShape(n_in=2), f(3, 4), f(2)),
    case("ShiftRight", tl.ShiftRight, f(2, 5, 3)),
    case(
        "ShiftRight:ids",
        lambda: tl.ShiftRight(n_positions=2),
        ids(9, 2, 5),
        grad=NO_FLOATS,
    ),
    case("StopGradient", tl.StopGradient, f(3, 4)),
    case("ThresholdToBinary", tl.ThresholdToBinary, f(3, 4)),
    case("ToFloat", tl.ToFloat, ids(9, 3, 4), grad=NO_FLOATS),
    case("PerExample", lambda: tl.PerExample("rows"), f(3, 4)),
    case("Summary", lambda: tl.Summary("mean"), f(3, 4)),
    case("SummaryScalar", lambda: tl.SummaryScalar("mean"), f(3, 4)),
    case("AssertShape", lambda: tl.AssertShape("bl"), f(3, 4), repr="hidden in prints"),
    case(
        "AssertShape:visible", lambda: tl.AssertShape("bl", visible_layer=True), f(3, 4)
    ),
    case("AssertFunction", lambda: tl.AssertFunction("bl->bf", dense()), f(3, 4)),
    case("Fn", lambda: tl.Fn("SumAndMax", lambda a, b: (a + b, a), 2), f(2), f(2)),
    case("PureLayer", lambda: tl.PureLayer(jnp.sin), f(3, 4)),
    # Weights.
    case("Dense", dense, f(3, 4)),
    case("Dense:no_bias", lambda: tl.Dense(4, use_bias=False), f(2, 3, 4)),
    case("Dense:bfloat16", lambda: tl.Dense(4, use_bfloat16=True), f(3, 4)),
    case("Embedding", lambda: tl.Embedding(9, 4), ids(9, 2, 3)),
    case("TiedEmbedding", lambda: tl.TiedEmbedding(9, 4), ids(9, 2, 3)),
    case("TiedEmbedding:logits", lambda: tl.TiedEmbedding(9, 4), f(2, 3, 4)),
    case("Dropout", lambda: tl.Dropout(0.5), f(3, 4)),
    case("Dropout:shared", lambda: tl.Dropout(0.5, shared_axes=[0]), f(3, 4)),
    case("Dropout:eval", lambda: tl.Dropout(0.5, mode="eval"), f(3, 4)),
    case(
        "Weights",
        lambda: tl.Weights(tl.RandomNormalInitializer(), (3, 4)),
        vmap=NO_INPUTS,
    ),
    case(
        "RandomUniform",
        lambda: tl.RandomUniform(shape=(3, 4)),
        vmap=NO_INPUTS,
        grad=NO_FLOATS,
    ),
    case("LocallyConnected1d", lambda: tl.LocallyConnected1d(4, 3), f(2, 5, 3)),
    case(
        "LocallyConnected1d:same",
        lambda: tl.LocallyConnected1d(4, 3, padding="SAME"),
        f(2, 5, 3),
    ),
    # Normalization.
    case("LayerNorm", tl.LayerNorm, f(3, 4)),
    case("LayerNorm:no_center", lambda: tl.LayerNorm(center=False), f(3, 4)),
    case("BatchNorm", tl.BatchNorm, f(3, 2, 2, 4)),
    case("BatchNorm:eval", lambda: tl.BatchNorm(axis=0, mode="eval"), f(3, 4)),
    case("FilterResponseNorm", tl.FilterResponseNorm, f(3, 2, 2, 4)),
    case(
        "FilterResponseNorm:learn",
        lambda: tl.FilterResponseNorm(learn_epsilon=True),
        f(3, 2, 2, 4),
    ),
    # Losses and metrics.
    case("CategoryCrossEntropy", tl.CategoryCrossEntropy, *logits_and()),
    case(
        "CategoryCrossEntropy:smooth",
        lambda: tl.CategoryCrossEntropy(label_smoothing=0.1),
        *logits_and(),
    ),
    case(
        "WeightedCategoryCrossEntropy",
        tl.WeightedCategoryCrossEntropy,
        *logits_and(pos(3, 4)),
    ),
    case(
        "WeightedCategoryCrossEntropy:cutoff",
        lambda: tl.WeightedCategoryCrossEntropy(cutoff=0.5),
        *logits_and(pos(3, 4)),
    ),
    case("BinaryCrossEntropy", tl.BinaryCrossEntropy, f(3, 4), ids(2, 3, 4)),
    case("L2Loss", tl.L2Loss, f(3, 4), f(3, 4), pos(3, 4)),
    case("SmoothL1Loss", tl.SmoothL1Loss, f(3, 4), f(3, 4), pos(3, 4)),
    case("CategoryAccuracy", tl.CategoryAccuracy, *logits_and()),
    case(
        "WeightedCategoryAccuracy", tl.WeightedCategoryAccuracy, *logits_and(pos(3, 4))
    ),
    case("MaskedSequenceAccuracy", tl.MaskedSequenceAccuracy, *logits_and(pos(3, 4))),
    case("MacroAveragedFScore", tl.MacroAveragedFScore, f(3, 5), ids(5, 3)),
    case("WeightedFScore", tl.WeightedFScore, f(3, 5), ids(5, 3)),
    case("Accuracy", tl.Accuracy, *logits_and(pos(3, 4))),
    case("SequenceAccuracy", tl.SequenceAccuracy, *logits_and(pos(3, 4))),
    case("CrossEntropyLoss", tl.CrossEntropyLoss, *logits_and(pos(3, 4))),
    case(
        "CrossEntropyLossWithLogSoftmax",
        tl.CrossEntropyLossWithLogSoftmax,
        *logits_and(pos(3, 4)),
    ),
    case("CrossEntropySum", tl.CrossEntropySum, *logits_and(pos(3, 4))),
    case(
        "BinaryCrossEntropyLoss",
        tl.BinaryCrossEntropyLoss,
        pos(3, 4),
        ids(2, 3, 4),
        pos(3, 4),
    ),
    case(
        "BinaryCrossEntropySum",
        tl.BinaryCrossEntropySum,
        pos(3, 4),
        ids(2, 3, 4),
        pos(3, 4),
    ),
    case("WeightedSum", tl.WeightedSum, f(3, 4), pos(3, 4)),
    # The data stack.
    case("Serial", lambda: tl.Serial(dense(), tl.Relu(), tl.Dense(2)), f(3, 4)),
    case("Serial:empty", tl.Serial, f(3, 4)),
    case("Serial:two", lambda: tl.Serial(tl.Dup(), dense(), tl.Add()), f(3, 4)),
    case(
        "Parallel", lambda: tl.Parallel(dense(), None, [tl.Dup()]), f(2, 4), f(3), f(2)
    ),
    case("Branch", lambda: tl.Branch(dense(), None, tl.Tanh()), f(3, 4)),
    case("Residual", lambda: tl.Residual(dense(), tl.Relu()), f(3, 4)),
    case(
        "Residual:shortcut", lambda: tl.Residual(dense(2), shortcut=dense(2)), f(3, 4)
    ),
    case("Select", lambda: tl.Select([1, 0, 1]), f(3), f(4)),
    case("Select:drop", lambda: tl.Select([0], n_in=2), f(3), f(4)),
    case("Drop", tl.Drop, f(3, 4)),
    case("Dup", tl.Dup, f(3, 4)),
    case("Swap", tl.Swap, f(3), f(4)),
    case("Add", tl.Add, f(3, 4), f(3, 4)),
    case("SubtractTop", tl.SubtractTop, f(3, 4), f(3, 4)),
    case("Multiply", tl.Multiply, f(3, 4), f(3, 4)),
    case("Gate", tl.Gate, f(3, 4), pos(3, 4), f(3, 4)),
    case("Concatenate", tl.Concatenate, f(3, 4), f(3, 2)),
    case("Concatenate:3", lambda: tl.Concatenate(3, axis=0), f(1, 4), f(2, 4), f(3, 4)),
    case("Split", tl.Split, f(3, 4)),
    case(
        "FlattenList",
        tl.FlattenList,
        f(3, 4),
        arity="gives one tuple, however many tensors it holds",
        init="gives one tuple, however many tensors it holds",
    ),
    case(
        "SerialWithSideOutputs",
        lambda: tl.SerialWithSideOutputs([tl.Dup(), dense()], n_side_outputs=[1, 0]),
        f(3, 4),
    ),
    case("Freeze", lambda: tl.Freeze(dense(), tl.Relu()), f(3, 4)),
    # Loops, branches, memory.
    case("Scan", lambda: tl.Scan(mix(), axis=1), f(3, 4), f(3)),
    case(
        "Scan:weights",
        lambda: tl.Scan(tl.Serial(tl.Add(), dense(), tl.Dup())),
        f(2, 3, 4),
        f(3, 4),
        mixed=CARRY,
    ),
    case(
        "Scan:predict",
        lambda: tl.Scan(mix(), mode="predict"),
        f(3, 4),
        f(4),
        bfloat16="the carry it keeps has the dtype of init, float32",
    ),
    case("Scan:remat", lambda: tl.Scan(dense(), n_carry=0, remat=True), f(2, 3, 4)),
    case(
        "Cond",
        lambda: tl.Cond(tl.Fn("P", lambda x: x.sum() > 0), tl.Relu()),
        f(2),
        f(3, 4),
    ),
    case(
        "Cond:weights",
        lambda: tl.Cond(tl.Fn("P", lambda x: x.sum() > 0), dense(), tl.Dropout(0.5)),
        f(2),
        f(3, 4),
        mixed=BRANCHES,
    ),
    case("Chunk", lambda: tl.Chunk(dense(), 2), f(4, 3)),
    case("Chunk:whole", lambda: tl.Chunk(dense(), 3), f(4, 3)),
    case("Cache", lambda: tl.Cache(dense()), f(3, 4)),
    case("BatchLeadingAxes", lambda: tl.BatchLeadingAxes(dense()), f(2, 3, 4)),
    case("Bidirectional", lambda: tl.Bidirectional(dense()), f(2, 3, 4)),
    case(
        "Repeat",
        lambda: tl.Repeat(lambda: [dense(), tl.Dropout(0.5)], 3),
        f(3, 4),
        mixed=BLOCK,
    ),
    case("Repeat:remat", lambda: tl.Repeat(tl.Tanh, 3, remat=True), f(3, 4)),
    # Reversible.
    case("ReversibleSelect", lambda: tl.ReversibleSelect([1, 0, 1]), f(3), f(4)),
    case("ReversibleSwap", tl.ReversibleSwap, f(3), f(4)),
    case("ReversibleReshape", lambda: tl.ReversibleReshape((3,), (1, 3)), f(3, 4)),
    case("ReversiblePrintShape", tl.ReversiblePrintShape, f(3, 4)),
    case("ReversibleConcatenatePair", tl.ReversibleConcatenatePair, f(3, 4), f(3, 4)),
    case(
        "ReversibleHalfResidual",
        lambda: tl.ReversibleHalfResidual(dense(), tl.Dropout(0.5)),
        f(3, 4),
        f(3, 4),
    ),
    case(
        "ReversibleMomentumResidual",
        lambda: tl.ReversibleMomentumResidual(dense(), gamma=0.8),
        f(3, 4),
        f(3, 4),
    ),
    case(
        "ReversibleSerial",
        lambda: tl.ReversibleSerial(
            tl.ReversibleHalfResidual(dense()), tl.ReversibleSwap()
        ),
        f(3, 4),
        f(3, 4),
    ),
    # Recurrent.
    case("LSTM", lambda: tl.LSTM(4), f(2, 5, 3)),
    case(
        "LSTM:state",
        lambda: tl.LSTM(4, return_state=True, initial_state=True),
        f(2, 5, 3),
        f(2, 8),
    ),
    case("LSTM:mask", lambda: tl.LSTM(4, use_mask=True), f(2, 5, 3), ids(2, 2, 5)),
    case("LSTM:predict", lambda: tl.LSTM(4, mode="predict"), f(2, 5, 3)),
    case("GRU", lambda: tl.GRU(4), f(2, 5, 3)),
    case("GRU:mask", lambda: tl.GRU(4, use_mask=True), f(2, 5, 3), ids(2, 2, 5)),
    case("GRU:predict", lambda: tl.GRU(4, mode="predict"), f(2, 5, 3)),
    case("SRU", lambda: tl.SRU(4), f(2, 5, 4)),
    case("SRU:mask", lambda: tl.SRU(4, use_mask=True), f(2, 5, 3), ids(2, 2, 5)),
    case("LSTMCell", lambda: tl.LSTMCell(4), f(3, 2), f(3, 8)),
    case("GRUCell", lambda: tl.GRUCell(4), f(3, 2), f(3, 4)),
    case("InnerSRUCell", tl.InnerSRUCell, f(3, 4), pos(3, 4), f(3, 4)),
    case("ScanSRUCell", tl.ScanSRUCell, f(2, 5, 4), pos(2, 5, 4), f(2, 4)),
    case("MakeZeroState", lambda: tl.MakeZeroState(2), f(2, 5, 3)),
    case("GeneralGRUCell", lambda: tl.GeneralGRUCell(dense), f(3, 4)),
    case("ConvGRUCell", lambda: tl.ConvGRUCell(3), f(2, 4, 5, 3)),
    # Convolutions and pooling.
    case("Conv", lambda: tl.Conv(4, 3, 2, "SAME"), f(2, 5, 6, 3)),
    case("Conv:groups", lambda: tl.Conv(4, (3, 2), groups=2), f(2, 2, 5, 6, 4)),
    case("Conv1d", lambda: tl.Conv1d(4, 3, rhs_dilation=2), f(2, 7, 3)),
    case("DepthwiseConv", lambda: tl.DepthwiseConv(3, 2), f(2, 5, 6, 3)),
    case("ConvTranspose", lambda: tl.ConvTranspose(4, 3, 2), f(2, 5, 6, 3)),
    case("CausalConv", lambda: tl.CausalConv(4, rhs_dilation=2), f(2, 7, 3)),
    case("CausalConv:predict", lambda: tl.CausalConv(4, mode="predict"), f(2, 7, 3)),
    case("CausalDepthwiseConv", tl.CausalDepthwiseConv, f(2, 7, 3)),
    case(
        "CausalDepthwiseConv:predict",
        lambda: tl.CausalDepthwiseConv(mode="predict"),
        f(2, 7, 3),
    ),
    case("MaxPool", tl.MaxPool, f(2, 5, 6, 3)),
    case("SumPool", lambda: tl.SumPool((2, 2), (2, 1)), f(2, 5, 6, 3)),
    case("AvgPool", lambda: tl.AvgPool((3,), padding="SAME"), f(2, 5, 6, 3)),
    case("RMSNorm", tl.RMSNorm, f(3, 4)),
    case("GatedFeedForward", lambda: tl.GatedFeedForward(5, d_out=2), f(3, 4)),
    case("GatedFeedForward:bias", lambda: tl.SwiGLU(5, use_bias=True), f(3, 4)),
    case("SwiGLU", lambda: tl.SwiGLU(5), f(2, 3, 4)),
    case("GEGLU", lambda: tl.GEGLU(5), f(3, 4)),
    case("ReGLU", lambda: tl.ReGLU(5), f(3, 4)),
    case("SinCosTimeEmbedding", lambda: tl.SinCosTimeEmbedding(4), f(3)),
    case(
        "SinCosTimeEmbedding:ids",
        lambda: tl.SinCosTimeEmbedding(4),
        ids(9, 3),
        grad=NO_FLOATS,
    ),
    case("MoE", lambda: tl.MoE(lambda: [dense(), tl.Tanh()], 3), f(2, 5, 4)),
    case("MoE:one", lambda: tl.MoE(dense, 3, k=1, return_loss=True), f(2, 5, 4)),
    case("MoE:eval", lambda: tl.MoE(dense, 3, mode="eval"), f(3, 4)),
    case("CRF", tl.CRF, f(2, 5, 3)),
    case("CRFLoss", tl.CRFLoss, f(2, 5, 4, 3), ids(3, 2, 5), pos(2, 5)),
    case("CRFAccuracy", tl.CRFAccuracy, f(2, 5, 4, 3), ids(3, 2, 5), pos(2, 5)),
    case(
        "InjectLatents",
        tl.InjectLatents,
        f(2, 5, 4),
        f(2, 2, 4),
        ids(6, 2, 2),
        ids(2, 2, 2),
    ),
    case("TakePositions", tl.TakePositions, f(2, 5, 4), ids(5, 2, 3)),
    case("LatentNoise", lambda: tl.LatentNoise(2, 4), f(3, 2, 4)),
    case("LoRA", lambda: tl.LoRA(dense(), rank=2), f(3, 4)),
    # Attention and positions.
    case("Attention", lambda: tl.Attention(4, 2), f(2, 3, 4), MASK),
    case("Attention:viz", lambda: tl.Attention(4, 2, mode="viz"), f(2, 3, 4), MASK),
    case(
        "Attention:positions",
        lambda: tl.Attention(4, 2, rotary=True, position_bias=tl.AlibiBias(2), chunk=2),
        f(2, 3, 4),
        MASK,
    ),
    case(
        "AttentionQKV",
        lambda: tl.AttentionQKV(4, 2, n_kv_heads=1, dropout=0.5),
        f(2, 2, 4),
        f(2, 3, 5),
        f(2, 3, 5),
        MASK,
    ),
    case("PureAttention", lambda: tl.PureAttention(2), *[f(2, 3, 4)] * 3, MASK),
    case(
        "DotProductAttention",
        lambda: tl.DotProductAttention(dropout=0.5),
        *[f(2, 2, 3, 4)] * 3,
        MASK,
    ),
    case("CausalAttention", lambda: tl.CausalAttention(4, 2), f(2, 3, 4)),
    case(
        "CausalAttention:bias",
        lambda: tl.CausalAttention(4, 2, position_bias=tl.RelativePositionBias(2)),
        f(2, 3, 4),
    ),
    case(
        "CausalAttention:predict",
        lambda: tl.CausalAttention(
            4, 2, max_inference_length=5, rotary=True, mode="predict"
        ),
        f(2, 3, 4),
    ),
    case(
        "ConfigurableAttention",
        lambda: tl.ConfigurableAttention(
            *[dense(), dense(), dense(), dense()],
            tl.DotProductCausalAttention(dropout=0.5),
            n_heads=2,
        ),
        f(2, 3, 4),
    ),
    case("DotProductCausalAttention", tl.DotProductCausalAttention, *[f(2, 3, 4)] * 3),
    case("SelfAttention", lambda: tl.SelfAttention(2, 2, 3, bias=True), f(2, 3, 4)),
    case(
        "SelfAttention:chunks",
        lambda: tl.SelfAttention(
            2,
            2,
            3,
            share_qk=True,
            masked=True,
            chunk_len=2,
            n_chunks_after=1,
            attention_dropout=0.5,
            n_parallel_heads=1,
        ),
        f(2, 3, 4),
        ids(2, 2, 3),
    ),
    case(
        "SelfAttention:predict",
        lambda: tl.SelfAttention(
            2, 2, 3, causal=True, mode="predict", predict_mem_len=5
        ),
        f(2, 3, 4),
    ),
    case(
        "LSHSelfAttention",
        lambda: tl.LSHSelfAttention(
            2, 2, 3, masked=True, chunk_len=2, n_hashes=2, output_dropout=0.5
        ),
        f(2, 5, 4),
        ids(2, 2, 5),
    ),
    case(
        "LSHSelfAttention:predict",
        lambda: tl.LSHSelfAttention(
            2,
            2,
            3,
            causal=True,
            chunk_len=2,
            n_buckets=2,
            mode="predict",
            predict_mem_len=5,
        ),
        f(2, 3, 4),
    ),
    case(
        "EncDecAttention",
        lambda: tl.EncDecAttention(2, 2, 3, attention_dropout=0.5),
        f(2, 2, 4),
        f(2, 3, 5),
        ids(2, 2, 3),
    ),
    case("SplitIntoHeads", lambda: tl.SplitIntoHeads(2), f(2, 3, 4)),
    case("MergeHeads", lambda: tl.MergeHeads(2), f(4, 3, 2)),
    case("PaddingMask", tl.PaddingMask, ids(3, 2, 4), grad=NO_FLOATS),
    case("CausalMask", tl.CausalMask, f(2, 3, 4)),
    case("EncoderDecoderMask", tl.EncoderDecoderMask, f(2, 4, 5), MASK),
    case("PositionalEncoding", lambda: tl.PositionalEncoding(8), f(2, 3, 4)),
    case(
        "PositionalEncoding:learned",
        lambda: tl.PositionalEncoding(8, dropout=0.5, d_feature=2, kind="learned"),
        f(2, 3, 4),
    ),
    case(
        "PositionalEncoding:predict",
        lambda: tl.PositionalEncoding(8, mode="predict", kind="trainable"),
        f(2, 3, 4),
    ),
    case(
        "AxialPositionalEncoding",
        lambda: tl.AxialPositionalEncoding((2, 2), (1, 3), dropout=0.5),
        f(2, 3, 4),
    ),
    case(
        "AxialPositionalEncoding:predict",
        lambda: tl.AxialPositionalEncoding((2, 2), (1, 3), mode="predict"),
        f(2, 3, 4),
    ),
    case("SinCosPositionalEncoding", tl.SinCosPositionalEncoding, f(2, 3, 4)),
    case("InfinitePositionalEncoding", tl.InfinitePositionalEncoding, f(2, 3, 5)),
    case(
        "InfinitePositionalEncoding:predict",
        lambda: tl.InfinitePositionalEncoding(
            transform="diag", time_bin_length=2, mode="predict"
        ),
        f(2, 3, 4),
    ),
    case(
        "TimeBinPositionalEncoding",
        lambda: tl.TimeBinPositionalEncoding(2),
        f(2, 3, 4),
    ),
    case("RotaryPositions", tl.RotaryPositions, f(2, 3, 4)),
    case("Rotate", tl.Rotate, f(2, 3, 4)),
    case(
        "RelativePositionBias",
        lambda: tl.RelativePositionBias(2, 6, 8),
        ids(9, 3),
        ids(9, 4),
    ),
    case("AlibiBias", lambda: tl.AlibiBias(2), ids(9, 3), ids(9, 4), grad=NO_FLOATS),
]

# Exported, and no layers to be put into the table.
NOT_IN_TABLE = {
    "ReversibleLayer": "the base class",
    "Layer": "the base of all; test_base tests it through small subclasses",
    "WeightedMean": "the abstract base of losses and metrics, all of which are here",
}


PROPERTIES = ("arity", "bfloat16", "grad", "init", "mixed", "repr", "vmap")


def with_property(name):
    """Parametrizes a test over the cases that have the property."""
    for each in TABLE:
        unknown = each.but.keys() - set(PROPERTIES)
        if unknown:
            raise ValueError(f"{each.name}: no property {unknown}")
    cases = [c for c in TABLE if name not in c.but]
    return pytest.mark.parametrize("case", cases, ids=lambda c: c.name)


@functools.cache
def prepared(case):
    """An initialised layer, its inputs, and what it eagerly makes of them."""
    layer = case.make()
    weights, state = layer.init(case.signature, rng=KEY)
    x = case.values()
    y, new_state = layer.pure_fn(x, weights, state, KEY)
    return layer, weights, state, x, y, new_state


def layers_in(layer):
    """The layer and all under it, also those that Repeat keeps as a pattern."""
    yield layer
    for child in layer.sublayers:
        yield from layers_in(child)
    if "_template" in vars(layer):
        yield from layers_in(vars(layer)["_template"])


def is_float(x):
    return jnp.issubdtype(x.dtype, jnp.floating)


def cast_floats(values, dtype):
    return jax.tree.map(lambda x: jnp.asarray(x, dtype) if is_float(x) else x, values)


def assert_close(got, expected, rtol=1e-5, atol=1e-6):
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert a.shape == b.shape and a.dtype == b.dtype
        if is_float(a):
            a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
            np.testing.assert_allclose(a, b, rtol=rtol, atol=atol)
        else:
            np.testing.assert_array_equal(a, b)


# --- The table ----------------------------------------------------------------------


def test_table_is_complete():
    exported = set()
    for name in tl.__all__:
        thing = getattr(tl, name)
        if inspect.isclass(thing):
            if issubclass(thing, tl.Layer):
                exported.add(name)
        elif callable(thing) and name[0].isupper():
            made = str(inspect.signature(thing).return_annotation)
            assert made.endswith(("Layer", "Array")) or "Initializer" in made, (
                f"{name} does not say whether it makes a layer: '-> {made}'"
            )
            if made.endswith("Layer"):
                exported.add(name)
    covered = {c.name.split(":")[0] for c in TABLE}
    assert covered | NOT_IN_TABLE.keys() == exported
    assert not covered & NOT_IN_TABLE.keys()
    assert len({c.name for c in TABLE}) == len(TABLE)


# --- Shapes and arities -------------------------------------------------------------


@with_property("arity")
def test_arities_are_those_of_forward(case):
    layer, _, _, _, y, _ = prepared(case)
    assert layer.n_in == len(case.inputs)
    if layer.n_out == 1:
        assert hasattr(y, "shape")
    else:
        assert isinstance(y, (tuple, list)) and len(y) == layer.n_out
        assert all(hasattr(item, "shape") for item in y)


@with_property("init")
def test_signatures_are_those_of_the_arrays(case):
    layer, weights, state, x, y, new_state = prepared(case)
    assert signature(x) == case.signature
    assert layer.output_signature(case.signature) == signature(y)
    sigs = case.make().weights_and_state_signature(case.signature)
    assert sigs == (signature(weights), signature(state))
    if not case.name.startswith("Cache"):  # Documented: it keeps its outputs there.
        assert trees.difference(state, new_state) is None


@with_property("repr")
def test_repr_is_stable_and_shows_the_arity(case):
    layer = prepared(case)[0]
    text = repr(layer)
    suffix = f"_in{layer.n_in}" * (layer.n_in != 1)
    suffix += f"_out{layer.n_out}" * (layer.n_out != 1)
    first = text.split("\n")[0]
    if "\n" in text:
        assert first[-1] == "[" and text[-1] == "]"
        first = first[:-1]
    assert first == layer.name + suffix
    assert repr(case.make()) == text and " at 0x" not in text


@with_property("tree")
def test_weights_have_names_and_a_row_in_the_summary(case):
    layer, weights, state, *_ = prepared(case)
    named = tree.named_leaves(layer, weights)
    assert [id(w) for _, w in named] == [id(w) for w in jax.tree.leaves(weights)]
    assert len({path for path, _ in named}) == len(named)
    assert len(tree.trainable_list(layer, weights)) == len(named)
    n_state = len(jax.tree.leaves(state))
    assert len(tree.state_sync_list(layer, state)) == n_state
    lines = summary.table(case.make(), case.signature).splitlines()
    assert all(len(line) <= 100 for line in lines)
    n_weights = sum(w.size for w in jax.tree.leaves(weights))
    assert f" {n_weights:,} " in lines[2]
    assert len(lines) >= 6 + len(list(layers_in(layer)))


# --- Transformations ----------------------------------------------------------------


@with_property("jit")
def test_jit_is_eager(case):
    layer, weights, state, x, y, new_state = prepared(case)
    assert_close(jax.jit(layer.pure_fn)(x, weights, state, KEY), (y, new_state))


@with_property("vmap")
def test_vmap_is_a_loop(case):
    layer, weights, state, *_ = prepared(case)
    pair = [case.values(seed) for seed in (1, 2)]
    stacked = jax.tree.map(lambda *xs: np.stack(xs), *pair)

    def run(x):
        return layer.pure_fn(x, weights, state, KEY)

    got = jax.vmap(run)(stacked)
    for i, x in enumerate(pair):
        assert_close(jax.tree.map(lambda a, i=i: a[i], got), run(x))


@with_property("grad")
def test_gradients_are_finite(case):
    layer, weights, state, x, *_ = prepared(case)
    leaves, structure = jax.tree.flatten((x, weights))
    floats = {i: leaf for i, leaf in enumerate(leaves) if is_float(leaf)}

    def loss(floats):
        given = [floats.get(i, leaf) for i, leaf in enumerate(leaves)]
        y, _ = layer.pure_fn(*jax.tree.unflatten(structure, given), state, KEY)
        parts = [jnp.sum(jnp.sin(a * 1.0)) for a in jax.tree.leaves(y)]
        return jnp.sum(jnp.array([0.0, *parts], jnp.float32))

    grads = jax.jit(jax.grad(loss))(floats)
    assert floats and grads.keys() == floats.keys()
    for i, grad in grads.items():
        assert grad.shape == floats[i].shape and grad.dtype == floats[i].dtype
        assert np.all(np.isfinite(np.asarray(grad, np.float32)))


@with_property("bfloat16")
def test_bfloat16_runs(case):
    layer, weights, state, x, y, _ = prepared(case)
    halves = [cast_floats(weights, jnp.bfloat16)]
    if jax.tree.leaves(weights) and "mixed" not in case.but:
        halves.append(weights)
    for each in halves:
        out, _ = jax.jit(layer.pure_fn)(cast_floats(x, jnp.bfloat16), each, state, KEY)
        check_half(out, y)


def check_half(out, y):
    assert jax.tree.structure(out) == jax.tree.structure(y)
    for a, b in zip(jax.tree.leaves(out), jax.tree.leaves(y), strict=True):
        assert a.shape == b.shape
        assert is_float(a) == is_float(b)
        if is_float(a):
            assert a.dtype in (jnp.bfloat16, jnp.float32)
            assert np.all(np.isfinite(np.asarray(a, np.float32)))


# --- Copies -------------------------------------------------------------------------


@with_property("pickle")
def test_pickled_weights_give_the_same_outputs(case):
    layer, weights, state, x, _, _ = prepared(case)
    expected = layer.pure_fn(x, weights, state, KEY)
    saved = pickle.dumps(trees.to_numpy((layer.weights, layer.state)))
    loaded = pickle.loads(saved)
    other = case.make()
    other.init(case.signature, rng=jax.random.key(99))
    other.weights, other.state = jax.tree.map(jnp.asarray, loaded)
    assert trees.difference(other.weights, weights) is None
    for a, b in zip(
        jax.tree.leaves((other.weights, other.state)),
        jax.tree.leaves((layer.weights, layer.state)),
        strict=True,
    ):
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()
    again = other.pure_fn(x, other.weights, other.state, KEY)
    assert_close(again, expected, rtol=0, atol=0)
    # NumPy arrays do as well, but an operation on them is compiled for itself, and two
    # ways of compiling it may differ in the last bit.
    assert_close(other.pure_fn(x, *loaded, KEY), expected)


@with_property("deepcopy")
def test_deepcopies_are_independent(case):
    layer, weights, _, x, y, _ = prepared(case)
    before = [np.array(w) for w in jax.tree.leaves(weights)]
    other = copy.deepcopy(layer)
    originals = {id(each) for each in layers_in(layer)}
    assert not originals & {id(each) for each in layers_in(other)}
    again, _ = other.pure_fn(x, other.weights, other.state, KEY)
    assert_close(again, y, rtol=0, atol=0)
    other.weights = jax.tree.map(lambda w: w * 0 - 1, other.weights)
    other(x, rng=KEY)
    for old, now in zip(before, jax.tree.leaves(layer.weights), strict=True):
        np.testing.assert_array_equal(old, now)
    assert repr(other) == repr(layer)


# --- Purity -------------------------------------------------------------------------


def fail(_):
    raise RuntimeError("on purpose")


@with_property("pure")
def test_pure_fn_leaves_the_layer_alone(case):
    layer, weights, state, x, *_ = prepared(case)
    failing = tl.Serial(
        layer, tl.PureLayer(fail, n_in=layer.n_out, name="Fail"), name="Model"
    )
    both = (weights, ()), (state, ())
    before = [(each, dict(vars(each))) for each in layers_in(failing)]

    def check():
        for each, attributes in before:
            now = vars(each)
            assert now.keys() == attributes.keys()
            for name, value in attributes.items():
                assert now[name] is value, (each.name, name)
                assert trees.is_concrete(value)

    layer.pure_fn(x, weights, state, KEY)
    check()
    jax.eval_shape(layer.pure_fn, x, weights, state, KEY)
    check()
    with pytest.raises(LayerError, match="on purpose"):
        failing.pure_fn(x, *both, KEY)
    check()
    with pytest.raises(LayerError, match="on purpose") as e:
        jax.jit(failing.pure_fn)(x, *both, KEY)
    assert e.value.path == "Serial[1] > Fail"
    check()
