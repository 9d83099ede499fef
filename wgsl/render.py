"""Makes WGSL text from a Kernel, for the two readers of the language: naga and Tint.

Every template gets, besides the kernel's constants:
- `header`: enable directives, the uniform block `u` and the storage bindings;
- `main`: the signature of the entry point and its first lines, after which `wg` is the index of the
  workgroup (0 <= wg < u.workgroups, unfolded from three dimensions) and `lane` the local index.
  With subgroups, `sg_lane` is the lane within the subgroup and `sg_size` its size;
- `load4`, `store4`, `load1`: declarations of loads and stores of a buffer (kernel.STORAGE).

Tensors are read and written in groups of four elements, as float32 in registers whatever their
storage is, so no kernel but the matrix ones needs the f16 feature.
"""

import functools

import jinja2

from ort_webgpu.wgsl.kernel import Kernel

__all__ = ["render", "uniform_layout"]

_LOAD = {
    "float32": "return {name}[i];",
    "float16": "let w = {name}[i]; return vec4<f32>(unpack2x16float(w.x), unpack2x16float(w.y));",
    "int8": "return vec4<f32>((vec4<i32>(i32({name}[i])) << vec4<u32>(24u, 16u, 8u, 0u))"
    " >> vec4<u32>(24u));",
    "int4": "let w = {name}[i >> 1u] >> ((i & 1u) * 16u);"
    " return vec4<f32>((vec4<u32>(w) >> vec4<u32>(0u, 4u, 8u, 12u)) & vec4<u32>(15u)) - 8.0;",
}

_STORE = {
    "float32": "{name}[i] = v;",
    "float16": "{name}[i] = vec2<u32>(half2(v.xy), half2(v.zw));",
}

# pack2x16float leaves the rounding mode and values beyond 65504 to the implementation. ORT rounds
# to the nearest even and overflows to infinity, so the conversion is done on the bits.
_HALF2 = """
fn half1(x: f32) -> u32 {
  let b = bitcast<u32>(x);
  let sign = (b >> 16u) & 0x8000u;
  let a = b & 0x7fffffffu;
  if (a > 0x7f800000u) { return sign | 0x7e00u; }
  if (a >= 0x47800000u) { return sign | 0x7c00u; }
  if (a < 0x38800000u) {
    // subnormal half: a multiple of 2^-24, rounded to nearest even on the integer significand
    if (a < 0x33000000u) { return sign; }
    let shift = 126u - (a >> 23u);
    let m = (a & 0x7fffffu) | 0x800000u;
    let q = m >> shift;
    let rest = m & ((1u << shift) - 1u);
    let half = 1u << (shift - 1u);
    return sign | (q + select(0u, 1u, rest > half || (rest == half && (q & 1u) == 1u)));
  }
  let r = a - 0x38000000u + 0xfffu + ((a >> 13u) & 1u);
  return sign | (r >> 13u);
}
fn half2(v: vec2<f32>) -> u32 { return half1(v.x) | (half1(v.y) << 16u); }
"""

# Kernels on float16 matrices convert operands by the device's own conversion anyway. (On an H200 it
# rounds to the nearest even and overflows to infinity; naga knows no such bitcast.)
_HALF2_F16 = """
fn half2(v: vec2<f32>) -> u32 { return bitcast<u32>(vec2<f16>(v)); }
"""


def load4(name: str, dtype: str) -> str:
    """Declare `name_load(i)`: elements 4i to 4i+3 of buffer `name` as vec4<f32>, not rescaled."""
    body = _LOAD[dtype].format(name=name)
    return f"fn {name}_load(i: u32) -> vec4<f32> {{ {body} }}"


def store4(name: str, dtype: str) -> str:
    """Declare `name_store(i, v)`: writes elements 4i to 4i+3 of buffer `name`."""
    body = _STORE[dtype].format(name=name)
    return f"fn {name}_store(i: u32, v: vec4<f32>) {{ {body} }}"


def load1(name: str, dtype: str) -> str:
    """Declare `name_at(i)`: element i of buffer `name` (kernel.scalar_element) as f32."""
    body = f"return {name}[i];"
    if dtype == "float16":
        body = f"let w = unpack2x16float({name}[i >> 1u]); return select(w.x, w.y, (i & 1u) == 1u);"
    return f"fn {name}_at(i: u32) -> f32 {{ {body} }}"


def uniform_layout(kernel: Kernel) -> tuple[tuple[str, str], ...]:
    """The fields of the uniform block, in order; all are four bytes."""
    return (("workgroups", "u32"), *kernel.uniforms)


def render(kernel: Kernel, dialect: str) -> str:
    """The WGSL of `kernel` for `dialect` "naga" or "tint"."""
    template = _environment().get_template(f"{kernel.template}.wgsl.j2")
    return template.render(
        dict(kernel.constants),
        header=_header(kernel, dialect),
        main=_main(kernel),
        half=_HALF2_F16 if {"f16", "subgroup_matrix"} <= kernel.features else _HALF2,
        load4=load4,
        store4=store4,
        load1=load1,
        subgroups="subgroups" in kernel.features,
        workgroup_size=kernel.workgroup_size,
    )


@functools.cache
def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("ort_webgpu.wgsl"),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.globals.update(range=range, min=min, max=max)
    return environment


def _header(kernel: Kernel, dialect: str) -> str:
    lines = []
    if dialect == "tint" and "subgroups" in kernel.features:
        lines.append("enable subgroups;")  # naga refuses the line and needs none
    if "f16" in kernel.features:
        lines.append("enable f16;")
    if "subgroup_matrix" in kernel.features:
        lines.append("enable chromium_experimental_subgroup_matrix;")
        # tile offsets derive from the lane index; the analysis cannot see that they agree
        lines.append("diagnostic(off, chromium.subgroup_matrix_uniformity);")
    if dialect == "tint" and "subgroup_branches" in kernel.features:
        # branches on subgroupAny() are uniform in a subgroup; the analysis looks at workgroups
        lines.append("diagnostic(off, subgroup_uniformity);")
    fields = ", ".join(f"{name}: {kind}" for name, kind in uniform_layout(kernel))
    lines.append(f"struct Uniforms {{ {fields} }}")
    lines.append("@group(0) @binding(0) var<uniform> u: Uniforms;")
    for index, binding in enumerate(kernel.bindings, start=1):
        lines.append(
            f"@group(0) @binding({index}) var<storage, {binding.access}>"
            f" {binding.name}: array<{binding.element}>;"
        )
    return "\n".join(lines)


def _main(kernel: Kernel) -> str:
    extra = ""
    if "subgroups" in kernel.features:
        extra = (
            ", @builtin(subgroup_invocation_id) sg_lane: u32, @builtin(subgroup_size) sg_size: u32"
        )
    return (
        f"@compute @workgroup_size({kernel.workgroup_size})\n"
        "fn main(@builtin(workgroup_id) wid: vec3<u32>, @builtin(num_workgroups) nwg: vec3<u32>,\n"
        f"        @builtin(local_invocation_index) lane: u32{extra}) {{\n"
        "  let wg = wid.x + nwg.x * (wid.y + nwg.y * wid.z);\n"
        "  if (wg >= u.workgroups) { return; }"
    )
