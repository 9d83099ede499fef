"""patch_onnxruntime: every import style, subclasses, copies, children, and back again."""

import copy
import importlib.util
import os
import pickle
import subprocess
import sys
import textwrap
import threading

import numpy as np
import onnxruntime
import pytest
from session_helpers import MODEL, feeds, options, same

import ort_webgpu
from ort_webgpu import InvalidInputError, OrtWebGpuError, PlainSession, WebGPUSession
from ort_webgpu import patch as patch_module

LIBRARY = '''
"""A library that imports the names at its own import, and derives a class as insightface does."""
import onnxruntime
from onnxruntime import InferenceSession, IOBinding

def at_import(*args, **kwargs):
    return InferenceSession(*args, **kwargs)

def at_call(*args, **kwargs):
    return onnxruntime.InferenceSession(*args, **kwargs)

def binding(session):
    return IOBinding(session)

class Derived(onnxruntime.InferenceSession):
    def __init__(self, path, **kwargs):
        super().__init__(path, **kwargs)
        self.path = path

    def __getstate__(self):
        return {"path": self.path}

    def __setstate__(self, state):
        self.__init__(state["path"])

class Bare(onnxruntime.InferenceSession):
    pass
'''


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    """Imported before anything is patched."""
    assert not patch_module.is_patched()
    folder = tmp_path_factory.mktemp("library")
    (folder / "library_of_the_test.py").write_text(LIBRARY)
    spec = importlib.util.spec_from_file_location(
        "library_of_the_test", folder / "library_of_the_test.py"
    )
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


@pytest.fixture
def patched(library):
    with ort_webgpu.patch_onnxruntime(adapter="llvmpipe"):
        yield library
    assert not patch_module.is_patched()


def offloads(session) -> bool:
    return session.get_providers()[0] == "WebGpuExecutionProvider"


@pytest.mark.parametrize("style", ["at_import", "at_call", "Bare", "Derived"])
def test_every_import_style(patched, style):
    session = getattr(patched, style)(str(MODEL))
    assert isinstance(session, WebGPUSession) and isinstance(session, onnxruntime.InferenceSession)
    assert offloads(session)
    with ort_webgpu.plain_onnxruntime():
        plain = patched.at_call(str(MODEL), options())
    assert type(plain) is onnxruntime.InferenceSession
    same(session.run(None, feeds()), plain.run(None, feeds()))
    if style in ("Bare", "Derived"):
        assert isinstance(session, getattr(patched, style))
        assert type(session).__name__ == style


def test_plain_sessions_by_name(patched):
    assert type(PlainSession(str(MODEL), options())) is PlainSession
    assert PlainSession(str(MODEL), options()).get_providers() == ["CPUExecutionProvider"]
    made = []
    with ort_webgpu.plain_onnxruntime():  # only of the thread that asks for it
        thread = threading.Thread(target=lambda: made.append(patched.at_call(str(MODEL))))
        thread.start()
        thread.join()
    assert isinstance(made[0], WebGPUSession)


def test_binding_class_of_ort(patched):
    session = patched.at_import(str(MODEL))
    binding = patched.binding(session)
    for name, value in feeds().items():
        binding.bind_input(name, "cpu", 0, value.dtype, value.shape, value.ctypes.data)
    logits = np.empty((2, 5, 512), np.float32)
    binding.bind_output("logits", "cpu", 0, np.float32, logits.shape, logits.ctypes.data)
    session.run_with_iobinding(binding)
    same([logits], session.run(["logits"], feeds()))
    plain = PlainSession(str(MODEL), options())
    assert type(patched.binding(plain)) is onnxruntime.IOBinding


@pytest.mark.parametrize("adapter", ["llvmpipe", "none"])
def test_binding_is_copied_as_one_of_the_copied_session(library, adapter):
    session = WebGPUSession(MODEL, options(), adapter=adapter)
    holder = pickle.loads(pickle.dumps([session, session.io_binding()]))
    copied, binding = holder
    for name, value in feeds().items():
        binding.bind_cpu_input(name, value)
    binding.bind_output("logits")
    copied.run_with_iobinding(binding)
    same(binding.copy_outputs_to_cpu(), session.run(["logits"], feeds()))


def test_pickle_and_deepcopy(patched):
    for made in (
        patched.at_import(str(MODEL)),
        patched.Derived(str(MODEL)),
        patched.Bare(str(MODEL)),
    ):
        expected = made.run(None, feeds())
        for copied in (pickle.loads(pickle.dumps(made)), copy.deepcopy(made)):
            assert type(copied) is type(made) and offloads(copied)
            same(copied.run(None, feeds()), expected)


