"""What is plain; saving and refusing values is tested with checkpoints."""

import ml_dtypes
import numpy as np

from retrax.storage import plain


def test_is_float_knows_ml_dtypes():
    assert plain.is_float(np.float16)
    assert plain.is_float(ml_dtypes.bfloat16)
    assert plain.is_float(ml_dtypes.float8_e4m3fn)
    assert not plain.is_float(ml_dtypes.int4)
    assert not plain.is_float(np.int32)
