"""repack.wgsl.j2: float32 rows padded to groups of four, to a dense tensor of any float dtype."""

from ort_webgpu.ops.attention import Parts
from ort_webgpu.wgsl.kernel import Binding, Kernel, Launch

__all__ = ["repack"]


def repack(source: str, target: str, dtype: str, rows: int, width: int, padded: int) -> Parts:
    """Copy `rows` rows of `width` elements, `padded` apart in `source`, to dense `target`."""
    elements = rows * width
    kernel = Kernel(
        "repack",
        (("out", dtype), ("padded", padded), ("width", width)),
        (
            Binding("source", "f32"),
            Binding("out", "f32" if dtype == "float32" else "u32", "read_write"),
        ),
        (("elements", "u32"),),
        256,
    )
    launch = Launch(
        kernel,
        (("source", source), ("out", target)),
        -(-elements // 512),
        (("elements", elements),),
    )
    return Parts((launch,))
