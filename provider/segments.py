"""Segments: parts of a model, each an ORT session on the CPU, that share the model's weights."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import onnx
import onnxruntime
from onnxruntime.capi import onnxruntime_pybind11_state as _ort

from ort_webgpu.graph_tools import FOLDER_OPTION, ModelFile, SubModel, Weight, extract
from ort_webgpu.graph_tools.reference import replace_unsupported
from ort_webgpu.options import config_entry, copy_options

__all__ = ["Segment", "SegmentFactory"]

_STOP_SPINNING = "session.force_spinning_stop"


@dataclass(frozen=True)
class Segment:
    """An ORT session over some nodes; `inputs` must be fed, `overridable` may be."""

    session: Any
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    overridable: tuple[str, ...]
    kinds: dict[str, str]


@dataclass
class SegmentFactory:
    """Makes C sessions over cuts of `model`, all with what the caller asked ORT for.

    `providers`, `provider_options` and `disabled_optimizers` are as ORT's own constructor passes
    them on. Weights are handed over in memory, one OrtValue each for all sessions.
    """

    model: ModelFile
    options: Any
    providers: Sequence[str] = ()
    provider_options: Sequence[Mapping[str, str]] = ()
    disabled_optimizers: frozenset[str] = frozenset()
    values: dict[str, Any] = field(default_factory=dict)

    def segment(
        self,
        nodes: Sequence[int],
        outputs: Sequence[str],
        types: Mapping[str, onnx.TypeProto],
        expanded: Iterable[str] = (),
        label: str = "",
    ) -> Segment:
        """A session that runs `nodes` and hands out `outputs`.

        `types` are those of values made outside; nodes of the operators `expanded` are replaced by
        their standard-operator forms; `label` tells profile files apart.
        """
        sub = extract(self.model, nodes, outputs, types)
        session = self.session(sub, expanded, label)
        kinds = {arg.name: arg.type for arg in session.outputs_meta}
        return Segment(session, sub.inputs, sub.outputs, sub.overridable, kinds)

    def session(self, sub: SubModel, expanded: Iterable[str] = (), label: str = "") -> Any:
        """An initialized `C.InferenceSession` of `sub`."""
        expanded = frozenset(expanded)
        proto = replace_unsupported(sub.proto, expanded) if expanded else sub.proto
        options = self.quiet_options(label)
        if sub.folder is not None:
            options.add_session_config_entry(FOLDER_OPTION, str(sub.folder))
        self.hand_over(options, sub.weights)
        session = _ort.InferenceSession(options, proto.SerializeToString(), False, False)
        session.initialize_session(
            list(self.providers), list(self.provider_options), set(self.disabled_optimizers)
        )
        return session

    def kinds(self, names: Sequence[str]) -> dict[str, tuple[str, list[Any]]]:
        """Type and shape, as ORT infers and writes them, of values that nodes make.

        The session is loaded only: no kernel is looked for and no weight is read.
        """
        sub = extract(self.model, range(len(self.model.nodes)), names, {})
        options = copy_options(self.options)
        options.enable_profiling = False
        session = _ort.InferenceSession(options, sub.proto.SerializeToString(), False, False)
        return {arg.name: (arg.type, list(arg.shape)) for arg in session.outputs_meta}

    def quiet_options(self, label: str) -> Any:
        """The caller's options for a session of many in one process."""
        options = copy_options(self.options)
        options.profile_file_prefix += label
        # Threads of the segment that ran last would spin while the next one, or a software
        # adapter, needs the cores.
        if config_entry(options, _STOP_SPINNING) is None:
            options.add_session_config_entry(_STOP_SPINNING, "1")
        return options

    def hand_over(self, options: Any, weights: Iterable[Weight]) -> None:
        """Give `weights` to the session that will be made with `options`."""
        weights = list(weights)
        for weight in weights:
            if weight.name not in self.values:
                array = weight.array()
                # A session keeps no reference to the memory that it is handed.
                self.values[weight.name] = (onnxruntime.OrtValue.ortvalue_from_numpy(array), array)
        if weights:
            names = [weight.name for weight in weights]
            options.add_external_initializers(names, [self.values[name][0] for name in names])
