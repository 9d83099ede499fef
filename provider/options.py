"""SessionOptions: ORT can neither copy nor pickle them, so this module does.

ORT 1.32 keeps a copy of the options in every session and gives it out as `session_options`; that
copy has everything, registered custom operators and config entries included, and may be changed and
used for another session. A copy is therefore made by making a session on an empty graph.
"""

import functools
from typing import Any

import onnx
from onnx import helper
from onnxruntime.capi import onnxruntime_pybind11_state as _ort

__all__ = ["config_entry", "copy_options", "plain_values", "with_plain_values"]

#: What a copy is made without: a profile file would be created and threads started.
_QUIET = {"enable_profiling": False, "intra_op_num_threads": 1, "inter_op_num_threads": 1}

_PROPERTIES = (
    "enable_cpu_mem_arena",
    "enable_mem_pattern",
    "enable_mem_reuse",
    "enable_profiling",
    "execution_mode",
    "execution_order",
    "graph_optimization_level",
    "inter_op_num_threads",
    "intra_op_num_threads",
    "log_severity_level",
    "log_verbosity_level",
    "logid",
    "optimized_model_filepath",
    "profile_file_prefix",
    "use_deterministic_compute",
    "use_per_session_threads",
)

#: Config entries that survive pickling; ORT cannot list those that are set.
_ENTRIES = (
    "session.disable_prepacking",
    "session.dynamic_block_base",
    "session.force_spinning_stop",
    "session.inter_op.allow_spinning",
    "session.intra_op.allow_spinning",
    "session.intra_op_thread_affinities",
    "session.load_model_format",
    "session.model_external_initializers_file_folder_path",
    "session.record_ep_graph_assignment_info",
    "session.set_denormal_as_zero",
    "session.strict_shape_type_inference",
    "session.use_device_allocator_for_initializers",
    "session.use_env_allocators",
    "optimization.enable_gelu_approximation",
)


@functools.cache
def _empty_model() -> bytes:
    value = helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, [1])
    graph = helper.make_graph([], "options", [value], [value])
    imports = [helper.make_opsetid("", 17)]
    return helper.make_model(graph, opset_imports=imports, ir_version=8).SerializeToString()


def copy_options(options: Any) -> Any:
    """A `C.SessionOptions` of its own, equal to `options` (None: ORT's defaults)."""
    source = options if options is not None else _ort.get_default_session_options()
    kept = {name: getattr(source, name) for name in _QUIET}
    try:
        for name, value in _QUIET.items():
            setattr(source, name, value)
        copied = _ort.InferenceSession(source, _empty_model(), False, False).session_options
    finally:
        for name, value in kept.items():
            setattr(source, name, value)
    for name, value in kept.items():
        setattr(copied, name, value)
    return copied


def config_entry(options: Any, key: str) -> str | None:
    """The config entry, or None where it is not set."""
    if options is None:
        return None
    try:
        return options.get_session_config_entry(key)
    except RuntimeError:
        return None


def plain_values(options: Any) -> dict[str, Any] | None:
    """What can be pickled of `options`: all properties, and the config entries known here."""
    if options is None:
        return None
    values = {name: getattr(options, name) for name in _PROPERTIES}
    found = {key: config_entry(options, key) for key in _ENTRIES}
    return {"properties": values, "entries": {k: v for k, v in found.items() if v is not None}}


def with_plain_values(values: dict[str, Any] | None) -> Any:
    """New options from what `plain_values` gave."""
    if values is None:
        return None
    options = _ort.SessionOptions()
    for name, value in values["properties"].items():
        setattr(options, name, value)
    for key, value in values["entries"].items():
        options.add_session_config_entry(key, value)
    return options
