"""Valid random inputs for whole models, which know attention: masks, caches, lengths, token ids.

Letters: B batch, S new tokens of a call, P rows of the past, T = P + S. Rows of a batch are right
padded and of different lengths, as the decoders of onnxruntime-genai take them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx

from ort_webgpu.conformance.case import Array
from ort_webgpu.conformance.roles import Cache, Roles, find_roles
from ort_webgpu.errors import InvalidInputError
from ort_webgpu.graph_tools import ModelFile

__all__ = ["InputOptions", "Inputs"]

Feeds = dict[str, Array]
_ROOM = 24  # free rows of a cache with a fixed number of rows


@dataclass(frozen=True)
class InputOptions:
    """What generated inputs look like.

    `length` is S, `past` is P; `dims` fixes symbolic dimensions by name; `ranges` gives (low,
    high) for the values of single inputs; `ragged` makes the rows of a batch unequal.
    """

    batch: int = 2
    length: int = 12
    past: int = 0
    seed: int = 0
    ragged: bool = True
    dims: Mapping[str, int] = field(default_factory=dict)
    ranges: Mapping[str, tuple[float, float]] = field(default_factory=dict)


class Inputs:
    """Makes the feeds of a model's first call, and those of each next one from what came out."""

    def __init__(self, model: ModelFile, options: InputOptions | None = None):
        self.model = model
        self.options = options or InputOptions()
        self.roles: Roles = find_roles(model)
        self._rng = np.random.default_rng(self.options.seed)

    def first(self, given: Mapping[str, Array] | None = None) -> Feeds:
        """Feeds of a first call; inputs in `given` are taken as they are, and the rest fits them.

        Raises InvalidInputError for a name that is no input, or a shape that cannot be known.
        """
        given = dict(given or {})
        self._check_names(given)
        call = self._call(given)
        feeds = dict(given)
        for name in self.model.inputs:
            if name not in feeds:
                feeds[name] = self._make(name, call)
        return {name: feeds[name] for name in (*self.model.inputs, *self._stored(given))}

    def next(
        self, feeds: Mapping[str, Array], outputs: Mapping[str, Array], given: Mapping[str, Array]
    ) -> Feeds:
        """Feeds of the call after the one that gave `outputs`: one token more, greedily chosen.

        Inputs in `given` come instead of what would be made. Raises InvalidInputError where the
        model has no cache that could be carried on.
        """
        self._check_names(given)
        carried = {
            name: outputs[cache.present]
            for name, cache in self._caches().items()
            if cache.present is not None and cache.present in outputs
        }
        if not carried and not given:
            raise InvalidInputError(
                "more than one step needs a decoder whose past inputs are wired to attention"
                " nodes with present outputs; this model has none. Use one step"
            )
        return {**feeds, **carried, **self._advanced(feeds, outputs), **given}

    @property
    def names(self) -> tuple[str, ...]:
        """The inputs that a caller may give."""
        return (*self.model.inputs, *self.model.overridable)

    @property
    def half(self) -> bool:
        """Whether the model computes in float16 somewhere, whatever the types of its outputs."""
        kinds = {weight.elem_type for weight in self.model.weights.values()}
        return onnx.TensorProto.FLOAT16 in kinds

    def care(self, feeds: Mapping[str, Array], name: str, value: Array) -> Array | None:
        """Where output `name` means something, as a mask that broadcasts to it; None: everywhere.

        Rows of padding are left out, of [B, S, ...] outputs and of caches [B, heads, rows, width].
        """
        valid = self._valid(feeds)
        if valid is None or value.ndim < 3 or len(value) != len(valid):
            return None
        cache = next((c for c in self._caches().values() if c.present == name), None)
        if cache is not None:
            return (np.arange(value.shape[2]) < valid[:, None])[:, None, :, None]
        ids = self.roles.of("ids")
        mask = self.roles.of("attention_mask")
        if ids is None or mask is None or value.shape[1] != feeds[ids].shape[1]:
            return None
        if np.shape(feeds[ids]) != np.shape(feeds[mask]):
            return None  # new tokens after a past are all valid
        rows = np.arange(value.shape[1]) < valid[:, None]
        return rows.reshape(*rows.shape, *[1] * (value.ndim - 2))

    def _valid(self, feeds: Mapping[str, Array]) -> Array | None:
        """Valid keys of each row after the call [B], None where the model does not say."""
        mask, steps = self.roles.of("attention_mask"), self.roles.of("past_sequence_length")
        if mask is not None and feeds[mask].ndim == 2:
            return feeds[mask].sum(1).astype(np.int64)
        lengths, ids = self.roles.of("seqlens_k"), self.roles.of("ids")
        if lengths is not None:
            return feeds[lengths].reshape(-1).astype(np.int64) + 1
        if steps is not None and ids is not None:
            return np.full(len(feeds[ids]), int(np.reshape(feeds[steps], -1)[0]) + 1)
        return None

    # -- what a call is like ---------------------------------------------------------------------

    def _check_names(self, given: Mapping[str, Array]) -> None:
        unknown = sorted(given.keys() - set(self.names))
        if unknown:
            raise InvalidInputError(
                f"{', '.join(map(repr, unknown))} given, but the model's inputs are"
                f" {', '.join(map(repr, self.names))}"
            )

    def _stored(self, given: Mapping[str, Array]) -> list[str]:
        return [name for name in self.model.overridable if name in given]

    def _call(self, given: Mapping[str, Array]) -> "_Call":
        options = self.options
        dims = dict(options.dims)
        for name, array in given.items():
            for dim, size in zip(self._dims(name), np.shape(array), strict=False):
                if isinstance(dim, str):
                    dims.setdefault(dim, size)
        ids = self.roles.of("ids") or ""
        shape = list(np.shape(given[ids])) if ids in given else self._dims(ids)
        batch, new = options.batch, options.length
        if shape:
            batch = _size(shape[0], dims, batch)
            new = _size(shape[1], dims, new) if len(shape) > 1 else new
        past = options.past
        if self.roles.of("past_sequence_length") and not past:
            past = max(1, options.length - 1)  # a step of a decoder that has no prompt of its own
        unequal = options.ragged and not any(c.window for c in self.roles.caches.values())
        lengths = self._lengths(batch, new if past == 0 else past, unequal)
        mask = given.get(self.roles.of("attention_mask") or "")
        if mask is not None and mask.ndim == 2:
            valid = mask.sum(1).astype(np.int64)
            past = max(mask.shape[1] - new, 0)
        else:
            valid = lengths if past == 0 else lengths + new
        return _Call(batch, new, past, valid, dims, options.length)

    def _lengths(self, batch: int, longest: int, unequal: bool) -> Array:
        lengths = np.full(batch, longest, np.int64)
        if unequal and batch > 1:
            lengths[1:] = self._rng.integers(max(1, longest // 2), longest + 1, batch - 1)
        return lengths

    def _dims(self, name: str) -> list[Any]:
        kind = self.model.value_types.get(name)
        if kind is None:
            return []
        return [dim.dim_param or dim.dim_value for dim in kind.tensor_type.shape.dim]

    # -- making ----------------------------------------------------------------------------------

    def _make(self, name: str, call: "_Call") -> Array:
        kind = self.model.value_types[name].tensor_type
        dtype = onnx.helper.tensor_dtype_to_np_dtype(kind.elem_type)
        role = self.roles.role[name]
        if role in ("cache", "cross_cache"):
            return self._cache(name, call, dtype)
        maker = _MAKERS.get(role)
        if maker is not None and name not in self.options.ranges:
            array = np.asarray(maker(self, name, call))
            rank = len(self._dims(name))
            if role in _SCALARS and array.size == 1:
                array = array.reshape([1] * rank)
            return array.astype(dtype)
        return self._random(name, self._shape(name, call), dtype)

    def _shape(self, name: str, call: "_Call") -> tuple[int, ...]:
        return tuple(
            call.size(dim, axis, role=self.roles.role[name])
            for axis, dim in enumerate(self._dims(name))
        )

    def _random(self, name: str, shape: Sequence[int], dtype: np.dtype) -> Array:
        if name in self.options.ranges:
            low, high = self.options.ranges[name]
            return self._rng.uniform(low, high, shape).astype(dtype)
        if dtype.kind == "f":
            return self._rng.standard_normal(shape).astype(dtype)
        if dtype.kind == "b":
            return np.ones(shape, bool)
        if dtype.kind in "iu":
            bound = self.roles.bounds.get(name, 2 if dtype.itemsize > 1 else 120)
            return self._rng.integers(0, bound, shape).astype(dtype)
        raise InvalidInputError(
            f"input {name!r} has element type {dtype}, which cannot be made up; give it in an npz"
        )

    def _cache(self, name: str, call: "_Call", dtype: np.dtype) -> Array:
        dims = self._dims(name)
        cache = self._caches().get(name)
        if len(dims) != 4:
            return self._random(name, self._shape(name, call), dtype)
        rows, width = dims[2], dims[3]
        if isinstance(rows, str) or rows == 0:
            rows = self._rows(str(rows), cache, call)
        if isinstance(width, str) or width == 0:
            width = self._width(name, str(width), cache, call)
        heads = call.size(dims[1], 1)
        array = self._random(name, (call.batch, heads, rows, width), dtype)
        return array if call.past else np.zeros_like(array)

    def _rows(self, dim: str, cache: Cache | None, call: "_Call") -> int:
        if dim in call.dims:
            return call.dims[dim]
        if cache is not None and cache.window is not None:
            return cache.window
        if cache is not None and cache.node.op_type == "DecoderMaskedMultiHeadAttention":
            return call.past + call.new + _ROOM
        return call.past if cache is not None or "past" in dim else call.size(dim, 2)

    def _width(self, name: str, dim: str, cache: Cache | None, call: "_Call") -> int:
        size = call.dims.get(dim) or (cache.head_size if cache is not None else None)
        if size is None:
            raise InvalidInputError(
                f"the head size of input {name!r} (dimension {dim!r}) cannot be read off the"
                f" model; set it, as in --dim {dim}=64"
            )
        return (size + 1) // 2 if cache is not None and cache.bits == 4 else size

    def _caches(self) -> Mapping[str, Cache]:
        return self.roles.caches

    # -- going on --------------------------------------------------------------------------------

    def _advanced(self, feeds: Mapping[str, Array], outputs: Mapping[str, Array]) -> Feeds:
        roles, following = self.roles, Feeds()
        ids, mask = roles.of("ids"), roles.of("attention_mask")
        valid = None
        if mask is not None and feeds[mask].ndim == 2:
            valid = feeds[mask].sum(1).astype(np.int64)
            rows = np.arange(feeds[mask].shape[1] + 1)
            following[mask] = (rows < valid[:, None] + 1).astype(feeds[mask].dtype)
        for role in ("seqlens_k", "total_sequence_length", "past_sequence_length"):
            name = roles.of(role)
            if name is not None:
                following[name] = feeds[name] + np.ones((), feeds[name].dtype)
        if ids is not None:
            last = feeds[ids].shape[1] - 1
            prompt = mask is not None and feeds[mask].shape[1] == last + 1
            at = valid - 1 if prompt and valid is not None else np.full(len(feeds[ids]), last)
            following[ids] = self._tokens(outputs, at).astype(feeds[ids].dtype)
        positions = roles.of("position_ids")
        if positions is not None and valid is not None:
            following[positions] = valid[:, None].astype(feeds[positions].dtype)
        return following

    def _tokens(self, outputs: Mapping[str, Array], at: Array) -> Array:
        """The greedy token of each row [B, 1], from the logits [B, S, V] at row `at`."""
        logits = outputs.get(self.roles.logits or "")
        if logits is None or logits.ndim != 3:
            bound = self.roles.bounds.get(self.roles.of("ids") or "", 2)
            return self._rng.integers(0, bound, (len(at), 1))
        at = np.minimum(at, logits.shape[1] - 1)
        return logits[np.arange(len(at)), at].argmax(-1)[:, None]


@dataclass(frozen=True)
class _Call:
    """One call: B, S, P, the valid lengths [B] at its end, and known symbolic dims.

    `length` is that of an encoder's output, which a decoder's step attends to.
    """

    batch: int
    new: int
    past: int
    valid: Array
    dims: Mapping[str, int]
    length: int

    @property
    def total(self) -> int:
        """T."""
        return self.past + self.new

    def size(self, dim: Any, axis: int, role: str = "other") -> int:
        """A dimension of an input, by what its name says, else by its axis."""
        if isinstance(dim, int) and dim > 0:
            return dim
        name = str(dim).lower()
        known = self.dims.get(str(dim))
        if known is not None:
            return known
        for part, size in (
            ("batch", self.batch),
            ("beam", 1),
            ("encode", self.length),
            ("total", self.total),
            ("past", self.past),
            ("max", self.total + _ROOM),
            ("seq", self.new),
            ("len", self.new),
        ):
            if part in name:
                return self.total if part in ("seq", "len") and role == "attention_mask" else size
        return (self.batch, self.total if role == "attention_mask" else self.new)[min(axis, 1)]


def _size(dim: Any, dims: Mapping[str, int], otherwise: int) -> int:
    if isinstance(dim, int) and dim > 0:
        return dim
    return dims.get(str(dim), otherwise)


def _ids(inputs: Inputs, name: str, call: _Call) -> Array:
    bound = inputs.roles.bounds.get(name, 100)
    return inputs._rng.integers(min(1, bound - 1), bound, inputs._shape(name, call))


def _mask(inputs: Inputs, name: str, call: _Call) -> Array:
    shape = inputs._shape(name, call)
    if len(shape) != 2:
        return np.ones(shape, np.int64)
    return np.arange(shape[1]) < call.valid[:, None]


def _encoder_mask(inputs: Inputs, name: str, call: _Call) -> Array:
    shape = inputs._shape(name, call)
    lengths = inputs._lengths(shape[0], shape[-1], inputs.options.ragged)
    return np.broadcast_to(
        np.arange(shape[-1]) < lengths.reshape(-1, *[1] * (len(shape) - 1)), shape
    )


def _positions(inputs: Inputs, name: str, call: _Call) -> Array:
    start = call.valid - call.new if call.past else np.zeros_like(call.valid)
    return start[:, None] + np.arange(call.new)


def _cache_indirection(inputs: Inputs, name: str, call: _Call) -> Array:
    return np.zeros(inputs._shape(name, call), np.int64)


def _angles(inputs: Inputs, name: str, call: _Call) -> Array:
    rows, half = inputs._shape(name, call)
    angles = np.arange(max(rows, call.total))[:, None] / 10000 ** (np.arange(half) / half)
    return np.cos(angles) if inputs.roles.role[name] == "cos_cache" else np.sin(angles)


def _token_offset(inputs: Inputs, name: str, call: _Call) -> Array:
    """[B, S]: places of the valid tokens of the padded batch, then those of the padding."""
    valid = (np.arange(call.new) < call.valid[:, None]).reshape(-1)
    return np.concatenate([np.flatnonzero(valid), np.flatnonzero(~valid)]).reshape(call.batch, -1)


_SCALARS = frozenset({"total_sequence_length", "past_sequence_length", "beam_width"})
_MAKERS = {
    "ids": _ids,
    "attention_mask": _mask,
    "encoder_mask": _encoder_mask,
    "token_type_ids": lambda i, name, call: np.zeros(i._shape(name, call), np.int64),
    "position_ids": _positions,
    "seqlens_k": lambda i, name, call: (call.valid - 1).reshape([-1, 1][: len(i._dims(name))]),
    "total_sequence_length": lambda i, name, call: call.total,
    "query_seqlens": lambda i, name, call: np.minimum(call.valid, call.new),
    "past_sequence_length": lambda i, name, call: call.past,
    "beam_width": lambda i, name, call: 1,
    "cache_indirection": _cache_indirection,
    "cos_cache": _angles,
    "sin_cache": _angles,
    "k_scale": lambda i, name, call: i._rng.uniform(0.01, 0.05, i._shape(name, call)),
    "v_scale": lambda i, name, call: i._rng.uniform(0.01, 0.05, i._shape(name, call)),
    "token_offset": _token_offset,
    "cumulative_sequence_length": lambda i, name, call: np.cumsum([0, *call.valid]),
    "sequence_token_count": lambda i, name, call: call.valid,
}
"""Role to maker; the result is cast to the input's type."""
