"""From packed tokens to the operands of core attention: by projection, or from given q, k and v.

Both write the same rows (packed_place.wgsl.j2): queries float32 [token][head], times the score
scale, or as `half_queries` float16 without it; keys and values `kv_dtype` [head][token]; each row
padded with zeros to groups of four.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from ort_webgpu.ops.attention import Parts
from ort_webgpu.ops.attention_core import missing_matrices
from ort_webgpu.ops.prepare import bytes_per_row, query_bytes
from ort_webgpu.ops.spec import Caps, Rejected
from ort_webgpu.wgsl.kernel import STORAGE, Binding, Constant, Kernel, Launch, scalar_element

__all__ = ["KEYS", "GemmTile", "MatrixProjection", "PackedRows", "Projection", "Split"]

KEYS = ("packed_key", "packed_value")


@dataclass(frozen=True)
class PackedRows:
    """What a prologue writes: `tokens` of `heads`, element types and the score scale."""

    tokens: int
    heads: int
    head_size: int
    v_head_size: int
    dtype: str
    kv_dtype: str
    scale: float
    half_queries: bool = False  # as CoreRoute.half_queries wants them

    @property
    def groups(self) -> int:
        """Groups of four that a token becomes."""
        return self.heads * (2 * -(-self.head_size // 4) + -(-self.v_head_size // 4))

    @property
    def query_scale(self) -> float:
        """What queries are multiplied by."""
        return 1.0 if self.half_queries else self.scale

    @property
    def aligned(self) -> bool:
        """Whether no group reaches beyond its head."""
        return self.head_size % 4 == 0 and self.v_head_size % 4 == 0

    @property
    def scratch(self) -> tuple[tuple[str, int], ...]:
        """The operands that are written, with their bytes."""
        rows = self.tokens * self.heads
        h, v = -(-self.head_size // 4) * 4, -(-self.v_head_size // 4) * 4
        return (
            ("q", query_bytes(self.tokens, self.heads * h, self.half_queries)),
            (KEYS[0], rows * bytes_per_row(self.kv_dtype, h)),
            (KEYS[1], rows * bytes_per_row(self.kv_dtype, v)),
        )

    def element(self, aligned: bool) -> str:
        """WGSL element type of a buffer of `dtype`, read in groups of four where `aligned`."""
        return STORAGE[self.dtype] if aligned else scalar_element(self.dtype)

    def outputs(self) -> tuple[Binding, ...]:
        """The bindings of the operands written."""
        cache = STORAGE[self.kv_dtype]
        return (
            Binding("q_out", STORAGE["float16" if self.half_queries else "float32"], "read_write"),
            Binding("k_out", cache, "read_write"),
            Binding("v_out", cache, "read_write"),
        )

    def constants(self, **own: Constant) -> tuple[tuple[str, Constant], ...]:
        """Those of packed_place, and a template's own."""
        shared: dict[str, Constant] = {
            "H": self.head_size,
            "N": self.heads,
            "V": self.v_head_size,
            "half_queries": self.half_queries,
            "kv": self.kv_dtype,
            "t": self.dtype,
        }
        return tuple(sorted({**shared, **own}.items()))


OUTPUTS = (("q_out", "q"), ("k_out", KEYS[0]), ("v_out", KEYS[1]))


