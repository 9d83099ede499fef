"""WebGPUSession: onnxruntime.InferenceSession with the attention operators on WebGPU.

The class overrides what creates ORT's session and what runs it; whatever else a library reads of a
session (metadata, private attributes, errors) is ORT's own, on a session of ORT's.
"""

import os
import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import onnx
import onnxruntime
from onnxruntime.capi import onnxruntime_inference_collection as _collection
from onnxruntime.capi import onnxruntime_pybind11_state as _ort

from ort_webgpu.binding import PlanBinding, SessionBinding
from ort_webgpu.build import Built, Request, Wishes, build
from ort_webgpu.cache import Cache, matching
from ort_webgpu.explain import Explanation, Row
from ort_webgpu.intake import Intake
from ort_webgpu.options import copy_options, plain_values, with_plain_values
from ort_webgpu.placement import Offload
from ort_webgpu.plan import Plan
from ort_webgpu.profiling import PROVIDER, merged_profile
from ort_webgpu.trace import Observer
from ort_webgpu.values import DeviceValue, Held

__all__ = ["WebGPUSession"]

_RECORD = "session.record_ep_graph_assignment_info"
# Bound once: a session that offloads nothing may cost no more than ORT's own
_run_plain = onnxruntime.InferenceSession.run


class WebGPUSession(onnxruntime.InferenceSession):
    """An `onnxruntime.InferenceSession` that runs attention nodes on a WebGPU device.

    Args:
        path_or_bytes: the model: a path, its bytes, or an onnx.ModelProto.
        sess_options, providers, provider_options: as for ORT; honoured by every part of the model
            that runs on the CPU. `providers` need not name WebGpuExecutionProvider.
        adapter: "auto" (a hardware GPU, else a software one, else the CPU), "hardware",
            "software", "none", part of an adapter's name, or an index of `ort_webgpu.devices()`.
            The environment variable ORT_WEBGPU_ADAPTER stands in for "auto".
        backend: "auto", "wgpu" (wgpu-native) or "dawn" (the package wgpudawn).
        offload: "all", "none", a list of node names or operator types, or a callable that is
            asked about each candidate (an `ort_webgpu.graph_tools.Node`).
        fallback: "cpu" runs nodes that the device cannot take on the CPU, with one warning;
            "error" raises NotOffloadedError instead.
        routes: operator type or node name to the only route that may run it, for tests and
            measurements.
        tuned: whether what `ort-webgpu tune` measured on the adapter comes before the rules.
        kwargs: ORT's own: disabled_optimizers, enable_fallback, read_config_from_model.

    Raises what ORT raises for the same model; NoAdapterError; NotOffloadedError; ValueError for
    keyword values that are not among those above.
    """

    _sess: Any
    _sess_options: Any
    _providers: list[str]
    _provider_options: dict[str, dict[str, str]]
    _plan: Plan | None
    _patch_options: dict[str, Any]

    def __init__(
        self,
        path_or_bytes: "str | bytes | os.PathLike | onnx.ModelProto",
        sess_options: Any = None,
        providers: Sequence[Any] | None = None,
        provider_options: Sequence[dict[Any, Any]] | None = None,
        *,
        adapter: str | int = "auto",
        backend: str = "auto",
        offload: Offload = "all",
        fallback: str = "cpu",
        routes: Mapping[str, str] | None = None,
        tuned: bool = True,
        **kwargs: Any,
    ) -> None:
        wishes = Wishes(adapter, backend, offload, fallback, dict(routes or {}), tuned)
        # Who constructs a session through patch_onnxruntime cannot pass ours
        self._wishes = replace(wishes, **self.__dict__.pop("_patch_options", {}))
        self._wishes.check()
        self._offload_enabled = True
        self._built = Built()
        self._plan = None
        self._arguments = {"providers": providers, "provider_options": provider_options, **kwargs}
        if isinstance(path_or_bytes, onnx.ModelProto):
            path_or_bytes = path_or_bytes.SerializeToString()
        super().__init__(path_or_bytes, sess_options, providers, provider_options, **kwargs)

    # -- making ----------------------------------------------------------------------------------

    def _create_inference_session(
        self, providers: Any, provider_options: Any, disabled_optimizers: Any = None
    ) -> None:
        self._plan = None
        providers, provider_options = _without_ours(providers, provider_options)
        self._fallback_providers = ["CPUExecutionProvider"]
        self._built = Built()
        if self._offload_enabled:
            self._built = build(
                self._request(providers, provider_options, disabled_optimizers), self._wishes
            )
        if self._built.session is None:
            try:
                super()._create_inference_session(providers, provider_options, disabled_optimizers)
            except Exception as error:
                for note in self._built.notes:
                    error.add_note(note)
                raise
            return
        _normalized(providers, provider_options)
        options = copy_options(self._sess_options)
        self._bind_session(self._built.session)
        plan = self._built.plan
        if plan is None:
            return
        self._sess_options = options
        self._provider_options = {PROVIDER: _facts(plan.gpu), **self._provider_options}
        self._providers = [PROVIDER, *self._providers]
        self._output_names = tuple(output.name for output in self._outputs_meta)
        self._intake = Intake(
            self._sess, self._inputs_meta, self._overridable_initializers, plan.gpu
        )
        self._plan = plan

    def _request(self, providers: Any, provider_options: Any, disabled: Any) -> Request:
        with warnings.catch_warnings():
            # The caller hears of an unknown provider once, where the session is made.
            warnings.simplefilter("ignore")
            names, options = _normalized(providers, provider_options)
        return Request(
            self._model_path,
            self._model_bytes,
            self._sess_options,
            names,
            options,
            frozenset(disabled or ()),
            self._read_config_from_model,
        )

    def set_providers(
        self, providers: Sequence[Any] | None = None, provider_options: Any = None
    ) -> None:
        """Make the session anew, as ORT does.

        Nodes are offloaded where `providers` is None or names WebGpuExecutionProvider, so that
        `set_providers(["CPUExecutionProvider"])` gives plain ORT.
        """
        names = [p[0] if isinstance(p, tuple) else p for p in providers or ()]
        self._offload_enabled = providers is None or PROVIDER in names
        super().set_providers(providers, provider_options)

    # -- running ---------------------------------------------------------------------------------

    def run(
        self,
        output_names: Any,
        input_feed: Any,
        run_options: Any = None,
        *,
        device_outputs: Sequence[str] = (),
        cache: Cache | None = None,
    ) -> list[Any]:
        """Compute outputs; arguments, results and errors are those of `InferenceSession.run`.

        Args:
            output_names, input_feed, run_options: as for ORT; a feed may also be a DeviceValue.
            device_outputs: outputs to return as DeviceValues, by name or pattern ("present*").
            cache: a cache of `new_cache`: it feeds the pasts and keeps the presents. Without
                `output_names`, the presents that it keeps are not returned.
        """
        plan = self._plan
        if device_outputs or cache is not None:
            resident = matching(device_outputs, [output.name for output in self._outputs_meta])
            if cache is not None:
                return self._run_cached(cache, output_names, input_feed, run_options, resident)
            return self._run_resident(output_names, input_feed, run_options, resident)
        if plan is None:
            try:
                return _run_plain(self, output_names, input_feed, run_options)
            except RuntimeError:  # what ORT raises for a value it does not know
                if not any(isinstance(value, DeviceValue) for value in input_feed.values()):
                    raise
            return self._run_resident(output_names, input_feed, run_options, frozenset())
        names, feeds = self._taken(output_names, input_feed)
        return plan.fetch(feeds, names, plan.run(feeds, names, run_options))

    def _run_resident(
        self,
        output_names: Any,
        feed: Any,
        run_options: Any,
        resident: frozenset[str],
        own: frozenset[str] = frozenset(),
    ) -> list[Any]:
        """As `run`; outputs in `resident` are DeviceValues; inputs in `own` may be overwritten."""
        plan = self._plan
        if plan is None:
            arrays = {
                name: value.numpy() if isinstance(value, DeviceValue) else value
                for name, value in feed.items()
            }
            names = output_names or [output.name for output in self._outputs_meta]
            values = _run_plain(self, list(names), arrays, run_options)
            return [
                DeviceValue.of_array(value, None) if name in resident else value
                for name, value in zip(names, values, strict=True)
            ]
        names, feeds = self._taken(output_names, feed)
        for name in own:
            feeds[name].own = True
        values = plan.run(feeds, names, run_options, resident=resident)
        return plan.fetch(feeds, names, values, resident)

    def _run_cached(
        self, cache: Cache, output_names: Any, feed: Any, run_options: Any, resident: frozenset[str]
    ) -> list[Any]:
        known = [output.name for output in self._outputs_meta]
        wanted = list(output_names) if output_names else cache.others(known)
        with cache.step(self, feed) as step:
            names = list(dict.fromkeys([*wanted, *step.presents]))
            values = self._run_resident(
                names, step.feeds, run_options, resident | step.presents, step.own
            )
            results = dict(zip(names, values, strict=True))
            step.keep(results)
        return [step.result(name, results[name], name in resident) for name in wanted]

    def new_cache(
        self, batch_size: int, capacity: int | None = None, head_size: int | None = None
    ) -> Cache:
        """An empty key/value cache for `run(..., cache=cache)`, see `ort_webgpu.cache.Cache`.

        Args:
            batch_size: rows of the batch.
            capacity: rows (tokens) to reserve; a call that needs more raises InvalidInputError.
                None: the cache grows, to twice its size when it is full. Required where the model
                takes buffers of fixed size (DecoderMaskedMultiHeadAttention).
            head_size: elements of a cache row, where the model does not tell.
        """
        gpu = self._plan.gpu if self._plan is not None else None
        return Cache(self, self._built.pairs, gpu, batch_size, capacity, head_size)

    def device_value(self, array: Any) -> DeviceValue:
        """A copy of a numeric array on this session's device, to be fed any number of times."""
        return DeviceValue.of_array(array, self._plan.gpu if self._plan is not None else None)

    def run_traced(
        self, output_names: Any, input_feed: Any, observer: Observer, run_options: Any = None
    ) -> list[Any]:
        """As `run`; `observer` is called with a `NodeCall` for each offloaded node, in order.

        Slower than `run`: all that these nodes read and give is downloaded.
        """
        plan = self._plan
        if plan is None:
            return self.run(output_names, input_feed, run_options)
        names, feeds = self._taken(output_names, input_feed)
        return plan.fetch(feeds, names, plan.run(feeds, names, run_options, observer=observer))

    def run_with_ort_values(
        self, output_names: Any, input_dict_ort_values: Any, run_options: Any = None
    ) -> list[onnxruntime.OrtValue]:
        """As `run`, with OrtValues in and out."""
        plan = self._plan
        if plan is None:
            return super().run_with_ort_values(output_names, input_dict_ort_values, run_options)
        names, feeds = self._taken(output_names, input_dict_ort_values)
        values = plan.run(feeds, names, run_options, ort_values=True)
        return plan.fetch_ort(feeds, names, values)

    def run_async(
        self,
        output_names: Any,
        input_feed: Any,
        callback: Callable[[Any, Any, str], None],
        user_data: Any,
        run_options: Any = None,
    ) -> None:
        """Compute in another thread and call `callback(results, user_data, error)` from there."""
        if self._plan is None:
            super().run_async(output_names, input_feed, callback, user_data, run_options)
            return
        self._validate_input(list(input_feed))

        def work() -> None:
            try:
                results, error = self.run(output_names, input_feed, run_options), ""
            except Exception as failure:
                results, error = [], str(failure)
            callback(results, user_data, error)

        threading.Thread(target=work, name="ort-webgpu run_async", daemon=True).start()

    def io_binding(self) -> onnxruntime.IOBinding:
        """An IOBinding of this session."""
        return SessionBinding(self) if self._plan is None else PlanBinding(self)

    def run_with_iobinding(self, iobinding: Any, run_options: Any = None) -> None:
        """Compute what is bound; `iobinding` must come from this session's `io_binding`."""
        if self._plan is None:
            super().run_with_iobinding(iobinding, run_options)
            return
        if iobinding._session is not self._sess:
            raise ValueError("IOBinding must be used with the session that created it.")
        if not isinstance(iobinding, PlanBinding):
            raise NotImplementedError(
                "this session runs parts of the model on WebGPU and cannot read back what"
                " onnxruntime.IOBinding(session) has bound; use session.io_binding(), or call"
                " ort_webgpu.patch_onnxruntime() first"
            )
        iobinding.run(self, run_options)

    def _taken(self, output_names: Any, feed: Any) -> tuple[tuple[str, ...], dict[str, Held]]:
        names = tuple(output_names) if output_names else self._output_names
        if not self._intake.required <= feed.keys():
            self._validate_input(list(feed))
        return names, self._intake.take(names, feed, self._output_names)

    def bytes_moved(self) -> int:
        """Bytes moved to and from this session's device by all sessions on it, since it was opened.

        0 where nothing is offloaded.
        """
        if self._plan is None:
            return 0
        counters = self._plan.gpu.counters
        return counters.bytes_up + counters.bytes_down

    # -- reports ---------------------------------------------------------------------------------

    def explain(self) -> Explanation:
        """Where each attention node runs, by which route, and why; routes are of the last run."""
        plan = self._plan
        rows: list[Row] = plan.rows() if plan is not None else []
        adapter = None
        if plan is not None:
            info = plan.gpu.info
            adapter = f"{info.name} ({info.backend}, {info.api}, {info.kind})"
        notes = self._built.notes
        if not self._offload_enabled:
            notes = (*notes, "set_providers() without WebGpuExecutionProvider: all on the CPU")
        order = self._built.order
        rows = sorted([*rows, *self._built.rows], key=lambda row: order.get(row.node, len(order)))
        return Explanation(rows, adapter, notes)

    def get_provider_graph_assignment_info(self) -> Sequence[Any]:
        """The nodes of each provider: objects with `ep_name` and `get_nodes()`, as ORT's."""
        plan = self._plan
        if plan is None:
            return super().get_provider_graph_assignment_info()
        self._sess.get_provider_graph_assignment_info()  # ORT's error where it was not asked for
        return plan.assignment()

    def end_profiling(self) -> str:
        """End profiling; returns the path of one file with the events of all parts."""
        plan = self._plan
        if plan is None or plan.events is None:
            return super().end_profiling()
        return merged_profile(plan.sessions, plan.events, self._sess_options.profile_file_prefix)

    # -- copies ----------------------------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        others = {k: v for k, v in self.__dict__.items() if k not in _OWN}
        return {
            "model": self._model_path if self._model_bytes is None else self._model_bytes,
            "options": plain_values(self._sess_options_initial),
            "arguments": self._arguments,
            "wishes": self._wishes,
            "offload_enabled": self._offload_enabled,
            "enable_fallback": self._enable_fallback,
            "attributes": others,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        wishes: Wishes = state["wishes"]
        self.__dict__.pop("_patch_options", None)
        WebGPUSession.__init__(
            self,
            state["model"],
            with_plain_values(state["options"]),
            adapter=wishes.adapter,
            backend=wishes.backend,
            offload=wishes.offload if state["offload_enabled"] else "none",
            fallback=wishes.fallback,
            routes=wishes.routes,
            tuned=wishes.tuned,
            **state["arguments"],
        )
        self._enable_fallback = state["enable_fallback"]
        self._wishes = wishes
        self.__dict__.update(state["attributes"])

    def __deepcopy__(self, memo: dict[int, Any]) -> "WebGPUSession":
        copied = self.__class__.__new__(self.__class__)
        copied._patch_options = dict(vars(self._wishes))  # a subclass may only call __init__
        copied.__setstate__(self.__getstate__())
        return copied


#: Attributes that `__init__` sets; what else an instance has was set by others.
_OWN = frozenset(
    {
        "_arguments",
        "_built",
        "_captured_graph_bindings",
        "_enable_fallback",
        "_fallback_providers",
        "_from_model_package",
        "_input_epdevices",
        "_input_meminfos",
        "_inputs_meta",
        "_intake",
        "_model_bytes",
        "_model_meta",
        "_model_path",
        "_offload_enabled",
        "_output_meminfos",
        "_output_names",
        "_outputs_meta",
        "_overridable_initializers",
        "_plan",
        "_profiling_start_time_ns",
        "_provider_options",
        "_providers",
        "_read_config_from_model",
        "_sess",
        "_sess_options",
        "_sess_options_initial",
        "_wishes",
    }
)


def _normalized(providers: Any, options: Any) -> tuple[list[str], list[dict[str, str]]]:
    """ORT's own reading of its arguments, with its warnings and ValueErrors."""
    available = _ort.get_available_providers()
    return _collection.check_and_normalize_provider_args(providers, options, available)


def _without_ours(providers: Any, options: Any) -> tuple[Any, Any]:
    """The arguments without WebGpuExecutionProvider, which ORT's CPU package does not know."""
    if not isinstance(providers, list | tuple):
        return providers, options
    kept = [(p[0] if isinstance(p, tuple) and p else p) != PROVIDER for p in providers]
    if all(kept):
        return providers, options
    if isinstance(options, list | tuple) and len(options) == len(providers):
        options = [o for o, keep in zip(options, kept, strict=True) if keep]
    return [p for p, keep in zip(providers, kept, strict=True) if keep], options


def _facts(gpu: Any) -> dict[str, str]:
    info = gpu.info
    return {"adapter": info.name, "backend": info.backend, "api": info.api, "kind": info.kind}
