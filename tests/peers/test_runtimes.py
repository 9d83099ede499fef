"""Libraries that construct sessions in ways of their own, on the committed decoder."""

import pickle

import numpy as np
import onnx
import onnxruntime
import pytest
from session_helpers import MODEL, feeds, same

import ort_webgpu

pytestmark = [pytest.mark.peers, pytest.mark.filterwarnings("default")]


def _expected():
    return ort_webgpu.PlainSession(str(MODEL)).run(None, feeds())


def test_polygraphy(patched):
    backend = pytest.importorskip("polygraphy.backend.onnxrt")
    runner = backend.OnnxrtRunner(backend.SessionFromOnnx(str(MODEL)))
    with runner:
        assert isinstance(runner.sess, ort_webgpu.WebGPUSession)
        found = runner.infer(feeds())
    same(list(found.values()), _expected())


def test_onnxruntime_backend(patched):
    backend = pytest.importorskip("onnxruntime.backend")
    prepared = backend.prepare(str(MODEL))
    assert isinstance(prepared._session, ort_webgpu.WebGPUSession)
    inputs = [feeds()[arg.name] for arg in prepared._session.get_inputs()]
    same(prepared.run(inputs), _expected())


def test_insightface_subclass(patched):
    zoo = pytest.importorskip("insightface.model_zoo.model_zoo")
    session = zoo.PickableInferenceSession(str(MODEL))
    assert isinstance(session, ort_webgpu.WebGPUSession)
    assert isinstance(session, zoo.PickableInferenceSession)
    again = pickle.loads(pickle.dumps(session))
    assert type(again) is type(session)
    same(again.run(None, feeds()), _expected())
    session.set_providers(["CPUExecutionProvider"])
    assert session.get_providers() == ["CPUExecutionProvider"]


def test_quantization_calibrates_on_our_sessions(patched, tmp_path):
    calibrate = pytest.importorskip("onnxruntime.quantization.calibrate")

    class Reader(calibrate.CalibrationDataReader):
        def __init__(self):
            self.rest = [{"x": np.full((1, 4), i, np.float32)} for i in (1, 2)]

        def get_next(self):
            return self.rest.pop() if self.rest else None

    info = [
        onnx.helper.make_tensor_value_info(n, onnx.TensorProto.FLOAT, [1, 4]) for n in ("x", "y")
    ]
    weight = onnx.numpy_helper.from_array(np.eye(4, dtype=np.float32), "w")
    graph = onnx.helper.make_graph(
        [onnx.helper.make_node("MatMul", ["x", "w"], ["y"])], "g", info[:1], info[1:], [weight]
    )
    imports = [onnx.helper.make_opsetid("", 18)]
    path = tmp_path / "model.onnx"
    onnx.save(onnx.helper.make_model(graph, opset_imports=imports, ir_version=9), path)
    calibrator = calibrate.create_calibrator(
        path, ["MatMul"], augmented_model_path=str(tmp_path / "augmented.onnx")
    )
    assert isinstance(calibrator.infer_session, onnxruntime.InferenceSession)
    calibrator.collect_data(Reader())
    assert calibrator.compute_data()["y"].range_value[1] == 2
