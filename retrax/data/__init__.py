"""Data: streams of numpy batches that know where they are, and pipelines.

Knows numpy only, never JAX. A stream (`Stream`) is an iterator of batches with
`state()` and `restore(state)`; `as_stream` makes one of any usual source. Pipelines
(`Serial(...)`) are Trax's functions from generator to generator. `Inputs` bundles
the streams of one task; `digits()` and `shakespeare()` are data sets that are always
there.
"""

from retrax.data.arrays import ArrayStream
from retrax.data.checks import CheckedStream, checked
from retrax.data.digits import digits, digits_arrays
from retrax.data.inputs import (
    Inputs,
    batcher,
    make_additional_stream,
    make_inputs,
    make_parallel_stream,
)
from retrax.data.pipeline import (
    AddLossWeights,
    AppendValue,
    Batch,
    BucketByLength,
    CastTo,
    Dup,
    FilterByLength,
    FilterEmptyExamples,
    Log,
    PadToLength,
    Parallel,
    Prefetch,
    Serial,
    Shuffle,
    TruncateToLength,
    UnBatch,
    add_loss_weights,
    batch,
    bucket_by_length,
    pad_to_max_dims,
    shuffle,
)
from retrax.data.prefetch import PrefetchStream
from retrax.data.shares import ShareStream
from retrax.data.sources import GeneratorStream, ListStream, as_stream
from retrax.data.streams import Stream, as_batch, peek
from retrax.data.sudoku import SudokuDataset, read_puzzles, sudoku
from retrax.data.synthetic import (
    addition_inputs,
    random_inputs,
    sequence_copy_inputs,
    sine_inputs,
)
from retrax.data.tasks import copy_task, reverse_task, sort_task
from retrax.data.text import (
    CharTokenizer,
    CropStream,
    lm_inputs,
    shakespeare,
    shakespeare_text,
)

__all__ = [
    "AddLossWeights",
    "AppendValue",
    "ArrayStream",
    "Batch",
    "BucketByLength",
    "CastTo",
    "CharTokenizer",
    "CheckedStream",
    "CropStream",
    "Dup",
    "FilterByLength",
    "FilterEmptyExamples",
    "GeneratorStream",
    "Inputs",
    "ListStream",
    "Log",
    "PadToLength",
    "Parallel",
    "Prefetch",
    "PrefetchStream",
    "Serial",
    "ShareStream",
    "Shuffle",
    "Stream",
    "SudokuDataset",
    "TruncateToLength",
    "UnBatch",
    "add_loss_weights",
    "addition_inputs",
    "as_batch",
    "as_stream",
    "batch",
    "batcher",
    "bucket_by_length",
    "checked",
    "copy_task",
    "digits",
    "digits_arrays",
    "lm_inputs",
    "make_additional_stream",
    "make_inputs",
    "make_parallel_stream",
    "pad_to_max_dims",
    "peek",
    "random_inputs",
    "read_puzzles",
    "reverse_task",
    "sequence_copy_inputs",
    "shakespeare",
    "shakespeare_text",
    "shuffle",
    "sine_inputs",
    "sort_task",
    "sudoku",
]
