"""From a model and what the caller wants to what a session runs: plain ORT, or a plan."""

import mmap
import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import onnx
from onnxruntime.capi import onnxruntime_pybind11_state as _ort

from ort_webgpu.cache_pairs import Pair, find_pairs
from ort_webgpu.device import Gpu, open_gpu
from ort_webgpu.errors import InvalidModelError, NotOffloadedError
from ort_webgpu.explain import Row
from ort_webgpu.graph_tools import (
    FOLDER_OPTION,
    ModelError,
    ModelFile,
    Nested,
    inline_functions,
    nested_candidates,
)
from ort_webgpu.graph_tools.reference import EXPANDABLE, replace_unsupported
from ort_webgpu.interface import Undeclarable, stand_in
from ort_webgpu.ops import OPS
from ort_webgpu.ops.spec import Caps
from ort_webgpu.options import config_entry, copy_options
from ort_webgpu.placement import (
    Offload,
    Placement,
    is_candidate,
    mentions,
    needs_expansion,
    place,
)
from ort_webgpu.plan import Plan, build_plan
from ort_webgpu.segments import SegmentFactory
from ort_webgpu.tuning import load

__all__ = ["Built", "Request", "Wishes", "build"]


@dataclass(frozen=True)
class Wishes:
    """The keyword arguments that WebGPUSession adds to ORT's."""

    adapter: str | int = "auto"
    backend: str = "auto"
    offload: Offload = "all"
    fallback: str = "cpu"
    routes: Mapping[str, str] = field(default_factory=dict)
    tuned: bool = True

    def check(self) -> None:
        """Raises ValueError for a word that is none of those allowed."""
        if self.fallback not in ("cpu", "error"):
            raise ValueError(f'fallback={self.fallback!r} is neither "cpu" nor "error"')
        if self.backend not in ("auto", "wgpu", "dawn"):
            raise ValueError(f'backend={self.backend!r} is none of "auto", "wgpu", "dawn"')
        known = {route.name for spec in OPS.values() for route in spec.routes}
        for target, route in self.routes.items():
            specs = [spec for (_, op_type), spec in OPS.items() if op_type == target]
            allowed = {r.name for spec in specs for r in spec.routes} or known
            if route not in allowed:
                raise ValueError(
                    f"routes={{{target!r}: {route!r}}}: there is no such route; there are"
                    f" {sorted(allowed)}"
                )

    @property
    def nothing(self) -> bool:
        """Whether the caller wants no node offloaded."""
        return self.offload is None or self.offload is False or self.offload == "none"


@dataclass(frozen=True)
class Request:
    """A model, and what ORT's constructor was given beside it, normalized as ORT does."""

    path: str | None
    data: bytes | None
    options: Any
    providers: Sequence[str]
    provider_options: Sequence[Mapping[str, str]]
    disabled_optimizers: frozenset[str]
    read_config: bool = False


@dataclass(frozen=True)
class Built:
    """`session` is a C session for `_sess`; without a `plan` it is the one that runs.

    `session` None: a plain ORT session of the model, which ORT's own constructor is to make.
    `rows` are candidates that are not in the plan; `order` has the model's nodes by name.
    """

    session: Any = None
    plan: Plan | None = None
    rows: tuple[Row, ...] = ()
    notes: tuple[str, ...] = ()
    order: Mapping[str, int] = field(default_factory=dict)
    pairs: tuple[Pair, ...] = ()


