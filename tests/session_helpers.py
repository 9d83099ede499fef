"""What the tests of sessions share: the committed model, its feeds, and ORT's own answers."""

from pathlib import Path

import numpy as np
import onnxruntime

MODEL = Path(__file__).parents[1] / "examples" / "model" / "model.onnx"
BOTH = ["WebGpuExecutionProvider", "CPUExecutionProvider"]


def options(**properties) -> onnxruntime.SessionOptions:
    made = onnxruntime.SessionOptions()
    made.intra_op_num_threads = 1
    made.log_severity_level = 4
    for name, value in properties.items():
        setattr(made, name, value)
    return made


def feeds(tokens=((5, 9, 200, 31, 7), (8, 8, 1, 77, 250)), past: int = 0) -> dict[str, np.ndarray]:
    """A prompt of two rows over a past of `past` random keys."""
    ids = np.array(tokens, np.int64)
    shape = (len(ids), 2, past, 32)
    rng = np.random.default_rng(past)
    caches = {
        f"past_key_values.{layer}.{part}": rng.standard_normal(shape, dtype=np.float32)
        for layer in range(4)
        for part in ("key", "value")
    }
    mask = np.ones((len(ids), ids.shape[1] + past), np.int64)
    return {"input_ids": ids, "attention_mask": mask, **caches}


def same(ours, theirs) -> None:
    assert len(ours) == len(theirs)
    for one, other in zip(ours, theirs, strict=True):
        assert (one.shape, one.dtype) == (other.shape, other.dtype)
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-4)


def outcome(call):
    """Type and text of what `call` raises, or None."""
    try:
        call()
    except Exception as error:
        return type(error), str(error)
    return None