def test_unpatched_process_is_as_before(library):
    with ort_webgpu.patch_onnxruntime(adapter="llvmpipe"):
        session = library.at_import(str(MODEL))
    for style in ("at_import", "at_call", "Bare", "Derived"):
        made = getattr(library, style)(str(MODEL))
        assert not isinstance(made, WebGPUSession)
        assert made.get_providers() == ["CPUExecutionProvider"]
        assert type(library.binding(made)) is onnxruntime.IOBinding
    assert offloads(session)  # a session made before keeps to what it is
    same(session.run(None, feeds()), made.run(None, feeds()))


def test_patches_nest_and_unpatch_ends_all(library):
    with ort_webgpu.patch_onnxruntime(adapter="llvmpipe"):
        with ort_webgpu.patch_onnxruntime(offload="none"):
            assert not offloads(library.at_call(str(MODEL)))
        assert offloads(library.at_call(str(MODEL)))
    ort_webgpu.patch_onnxruntime()
    ort_webgpu.patch_onnxruntime()
    ort_webgpu.unpatch_onnxruntime()
    assert type(library.at_call(str(MODEL))) is onnxruntime.InferenceSession
    with ort_webgpu.patch_onnxruntime():
        with pytest.raises(Exception, match="Unable to load from type"):
            library.at_call(3)
        with pytest.raises(InvalidInputError, match="no key/value cache"):
            library.at_call(_identity()).new_cache(1)


def _identity() -> bytes:
    from onnx import TensorProto, helper

    info = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1]) for name in "xy"]
    graph = helper.make_graph([helper.make_node("Neg", ["x"], ["y"])], "g", info[:1], info[1:])
    imports = [helper.make_opsetid("", 18)]
    return helper.make_model(graph, opset_imports=imports, ir_version=9).SerializeToString()


def test_options_are_checked(tmp_path, monkeypatch):
    with pytest.raises(TypeError, match="takes no \\['device'\\]"):
        ort_webgpu.patch_onnxruntime(device="gpu")
    monkeypatch.setattr(patch_module, "_site", lambda: tmp_path)
    with pytest.raises(OrtWebGpuError, match="patch --install"):
        ort_webgpu.patch_onnxruntime(children=True)
    patch_module._install(tmp_path)
    with ort_webgpu.patch_onnxruntime(children=True):
        assert os.environ[patch_module.VARIABLE] == "1"
    assert patch_module.VARIABLE not in os.environ
    patch_module._uninstall(tmp_path)
    assert not any(tmp_path.iterdir())


CHILD = """
    import multiprocessing, sys
    import onnxruntime

    def work(path):
        return type(onnxruntime.InferenceSession(path)).__name__

    if __name__ == "__main__":
        print(work(sys.argv[1]))
        for method in ("fork", "spawn", "forkserver"):
            with multiprocessing.get_context(method).Pool(1) as pool:
                print(method, pool.apply(work, (sys.argv[1],)))
"""


@pytest.mark.parametrize(("value", "name"), [("1", "WebGPUSession"), ("0", "InferenceSession")])
def test_environment_variable_patches_children(tmp_path, value, name):
    """The .pth file does its work in a folder of the test's own, which each interpreter adds."""
    site = tmp_path / "site"
    site.mkdir()
    patch = [sys.executable, "-m", "ort_webgpu.patch", "--folder", str(site)]
    done = subprocess.run([*patch, "--install"], check=True, capture_output=True, text=True)
    assert "patch.pth: installed" in done.stdout
    (tmp_path / "sitecustomize.py").write_text(f"import site; site.addsitedir({str(site)!r})\n")
    script = tmp_path / "child.py"
    script.write_text(textwrap.dedent(CHILD))
    environment = {
        **os.environ,
        "ORT_WEBGPU_PATCH": value,
        "ORT_WEBGPU_ADAPTER": "none",  # a device must not be opened before a fork
        "PYTHONPATH": str(tmp_path),
    }
    done = subprocess.run(
        [sys.executable, str(script), str(MODEL)],
        check=True,
        capture_output=True,
        text=True,
        env=environment,
    )
    assert done.stdout.split("\n")[:4] == [name, *(f"{m} {name}" for m in METHODS)]
    done = subprocess.run([*patch, "--uninstall"], check=True, capture_output=True, text=True)
    assert "not installed" in done.stdout and not any(site.glob("*.p*"))


METHODS = ("fork", "spawn", "forkserver")