def build(request: Request, wishes: Wishes) -> Built:
    """What a session on `request` is made of.

    Raises ORT's own errors for a model that ORT cannot load, NoAdapterError, NotOffloadedError and
    InvalidModelError.
    """
    if _is_plain(request):
        return Built()
    try:
        model = _open(request)
    except (ModelError, OSError) as error:
        return Built(notes=(f"left to ONNX Runtime: {error}",))
    if problem := _missing_data(model, request):
        return Built(notes=(problem,))
    model, nested = _flatten(model)
    concerned = [n for n in model.nodes if is_candidate(n) or n.op_type in EXPANDABLE]
    if not concerned and not nested:
        return Built()
    # ORT's own errors for what is wrong with the model come before any of ours.
    original = _loaded(request)
    made = [name for node in model.nodes for name in node.outputs if name]
    factory = SegmentFactory(
        model,
        request.options,
        request.providers,
        request.provider_options,
        request.disabled_optimizers,
    )
    try:
        kinds = factory.kinds(made)
    except ModelError as error:
        raise InvalidModelError(str(error)) from error
    simple = {arg.name: arg.type for arg in original.inputs_meta}
    simple |= {name: kind for name, (kind, _) in kinds.items()} | _stored_kinds(model)
    reported = tuple(n for n in nested if (n.domain, n.op_type) in OPS)
    pairs = find_pairs(model, {arg.name: arg for arg in original.inputs_meta}, kinds)
    gpu, obstacle = _device(model, wishes)
    placement = place(model, wishes.offload, simple, reported, obstacle)
    if placement.offloaded and gpu is not None:
        try:
            session = stand_in(factory, original)
        except Undeclarable as error:
            placement = place(model, wishes.offload, simple, reported, str(error))
        else:
            _complain(placement, wishes, gpu)
            caps, notes = _caps(gpu, wishes)
            plan = build_plan(
                factory, placement, kinds, gpu, wishes.routes, wishes.fallback == "cpu", caps
            )
            order = {node.name: node.index for node in model.nodes}
            return Built(session, plan, _rows(placement), notes, order, pairs)
    _complain(placement, wishes, gpu)
    rows = _rows(placement)
    if any(needs_expansion(node, simple) for node in model.nodes) or nested:
        whole = _expanded_whole(request, model, simple, nested)
        return Built(whole, None, rows, pairs=pairs)
    return Built(rows=rows, pairs=pairs)


def _caps(gpu: Gpu, wishes: Wishes) -> tuple[Caps, tuple[str, ...]]:
    """What routes are chosen by, and why what was measured is not in it, if it is not."""
    if not wishes.tuned:
        return gpu.caps, ()
    measured = load(gpu.info)
    return replace(gpu.caps, tuned=measured.tuned), tuple(filter(None, [measured.obstacle]))


def _is_plain(request: Request) -> bool:
    """Whether to leave the model to ORT unread.

    A session with `optimized_model_filepath` is made for the file that it writes, which must be the
    whole model's.
    """
    options = request.options
    if options is not None and options.optimized_model_filepath:
        return True
    if config_entry(options, "session.load_model_format") == "ORT":
        return True
    if request.data is not None:
        return not mentions(request.data)
    path = Path(request.path or "")
    if path.suffix == ".ort" or not path.is_file():
        return True
    with path.open("rb") as file:
        if not path.stat().st_size:
            return True
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return not mentions(data)


def _open(request: Request) -> ModelFile:
    folder = config_entry(request.options, FOLDER_OPTION)
    if request.data is None:
        return ModelFile.open(request.path or "", folder)
    # As ORT does: external data of a model without a path is relative to the working directory
    return ModelFile.open(request.data, folder or ".")


def _missing_data(model: ModelFile, request: Request) -> str | None:
    """What is wrong with the external data, if anything; ORT then reports it in its own words."""
    sizes: dict[Path, int] = {}
    for weight in model.weights.values():
        if weight.path is None:
            continue
        if weight.path not in sizes:
            sizes[weight.path] = weight.path.stat().st_size if weight.path.is_file() else -1
        size = sizes[weight.path]
        if size < 0:
            found = (
                f"the data of {weight.name!r} should be in {str(weight.path)!r}, which is missing"
            )
            if request.data is None:
                return found
            return (
                f"{found}. A model given as bytes or ModelProto has no folder: give its path, or"
                f" add_session_config_entry({FOLDER_OPTION!r}, FOLDER) to the session options"
            )
        if size < weight.offset + weight.length:
            end = weight.offset + weight.length
            return f"{str(weight.path)!r} has {size} bytes; {weight.name!r} needs {end}"
    return None


