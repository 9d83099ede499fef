"""From one call's values to a GqaProblem: validation, the cache, operands made on the host."""

from collections.abc import Sequence

import numpy as np

from ort_webgpu.errors import InvalidInputError
from ort_webgpu.graph_tools.nodes import Node
from ort_webgpu.ops import gqa_contract as contract
from ort_webgpu.ops.attention_core import SEQ_FIELDS, AttentionProblem, sequences
from ort_webgpu.ops.gqa_cards import Cache, CardFacts
from ort_webgpu.ops.gqa_contract import Attributes, Shapes
from ort_webgpu.ops.gqa_problem import PAST, PRESENT, WORK, GqaProblem
from ort_webgpu.ops.prepare import CacheCopy, Prepare, bytes_per_row
from ort_webgpu.ops.spec import Call, Output, Room, TensorSpec, Value

__all__ = ["CallBuilder"]


class CallBuilder:
    """Validates one call and says how it is run."""

    def __init__(self, node: Node, values: Sequence[Value | None], in_place: bool):
        missing = [None] * (len(contract.INPUTS) - len(values))
        self.node, self.values = node, [*values, *missing]
        self.a = Attributes.read(node)
        self.shapes = Shapes.read(node, self.a, self.values)
        self.lengths = contract.read_lengths(node, self.a, self.shapes, self.values)
        self.in_place = in_place
        self.room = self._shared_room()
        self.source_rows = self.room.capacity if self.room else self.shapes.past_rows or 0
        self.rows = self.lengths.rows  # rows between two heads of the present
        self.inputs = {"query": contract.QUERY}
        self.arrays: dict[str, np.ndarray] = {}
        self.rotary_size = self._rotary()
        self._check_side_inputs()

    def build(self) -> Call:
        shapes = self.shapes
        if shapes.kv_len and not shapes.packed:
            self.inputs |= {"key": contract.KEY, "value": contract.VALUE}
        wants_present = self.node.has_output(1)
        if not wants_present and shapes.past_rows is not None and shapes.kv_len:
            raise InvalidInputError(
                f"{self.node}: past and new keys but no present outputs; ONNX Runtime reads out of"
                " bounds here. Request present_key and present_value"
            )
        if self.a.sliding_window_cache:
            problem = self._window_cache()
        elif shapes.kv_len == 0:
            problem = self._shared_kv(wants_present)
        else:
            problem = self._append(wants_present)
        strided = frozenset() if self.room is None else frozenset(PAST)
        outputs = self._outputs(wants_present)
        return Call(problem, self.inputs, outputs, self.arrays, strided=strided)

    def _shared_room(self) -> Room | None:
        """What both pasts allow; None where the session manages neither or rows move anyway."""
        key, value = self.values[contract.PAST_KEY], self.values[contract.PAST_VALUE]
        rooms = key.room if key else None, value.room if value else None
        if None in rooms or rooms[0] != rooms[1] or self.a.sliding_window_cache:
            return None
        return rooms[0]

    def _extends(self, rows: int) -> bool:
        """Whether the present can be written to the past's own storage."""
        room, lengths = self.room, self.lengths
        if room is None:
            return self.in_place
        own = self.in_place or bool((lengths.past >= (self.shapes.past_rows or 0)).all())
        filled = room.clean or bool((lengths.total >= rows).all()) or rows == self.shapes.past_rows
        return own and filled and room.append and rows <= room.capacity

    def _place(self, rows: int) -> None:
        """Decide where a present of `rows` goes."""
        room = self.room
        if room is not None and room.fixed and rows > room.capacity:
            raise InvalidInputError(
                f"{self.node}: the cache has room for {room.capacity} rows and this call needs"
                f" {rows}. Make it with a larger capacity=, or without one to let it grow"
            )
        self.in_place = self._extends(rows)
        if room is not None:
            self.rows = room.capacity if self.in_place else room.spacious(rows)

    # -- the three ways to a cache -------------------------------------------------------------

    def _append(self, wants_present: bool) -> GqaProblem:
        """New rows behind the past, in the present."""
        shapes, lengths = self.shapes, self.lengths
        rows = lengths.rows
        if self.room is None and self.in_place and shapes.past_rows != rows:
            raise InvalidInputError(
                f"{self.node}: past and present are one buffer of {shapes.past_rows} rows, the"
                f" present needs {rows}. Use a larger buffer"
            )
        self._place(rows)
        rows = self.rows
        k_row = np.arange(shapes.batch) * self.a.kv_num_heads * rows
        self.arrays["seq"] = sequences(
            shapes.batch,
            q_row=np.arange(shapes.batch) * shapes.q_len,
            q_valid=lengths.new,
            k_row=k_row,
            past=lengths.past,
            total=lengths.total,
            bias_batch=self._bias_batch(),
            write=lengths.past,
            keep=lengths.past,
            new=lengths.past,
            new_count=lengths.new,
        )
        before = None
        if not self.in_place and bool((lengths.new < rows).any()):
            before = self._copy(PAST if lengths.past.any() else None, self.source_rows, rows)
        return GqaProblem(
            self._core(rows, int(lengths.total.max())),
            self._prepare(rows, PRESENT),
            PRESENT,
            self._card(),
            before,
            present_bytes=0 if wants_present else self._cache_bytes(rows),
            in_place=self.in_place,
        )

    def _shared_kv(self, wants_present: bool) -> GqaProblem:
        """No new rows: the past is attended as it is, and copied where a present is wanted."""
        shapes, lengths = self.shapes, self.lengths
        assert shapes.past_rows is not None
        past_rows = self.source_rows
        if wants_present:
            self._place(lengths.rows)
        self.inputs |= {"past_key": contract.PAST_KEY, "past_value": contract.PAST_VALUE}
        self.arrays["seq"] = sequences(
            shapes.batch,
            q_row=np.arange(shapes.batch) * shapes.q_len,
            q_valid=shapes.q_len,
            k_row=np.arange(shapes.batch) * self.a.kv_num_heads * past_rows,
            past=0 if lengths.first_prompt else lengths.total - shapes.q_len,
            total=lengths.total,
            bias_batch=self._bias_batch(),
            keep=lengths.total,
        )
        before = None
        keys = PAST
        if self.in_place:
            keys = PRESENT
            del self.inputs["past_key"], self.inputs["past_value"]
        elif wants_present:
            before = self._copy(PAST, past_rows, self.rows)
        return GqaProblem(
            self._core(past_rows, int(lengths.total.max())),
            self._prepare(past_rows, keys),
            keys,
            self._card(),
            before,
            in_place=self.in_place,
        )

    def _window_cache(self) -> GqaProblem:
        """A cache of C rows that drops its oldest ones (ort-semantics.md 2.10)."""
        shapes, lengths = self.shapes, self.lengths
        capacity = lengths.rows
        old = _kept(lengths.past, capacity, self.a.window)
        kept = _kept(lengths.total, capacity, self.a.window)
        dropped = old + (lengths.total - lengths.past) - kept
        first = lengths.past - old  # absolute position of row 0 before the step
        if shapes.q_len == 1 and not (self.in_place and dropped.any()):
            # the queries' keys all survive the step: append as usual, behind the shifted past
            shift = np.minimum(dropped, old)
            self.arrays["seq"] = self._window_seq(
                capacity, past=kept - 1, total=kept, key0=lengths.total - kept, write=kept - 1
            )
            _set(self.arrays["seq"], keep=old - shift, shift=shift, new=kept - 1, new_count=1)
            before = None
            if not self.in_place:
                before = self._copy(PAST if old.any() else None, capacity, capacity)
            return GqaProblem(
                self._core(capacity, int(kept.max())),
                self._prepare(capacity, PRESENT),
                PRESENT,
                self._card(),
                before,
                in_place=self.in_place,
                windowed=True,
            )
        rows = int(old.max()) + shapes.q_len
        self.arrays["seq"] = self._window_seq(
            rows, past=old, total=lengths.total - first, key0=first, write=old
        )
        _set(self.arrays["seq"], keep=old, new=old, new_count=lengths.new)
        self.arrays["seq_after"] = sequences(shapes.batch, keep=kept, shift=dropped)
        source = PRESENT if self.in_place else PAST
        before = self._copy(source if old.any() else None, capacity, rows, WORK)
        after = CacheCopy(
            shapes.batch,
            self.a.kv_num_heads,
            self._row_bytes,
            WORK,
            rows,
            PRESENT,
            capacity,
            "seq_after",
        )
        return GqaProblem(
            self._core(rows, int((lengths.total - first).max())),
            self._prepare(rows, WORK),
            WORK,
            self._card(),
            before,
            after,
            work_bytes=self._cache_bytes(rows),
            in_place=self.in_place,
            windowed=True,
        )

    def _window_seq(self, rows: int, **fields: np.ndarray) -> np.ndarray:
        batch = self.shapes.batch
        return sequences(
            batch,
            q_row=np.arange(batch) * self.shapes.q_len,
            q_valid=self.lengths.new,
            k_row=np.arange(batch) * self.a.kv_num_heads * rows,
            bias_batch=self._bias_batch(),
            **fields,
        )

    # -- pieces --------------------------------------------------------------------------------

    @property
    def _row_bytes(self) -> int:
        return bytes_per_row(self.shapes.kv_dtype, self.shapes.head_size)

    def _cache_bytes(self, rows: int) -> int:
        return self.shapes.batch * self.a.kv_num_heads * rows * self._row_bytes

    def _copy(
        self,
        source: tuple[str, str] | None,
        source_rows: int,
        rows: int,
        target: tuple[str, str] = PRESENT,
    ) -> CacheCopy:
        if source == PAST:
            self.inputs |= {"past_key": contract.PAST_KEY, "past_value": contract.PAST_VALUE}
        return CacheCopy(
            self.shapes.batch,
            self.a.kv_num_heads,
            self._row_bytes,
            source,
            source_rows,
            target,
            rows,
        )

    def _prepare(self, kv_head_rows: int, target: tuple[str, str]) -> Prepare:
        shapes, a = self.shapes, self.a
        norm = self.values[contract.Q_NORM] is not None
        rotary = ("interleaved" if a.interleaved else "half") if a.do_rotary else ""
        self._params(norm)
        return Prepare(
            shapes.batch,
            shapes.q_len,
            a.num_heads,
            a.kv_num_heads,
            shapes.head_size,
            shapes.dtype,
            shapes.kv_dtype,
            kv_head_rows,
            contract.score_scale(a, shapes.head_size),
            packed=shapes.packed,
            new_kv=shapes.kv_len > 0,
            norm=norm,
            rotary=rotary,
            rotary_size=self.rotary_size if rotary else 0,
            positions="positions" in self.arrays,
            quantized=a.storage is not None,
            q_epsilon=a.q_epsilon,
            k_epsilon=a.k_epsilon,
            k_out=target[0],
            v_out=target[1],
        )

    def _core(self, kv_head_rows: int, max_keys: int) -> AttentionProblem:
        shapes, a = self.shapes, self.a
        bias, sink = self.values[contract.BIAS], self.values[contract.SINK]
        return AttentionProblem(
            batch=shapes.batch,
            q_len=shapes.q_len,
            num_heads=a.num_heads,
            kv_heads=a.kv_num_heads,
            head_size=shapes.head_size,
            v_head_size=shapes.head_size,
            kv_dtype=shapes.kv_dtype,
            out_dtype=shapes.dtype,
            kv_head_rows=kv_head_rows,
            # Decode steps are one problem for 64 tokens: routes count keys in whole sixty-fours
            max_keys=max_keys | 63 if shapes.q_len == 1 else max_keys,
            causal=a.causal,
            window=a.window,
            softcap=a.softcap,
            bias_dtype=bias.dtype if bias else "",
            bias_heads=bias.shape[1] if bias else 1,
            bias_width=bias.shape[3] if bias else 0,
            sink=sink.dtype if sink else "zero" if a.smooth_softmax else "",
            v_scaled=a.storage is not None,
            qk=a.qk_output,
            qk_width=self.lengths.scalar if a.qk_output else 0,
            scale=contract.score_scale(a, shapes.head_size),
            half_queries=shapes.dtype == "float16" and a.storage is None,
            appended=shapes.kv_len > 0,
        )

    def _card(self) -> CardFacts:
        """What names this call on the kernel card."""
        shapes, a, values = self.shapes, self.a, self.values
        cache: Cache = "copy"
        if a.sliding_window_cache:
            cache = "shift"
        elif shapes.past_rows is None:
            cache = "direct"
        elif self.in_place and shapes.kv_len:
            cache = "append"
        elif self.lengths.rows > shapes.past_rows:
            cache = "merge"
        features = {
            "rotary": a.do_rotary,
            "softcap": a.softcap > 0,
            "sink": values[contract.SINK] is not None or a.smooth_softmax,
            "bias": values[contract.BIAS] is not None,
            "norm": values[contract.Q_NORM] is not None,
            "bidirectional": not a.causal,
        }
        quantized = a.storage is not None
        off_card = {
            "packed QKV": shapes.packed,
            "position_ids": values[contract.POSITION_IDS] is not None,
            "interleaved rotary": a.do_rotary and a.interleaved,
            "output_qk": a.qk_output > 0,
            "query_seqlens": values[contract.QUERY_SEQLENS] is not None,
            "a cache of the other float type": not quantized and shapes.kv_dtype != shapes.dtype,
            "a quantized cache with float16": quantized and shapes.dtype == "float16",
            "int4 beyond the first prompt": a.storage == "int4" and not self.lengths.first_prompt,
            "bidirectional attention over a past": cache != "direct" and not a.causal,
        }
        return CardFacts(
            cache,
            shapes.q_len == 1,
            shapes.kv_dtype,
            frozenset(word for word, on in features.items() if on),
            frozenset(word for word, on in off_card.items() if on),
        )

    def _outputs(self, wants_present: bool) -> dict[int, Output]:
        shapes, a = self.shapes, self.a
        hidden = a.num_heads * shapes.head_size
        outputs = {
            0: Output("output", TensorSpec(shapes.dtype, (shapes.batch, shapes.q_len, hidden)))
        }
        if wants_present:
            past = self.values[contract.PAST_KEY]
            dtype = past.dtype if past else shapes.kv_dtype
            width = shapes.head_size // (2 if a.storage == "int4" else 1)
            spec = TensorSpec(dtype, (shapes.batch, a.kv_num_heads, self.lengths.rows, width))
            aliases = (contract.PAST_KEY, contract.PAST_VALUE) if past else (None, None)
            rows = self.rows if self.rows != self.lengths.rows else None
            outputs[1] = Output(PRESENT[0], spec, aliases[0], self.in_place, rows)
            outputs[2] = Output(PRESENT[1], spec, aliases[1], self.in_place, rows)
        if a.qk_output:
            shape = (shapes.batch, a.num_heads, shapes.q_len, self.lengths.scalar)
            outputs[3] = Output("output_qk", TensorSpec(shapes.dtype, shape))
        return outputs

    def _bias_batch(self) -> np.ndarray | int:
        bias = self.values[contract.BIAS]
        return np.arange(self.shapes.batch) if bias and bias.shape[0] > 1 else 0

    # -- side inputs ---------------------------------------------------------------------------

    def _refuse(self, index: int, allowed: str) -> None:
        value = self.values[index]
        assert value is not None
        raise InvalidInputError(
            f"{self.node}: input {contract.INPUTS[index]} is {value.dtype} {value.shape};"
            f" expected {allowed}"
        )

    def _check_side_inputs(self) -> None:
        shapes, a = self.shapes, self.a
        scalar, dtype = self.lengths.scalar, shapes.dtype
        bias, sink = self.values[contract.BIAS], self.values[contract.SINK]
        if bias:
            allowed = ((1, shapes.batch), (1, a.num_heads), (shapes.q_len,), (scalar,))
            if (
                bias.dtype != dtype
                or len(bias.shape) != 4
                or not all(n in c for n, c in zip(bias.shape, allowed, strict=True))
            ):
                self._refuse(
                    contract.BIAS,
                    f"{dtype} (1 or {shapes.batch}, 1 or {a.num_heads}, {shapes.q_len}, {scalar})",
                )
            self.inputs["bias"] = contract.BIAS
        if sink:
            if sink.dtype != dtype or sink.shape != (a.num_heads,):
                self._refuse(contract.SINK, f"{dtype} ({a.num_heads},)")
            self.inputs["sink"] = contract.SINK
        if (bias or a.qk_output) and int(self.lengths.total.max()) > scalar:
            raise InvalidInputError(
                f"{self.node}: seqlens_k asks for {int(self.lengths.total.max())} keys,"
                f" attention_bias and output_qk have total_sequence_length={scalar} columns"
            )

    def _rotary(self) -> int:
        """Rotated channels; checks the tables, and the positions that this call looks up."""
        cos, sin = self.values[contract.COS], self.values[contract.SIN]
        ids = self.values[contract.POSITION_IDS]
        shapes = self.shapes
        if ids and not (
            ids.dtype == "int64"
            and len(ids.shape) == 2
            and ids.shape[0] == shapes.batch
            and ids.shape[1] >= shapes.q_len
        ):
            self._refuse(contract.POSITION_IDS, f"int64 ({shapes.batch}, {shapes.q_len})")
        if not cos or not sin:
            return 0
        half = cos.shape[1] if len(cos.shape) == 2 else 0
        size = shapes.head_size
        if size % 16:
            raise InvalidInputError(
                f"{self.node}: head size {size} with cos_cache; rotary embedding takes multiples"
                " of 16"
            )
        if (
            cos.dtype != shapes.dtype
            or cos.spec != sin.spec
            or not 0 < half <= size // 2
            or half % 8
            or cos.shape[0] < self.lengths.scalar
        ):
            self._refuse(
                contract.COS,
                f"{shapes.dtype} (at least total_sequence_length={self.lengths.scalar} rows, a"
                f" multiple of 8 up to {size // 2} columns) like sin_cache",
            )
        rows = cos.shape[0]
        if int(self.lengths.total.max()) > rows:
            raise InvalidInputError(
                f"{self.node}: seqlens_k asks for position {int(self.lengths.total.max()) - 1},"
                f" cos_cache has {rows} rows"
            )
        if self.a.do_rotary:
            self.inputs |= {"cos": contract.COS, "sin": contract.SIN}
            if ids:
                self.arrays["positions"] = self._positions(ids, rows)
        return 2 * half

    def _positions(self, ids: Value, rows: int) -> np.ndarray:
        """The rotary position of each token: int32 (batch, q_len), as ORT's CPU EP reads them.

        A first prompt reads element [0, 0] alone, as the offset of every batch entry. Other calls
        read the flat tensor with a row stride of q_len; where it is wider, ORT's rows are wrong for
        all entries but the first, which is refused.
        """
        batch, q_len = self.shapes.batch, self.shapes.q_len
        assert ids.host is not None
        if not self.lengths.first_prompt and batch > 1 and ids.shape[1] > q_len:
            self._refuse(contract.POSITION_IDS, f"int64 ({batch}, {q_len}) beyond the first prompt")
        flat = ids.host.reshape(-1)
        if self.lengths.first_prompt:
            positions = np.broadcast_to(flat[0] + np.arange(q_len), (batch, q_len))
        else:
            positions = flat[: batch * q_len].reshape(batch, q_len)
        if positions.min() < 0 or positions.max() >= rows:
            bad = int(positions.min() if positions.min() < 0 else positions.max())
            raise InvalidInputError(
                f"{self.node}: position_ids asks for position {bad}; cos_cache has rows 0 to"
                f" {rows - 1}"
            )
        return positions.astype(np.int32)

    def _params(self, norm: bool) -> None:
        """The `params` operand of prepare, and `v_scale` of the core."""
        a, size = self.a, self.shapes.head_size
        parts = []
        if norm:
            for index in (contract.Q_NORM, contract.K_NORM):
                value = self.values[index]
                assert value is not None
                if value.dtype != self.shapes.dtype or value.shape != (size,):
                    self._refuse(index, f"{self.shapes.dtype} ({size},)")
                parts.append(value.host.astype(np.float32))  # type: ignore[union-attr]
        if a.storage is not None:
            k_scale, v_scale = self._scale(contract.K_SCALE), self._scale(contract.V_SCALE)
            one = np.float32(1)
            parts += [k_scale, one / _nonzero(k_scale), one / _nonzero(v_scale)]
            self.arrays["v_scale"] = v_scale
        if parts:
            self.arrays["params"] = np.concatenate(parts)

    def _scale(self, index: int) -> np.ndarray:
        """float32 (kv_num_heads * head_size,), one scale for each channel of the cache."""
        value = self.values[index]
        assert value is not None and value.host is not None
        channels = self.a.kv_num_heads * self.shapes.head_size
        count = 1 if self.a.quant == "PER_TENSOR" else channels
        if value.dtype != "float32" or value.spec.size != count:
            self._refuse(index, f"float32 with {count} elements ({self.a.quant})")
        return np.broadcast_to(value.host.reshape(-1), (channels,)).astype(np.float32)


def _nonzero(scale: np.ndarray) -> np.ndarray:
    """A scale of 0 quantizes like 1."""
    return np.where(scale == 0, np.float32(1), scale)


def _kept(length: np.ndarray, capacity: int, window: int) -> np.ndarray:
    """Rows of a window cache that are valid once `length` tokens have passed."""
    step = capacity - window + 1
    return np.where(
        length <= capacity, length, length - step * -((capacity - length) // step)
    ).astype(np.int64)


def _set(table: np.ndarray, **fields: np.ndarray | int) -> None:
    """Overwrite fields of a `seq` table."""
    for name, value in fields.items():
        table[:, SEQ_FIELDS.index(name)] = value
