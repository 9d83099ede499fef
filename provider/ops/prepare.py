"""The prologue that GroupQueryAttention and DecoderMaskedMultiHeadAttention share.

q, k and v become operands: `prepare` (split, bias, norm, rotary, scale, quantize, append) and
`cache_copy` (past to present).
"""

from dataclasses import dataclass, replace

from ort_webgpu.ops.attention import Parts
from ort_webgpu.ops.spec import Accepted, Caps, Rejected
from ort_webgpu.wgsl.kernel import STORAGE, Binding, Kernel, Launch

__all__ = ["CacheCopy", "Prepare", "bytes_per_row", "query_bytes"]


def bytes_per_row(storage: str, head_size: int) -> int:
    """Bytes of one cache row of `head_size` elements; storage is a key of kernel.STORAGE."""
    return {"float32": 4 * head_size, "float16": 2 * head_size, "int8": head_size}.get(
        storage, head_size // 2
    )


def query_bytes(rows: int, width: int, half_queries: bool) -> int:
    """Bytes of `rows` query rows of `width` elements, with the room that CoreRoute.half_queries
    asks for."""
    if half_queries:
        return (rows + 128) * bytes_per_row("float16", width)
    return rows * bytes_per_row("float32", width)


@dataclass(frozen=True)
class Prepare:
    """One launch of prepare.wgsl.j2; `k_out`, `v_out` name the operands that new rows go to.

    `half_queries`: queries are written as float16 without the scale. `part` is "queries" or "keys"
    (keys and values) for a launch of these alone, else "all".
    """

    batch: int
    q_len: int
    num_heads: int
    kv_heads: int
    head_size: int
    dtype: str
    kv_dtype: str
    kv_head_rows: int
    scale: float
    packed: bool = False
    new_kv: bool = True
    bias: bool = False
    norm: bool = False
    rotary: str = ""
    rotary_size: int = 0
    positions: bool = False
    quantized: bool = False
    q_epsilon: float = 0.0
    k_epsilon: float = 0.0
    k_out: str = "present_key"
    v_out: str = "present_value"
    half_queries: bool = False
    part: str = "all"

    @property
    def with_queries(self) -> bool:
        """Whether the launch makes query rows."""
        return self.part != "keys"

    @property
    def with_keys(self) -> bool:
        """Whether the launch makes key and value rows."""
        return self.new_kv and self.part != "queries"

    @property
    def vectors(self) -> int:
        """Heads of tokens that the launch works on."""
        slots = self.with_queries * self.num_heads + self.with_keys * 2 * self.kv_heads
        return self.batch * self.q_len * slots

    @property
    def scratch(self) -> tuple[tuple[str, int], ...]:
        """The query rows that core attention reads, see CoreRoute.half_queries."""
        rows, width = self.batch * self.q_len, self.num_heads * self.head_size
        return (("q", query_bytes(rows, width, self.half_queries)),)

    def bindings(self) -> list[tuple[Binding, str]]:
        """The kernel's bindings, each with the operand it is bound to."""
        element = STORAGE[self.dtype]
        found = []
        if self.with_queries or self.packed:
            found.append((Binding("q", element), "query"))
        if self.with_keys and not self.packed:
            found += [(Binding("k", element), "key"), (Binding("v", element), "value")]
        if self.with_queries:
            q_element = "vec2<u32>" if self.half_queries else "vec4<f32>"
            found.append((Binding("q_out", q_element, "read_write"), "q"))
        if self.with_keys:
            cache = STORAGE[self.kv_dtype]
            found += [
                (Binding("k_out", cache, "read_write"), self.k_out),
                (Binding("v_out", cache, "read_write"), self.v_out),
            ]
        if self.bias:
            found.append((Binding("bias", element), "qkv_bias"))
        if self.rotary:
            found += [(Binding("cos", element), "cos"), (Binding("sin", element), "sin")]
        if self.positions:
            found.append((Binding("positions", "i32"), "positions"))
        if self.norm or self.quantized:
            found.append((Binding("params", "f32"), "params"))
        found.append((Binding("seq", "i32"), "seq"))
        return found

    def split(self, caps: Caps) -> "tuple[Prepare, ...]":
        """Itself, or queries apart from keys where the adapter binds too few buffers for all."""
        if len(self.bindings()) <= caps.storage_buffers or not self.new_kv:
            return (self,)
        return replace(self, part="queries"), replace(self, part="keys")

    def check(self, caps: Caps) -> Accepted | Rejected:
        """Whether the adapter binds enough buffers."""
        needed = max(len(one.bindings()) for one in self.split(caps))
        if needed > caps.storage_buffers:
            return Rejected(
                f"preparing q, k and v needs {needed} storage buffers, the adapter allows"
                f" {caps.storage_buffers}"
            )
        return Accepted()

    def parts(self, caps: Caps) -> Parts:
        """The launches and their scratch."""
        return Parts(tuple(one._launch() for one in self.split(caps)), self.scratch)

    def _launch(self) -> Launch:
        lanes = 1 << (-(-self.head_size // 8) - 1).bit_length()
        size = max(64, lanes)
        bound = self.bindings()
        kernel = Kernel(
            "prepare",
            (
                ("H", self.head_size),
                ("LV", lanes),
                ("R", self.rotary_size),
                ("bias", self.bias),
                ("half_queries", self.half_queries),
                ("kv", self.kv_dtype),
                ("new_kv", self.with_keys),
                ("norm", self.norm),
                ("packed", self.packed),
                ("positions", self.positions),
                ("quantized", self.quantized),
                ("rotary", self.rotary),
                ("t", self.dtype),
                ("with_queries", self.with_queries),
            ),
            tuple(binding for binding, _ in bound),
            (
                ("q_len", "u32"),
                ("num_heads", "u32"),
                ("kv_heads", "u32"),
                ("kv_head_rows", "u32"),
                ("vectors", "u32"),
                ("scale", "f32"),
                ("q_epsilon", "f32"),
                ("k_epsilon", "f32"),
            ),
            size,
        )
        return Launch(
            kernel,
            tuple((binding.name, operand) for binding, operand in bound),
            -(-self.vectors // (size // lanes)),
            (
                ("q_len", self.q_len),
                ("num_heads", self.num_heads),
                ("kv_heads", self.kv_heads),
                ("kv_head_rows", self.kv_head_rows),
                ("vectors", self.vectors),
                ("scale", 1.0 if self.half_queries else self.scale),
                ("q_epsilon", self.q_epsilon),
                ("k_epsilon", self.k_epsilon),
            ),
        )


@dataclass(frozen=True)
class CacheCopy:
    """One launch of cache_copy.wgsl.j2 from `source` to `target`, both (key, value) operand names.

    `source` is None where nothing is kept and rows are only cleared. `seq` names the table whose
    fields keep, shift, new and new_count say which rows.
    """

    batch: int
    kv_heads: int
    row_bytes: int
    source: tuple[str, str] | None
    source_rows: int
    target: tuple[str, str]
    target_rows: int
    seq: str = "seq"

    def parts(self) -> Parts:
        """The launch."""
        word, size = ("vec4<u32>", 16) if self.row_bytes % 16 == 0 else ("u32", 4)
        row_words = self.row_bytes // size
        words = self.batch * self.kv_heads * self.target_rows * row_words
        bound = [
            (Binding("k_out", word, "read_write"), self.target[0]),
            (Binding("v_out", word, "read_write"), self.target[1]),
            (Binding("seq", "i32"), self.seq),
        ]
        if self.source:
            bound += [
                (Binding("source_k", word), self.source[0]),
                (Binding("source_v", word), self.source[1]),
            ]
        kernel = Kernel(
            "cache_copy",
            (("has_source", bool(self.source)), ("row_words", row_words), ("word", word)),
            tuple(binding for binding, _ in bound),
            (("kv_heads", "u32"), ("source_rows", "u32"), ("target_rows", "u32"), ("words", "u32")),
            256,
        )
        launch = Launch(
            kernel,
            tuple((binding.name, operand) for binding, operand in bound),
            -(-2 * words // 256),
            (
                ("kv_heads", self.kv_heads),
                ("source_rows", self.source_rows),
                ("target_rows", self.target_rows),
                ("words", words),
            ),
        )
        return Parts((launch,))