def _flatten(model: ModelFile) -> tuple[ModelFile, tuple[Nested, ...]]:
    """The model with functions that hold candidates inlined, and what stays nested."""

    def concerns(node: onnx.NodeProto) -> bool:
        return is_candidate(node) or (node.domain == "com.microsoft" and node.op_type in EXPANDABLE)

    flat = inline_functions(model, concerns)
    return flat, nested_candidates(flat, concerns)


def _loaded(request: Request) -> Any:
    """The model's own ORT session, loaded but not initialized: no kernels, no weights."""
    options = copy_options(request.options)
    options.enable_profiling = False
    source: Any = request.path if request.data is None else request.data
    return _ort.InferenceSession(options, source, request.data is None, request.read_config)


def _stored_kinds(model: ModelFile) -> dict[str, str]:
    names = {value: key for key, value in onnx.TensorProto.DataType.items()}
    return {n: f"tensor({names[w.elem_type].lower()})" for n, w in model.weights.items()}


def _device(model: ModelFile, wishes: Wishes) -> tuple[Gpu | None, str | None]:
    """The device, or the reason that keeps every node on the CPU; no device is opened in vain."""
    if wishes.nothing or not any(is_candidate(node) for node in model.nodes):
        return None, None
    gpu = open_gpu(wishes.adapter, wishes.backend)
    if gpu is None:
        return None, "no adapter was found" if wishes.adapter == "auto" else "no adapter is wanted"
    chosen = wishes.adapter != "auto" or os.environ.get("ORT_WEBGPU_ADAPTER")
    if gpu.caps.software and not chosen:
        warnings.warn(
            f"the only adapter, {gpu.info.name!r}, is a software one, for tests: the CPU alone is"
            " faster. Name it in adapter= or ORT_WEBGPU_ADAPTER to be rid of this warning, or use"
            ' adapter="none"',
            RuntimeWarning,
            stacklevel=6,
        )
    return gpu, None


def _complain(placement: Placement, wishes: Wishes, gpu: Gpu | None) -> None:
    """One warning, or NotOffloadedError, about nodes that are not where the caller wanted them."""
    unwanted = placement.unwanted
    if not unwanted:
        return
    listed = "; ".join(f"{name!r}: {reason}" for name, reason in unwanted.items())
    if wishes.fallback == "error":
        raise NotOffloadedError(
            f'fallback="error", but these nodes cannot run on the device: {listed}. Use'
            ' fallback="cpu" to run them on the CPU, or offload= to leave them out'
        )
    if wishes.adapter == "none" and gpu is None:
        return
    reasons = set(unwanted.values())
    if len(reasons) == 1:
        names = ", ".join(map(repr, unwanted))
        listed = f"{names}: {reasons.pop()}"
    warnings.warn(
        f"{len(unwanted)} attention node(s) run on the CPU instead of WebGPU: {listed}",
        RuntimeWarning,
        stacklevel=6,
    )


def _rows(placement: Placement) -> tuple[Row, ...]:
    rows = [Row(node.name, node.op_type, "cpu", None, why) for node, why in placement.kept]
    rows += [
        Row(f"{n.path} / {n.name}", n.op_type, "cpu", None, n.reason) for n in placement.nested
    ]
    return tuple(rows)


def _expanded_whole(
    request: Request, model: ModelFile, kinds: Mapping[str, str], nested: Sequence[Nested]
) -> Any:
    """One session of the whole model, with what ORT's CPU EP lacks in standard operators."""
    ops = {node.op_type for node in model.nodes if needs_expansion(node, kinds)}
    ops |= {one.op_type for one in nested}
    try:
        proto = replace_unsupported(model.proto, ops)
    except ValueError as error:
        raise InvalidModelError(str(error)) from error
    options = copy_options(request.options)
    if model.base_dir is not None:
        options.add_session_config_entry(FOLDER_OPTION, str(model.base_dir.resolve()))
    session = _ort.InferenceSession(options, proto.SerializeToString(), False, False)
    session.initialize_session(
        list(request.providers),
        list(request.provider_options),
        set(request.disabled_optimizers),
    )
    return session
