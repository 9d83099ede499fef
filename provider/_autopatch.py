"""Patches onnxruntime as soon as it is imported, in processes started with ORT_WEBGPU_PATCH=1.

`python -m ort_webgpu.patch --install` copies this file into site-packages, beside a .pth file that
imports it at the start of every interpreter that has the variable. It must stay cheap and import
nothing of ours until onnxruntime is there.
"""

import importlib.abc
import importlib.util
import sys
import warnings


class _AfterOnnxRuntime(importlib.abc.MetaPathFinder):
    """Finds onnxruntime once, the usual way, and has it patched after its import."""

    def find_spec(self, name, path=None, target=None):
        if name != "onnxruntime":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_patch(module):
                execute(module)
                _patch()

            spec.loader.exec_module = execute_and_patch  # type: ignore[method-assign]
        return spec


def _patch() -> None:
    try:
        from ort_webgpu.patch import patch_onnxruntime

        patch_onnxruntime()
    except Exception as error:  # a pipeline that only inherits the variable must still run
        warnings.warn(
            f"ORT_WEBGPU_PATCH is set, but onnxruntime stays as it is: {error}",
            RuntimeWarning,
            stacklevel=2,
        )


sys.meta_path.insert(0, _AfterOnnxRuntime())