@dataclass(frozen=True)
class GemmTile:
    """Geometry of gemm.wgsl.j2: RL x CL lanes, each TM tokens by TN groups of four columns."""

    rl: int
    cl: int
    tm: int
    tn: int
    bk: int = 16

    @property
    def memory(self) -> int:
        """Bytes of workgroup memory."""
        return 16 * (self.rl * self.tm * (self.bk // 4) + self.bk * self.cl * self.tn)

    def workgroups(self, rows: PackedRows) -> int:
        """Tiles that cover the output."""
        columns = -(-rows.groups // (self.cl * self.tn))
        return columns * -(-rows.tokens // (self.rl * self.tm))


#: Largest first: a larger tile reads less, a smaller one leaves fewer processors without work.
_TILES = (
    GemmTile(16, 16, 8, 2),
    GemmTile(16, 16, 4, 1),
    GemmTile(8, 8, 4, 1),
    GemmTile(8, 8, 1, 1),
)


@dataclass(frozen=True)
class Projection:
    """One launch of gemm.wgsl.j2 over operands `input`, `weights` and `qkv_bias`."""

    rows: PackedRows
    depth: int

    def tile(self, caps: Caps) -> GemmTile:
        """The largest that fits, gives the device enough to do and is not mostly padding."""
        wanted = 4 if caps.software else 128
        fitting = [
            tile
            for tile in _TILES
            if tile.memory <= caps.workgroup_memory
            and tile.rl * tile.cl <= caps.workgroup_invocations
        ]
        for tile in fitting:
            if tile.workgroups(self.rows) >= wanted and tile.rl * tile.tm < 2 * self.rows.tokens:
                return tile
        return fitting[-1]

    def parts(self, caps: Caps) -> Parts:
        """The launch and what it writes."""
        tile = self.tile(caps)
        own = {"RL": tile.rl, "CL": tile.cl, "TM": tile.tm, "TN": tile.tn, "BK": tile.bk}
        own["KU"] = 1 if caps.software else tile.bk // 4
        columns = -(-self.rows.groups // (tile.cl * tile.tn))
        return self._parts("gemm", own, columns, tile.rl * tile.tm, tile.rl * tile.cl)

    def _parts(
        self,
        template: str,
        own: Mapping[str, Constant],
        column_tiles: int,
        tile_tokens: int,
        lanes: int,
        features: frozenset[str] = frozenset(),
        span: tuple[int, int] | None = None,
        x_element: str = "",
    ) -> Parts:
        """The launch of `template`, whose tiles cover `column_tiles` times `tile_tokens` tokens.

        `span`: first token and end, for templates that take a part of the tokens. `x_element`: by
        default that of a `dtype`.
        """
        rows, x_aligned = self.rows, self.depth % 4 == 0
        first, end = span or (0, rows.tokens)
        bounds = {"first": first, "end": end} if span else {}
        kernel = Kernel(
            template,
            rows.constants(x_aligned=x_aligned, w_aligned=rows.aligned, **own),
            (
                Binding("x", x_element or rows.element(x_aligned)),
                Binding("w", rows.element(rows.aligned)),
                Binding("bias", rows.element(rows.aligned)),
                *rows.outputs(),
            ),
            (
                ("tokens", "u32"),
                ("depth", "u32"),
                ("column_tiles", "u32"),
                ("scale", "f32"),
                *((name, "u32") for name in bounds),
            ),
            lanes,
            features,
        )
        launch = Launch(
            kernel,
            (("x", "input"), ("w", "weights"), ("bias", "qkv_bias"), *OUTPUTS),
            column_tiles * -(-(end - first) // tile_tokens),
            (
                ("tokens", rows.tokens),
                ("depth", self.depth),
                ("column_tiles", column_tiles),
                ("scale", rows.query_scale),
                *bounds.items(),
            ),
        )
        return Parts((launch,), rows.scratch)


@dataclass(frozen=True)
class MatrixGemmTile:
    """Geometry of gemm_matrix.wgsl.j2: BM tokens by BN columns, BK of the depth a step, by SGR x
    SGC subgroups."""

    bm: int
    bn: int
    bk: int
    sgr: int = 2
    sgc: int = 2

    def memory(self, size: int, operand_bytes: int, pad: int) -> int:
        """Bytes of workgroup memory: both operands, and the results of a row of `size`d tiles."""
        operands = self.bm * (self.bk + pad) + self.bk * (self.bn + pad)
        return operands * operand_bytes + self.sgr * size * (self.bn + 4) * 4


_MATRIX_TILES = (
    MatrixGemmTile(128, 128, 32, 2, 4),
    MatrixGemmTile(64, 64, 32),
    MatrixGemmTile(32, 64, 32),
    MatrixGemmTile(32, 32, 16),
)


@dataclass(frozen=True)
class MatrixProjection(Projection):
    """The projection on the matrix layer; `native` on subgroup matrices, else emulated for tests.

    Operands are float16 where the node is (nothing is rounded), else float32. `direct`: tokens are
    read from where they lie, in whole tiles; a launch that stages them takes the rest.
    """

    native: bool = True
    direct: bool = False

    @property
    def _half(self) -> bool:
        return self.rows.dtype == "float16"

    @property
    def _size(self) -> int:
        """Rows, columns and depth of a tile."""
        return 16 if self._half else 8

    def _lanes(self, caps: Caps) -> int:
        """Lanes of a subgroup."""
        return caps.subgroup_min if self.native else 32

    def rejection(self, caps: Caps) -> Rejected | None:
        """Why the device cannot run it, or None."""
        size, operand = self._size, "f16" if self._half else "f32"
        if self.native and (missing := missing_matrices(caps, size, size, operand)):
            return missing
        if self.native and (caps.subgroup_min != caps.subgroup_max or 4 * caps.subgroup_min > 256):
            return Rejected(
                f"needs subgroups of one size up to 64; the adapter's have {caps.subgroup_min} to"
                f" {caps.subgroup_max} lanes"
            )
        if self._tile(caps) is None:
            return Rejected(
                f"no tile fits {caps.workgroup_memory} bytes of workgroup memory and"
                f" {caps.workgroup_invocations} lanes"
            )
        return self._partial(caps) if self.direct else None

    def _partial(self, caps: Caps) -> Rejected | None:
        """Why no whole tile of tokens can be read where it lies, or None."""
        tile = self._tile(caps)
        assert tile is not None
        if self.depth % tile.bk:
            return Rejected(f"input width {self.depth} is no multiple of the tile's {tile.bk}")
        if self.rows.tokens < tile.bm:
            return Rejected(f"{self.rows.tokens} tokens are less than a tile of {tile.bm}")
        return None

    def _tile(self, caps: Caps) -> MatrixGemmTile | None:
        operand_bytes, pad = (2, 8) if self._half else (4, 4)
        for tile in _MATRIX_TILES:
            columns = -(-4 * self.rows.groups // tile.bn)
            busy = columns * -(-self.rows.tokens // tile.bm) >= (1 if caps.software else 132)
            fits = (
                tile.memory(self._size, operand_bytes, pad) <= caps.workgroup_memory
                and tile.sgr * tile.sgc * self._lanes(caps) <= caps.workgroup_invocations
            )
            if fits and (busy or tile is _MATRIX_TILES[-1]):
                return tile
        return None

    def parts(self, caps: Caps) -> Parts:
        tile = self._tile(caps)
        assert tile is not None
        lanes = self._lanes(caps)
        features = {"subgroup_matrix", "subgroups"} | ({"f16"} if self._half else set())
        own: dict[str, Constant] = {
            "BM": tile.bm,
            "BN": tile.bn,
            "BK": tile.bk,
            "PAD": 8 if self._half else 4,
            "SG": lanes,
            "SGR": tile.sgr,
            "SGC": tile.sgc,
            "TILE": self._size,
            "native": self.native,
            "operand": "f16" if self._half else "f32",
        }
        whole = self.rows.tokens // tile.bm * tile.bm if self.direct else 0
        launches: list[Launch] = []
        for direct, span in ((True, (0, whole)), (False, (whole, self.rows.tokens))):
            if span[0] < span[1]:
                element = {(True, True): "f16", (False, True): "u32"}.get((self.native, self._half))
                parts = self._parts(
                    "gemm_matrix",
                    {**own, "direct": direct},
                    -(-4 * self.rows.groups // tile.bn),
                    tile.bm,
                    tile.sgr * tile.sgc * lanes,
                    frozenset(features) if self.native else frozenset(),
                    span,
                    (element or "f32") if direct else "",
                )
                launches += parts.launches
        return Parts(tuple(launches), self.rows.scratch)


@dataclass(frozen=True)
class Split:
    """One launch of packed_split.wgsl.j2 over `query`, and unless `joined` `key` and `value`."""

    rows: PackedRows
    joined: bool
    bias: bool

    def parts(self, caps: Caps) -> Parts:
        """The launch and what it writes."""
        rows = self.rows
        element = rows.element(rows.aligned)
        inputs = [("q", "query")] + ([] if self.joined else [("k", "key"), ("v", "value")])
        if self.bias:
            inputs.append(("bias", "qkv_bias"))
        kernel = Kernel(
            "packed_split",
            rows.constants(aligned=rows.aligned, joined=self.joined, bias=self.bias),
            (*(Binding(name, element) for name, _ in inputs), *rows.outputs()),
            (("tokens", "u32"), ("scale", "f32")),
            256,
        )
        launch = Launch(
            kernel,
            (*inputs, *OUTPUTS),
            -(-rows.tokens * rows.groups // 256),
            (("tokens", rows.tokens), ("scale", rows.query_scale)),
        )
        return Parts((launch,), rows.scratch)
