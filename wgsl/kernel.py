"""Kernel: one WGSL specialization, and Launch: one dispatch of it. Pure data, no device."""

from dataclasses import dataclass, field
from typing import Literal

__all__ = [
    "STORAGE",
    "WIDE",
    "Access",
    "Binding",
    "Constant",
    "Kernel",
    "Launch",
    "Program",
    "scalar_element",
]

Constant = bool | int | float | str
Access = Literal["read", "read_write"]

#: WGSL element of a buffer of each storage dtype, for four tensor elements ("int4": eight).
STORAGE = {
    "float32": "vec4<f32>",
    "float16": "vec2<u32>",
    "int8": "u32",
    "int4": "u32",
}
#: WGSL element of a buffer that is read in units of eight tensor elements (wide.wgsl.j2).
WIDE = {"float32": "vec4<f32>", "float16": "vec4<u32>", "int8": "vec2<u32>", "int4": "u32"}


def scalar_element(dtype: str) -> str:
    """The WGSL element of a buffer that is read one tensor element at a time."""
    return "f32" if dtype == "float32" else "u32"


@dataclass(frozen=True)
class Binding:
    """One storage buffer of a kernel.

    `element` is the WGSL element type of the runtime-sized array, e.g. `"vec4<f32>"` or `"u32"`.
    """

    name: str
    element: str
    access: Access = "read"


@dataclass(frozen=True)
class Kernel:
    """A template with all its constants: the text of one compute pipeline.

    Equality and hash cover every field, so a Kernel is its own pipeline cache key.

    `template` is a file of wgsl/templates without its `.wgsl.j2`; `constants` are the values that
    Jinja sees; `uniforms` are (name, WGSL scalar type) pairs of the uniform block `u`;
    `features` are what the WGSL needs: any of "subgroups", "f16",
    "subgroup_matrix", "subgroup_branches" (subgroup operations under a condition that holds for
    whole subgroups).
    """

    template: str
    constants: tuple[tuple[str, Constant], ...]
    bindings: tuple[Binding, ...]
    uniforms: tuple[tuple[str, str], ...] = ()
    workgroup_size: int = 64
    features: frozenset[str] = frozenset()

    @property
    def label(self) -> str:
        """A readable name for the pipeline: template and constants."""
        parts = [f"{k}={v}" for k, v in self.constants]
        return f"{self.template}({', '.join(parts)})"


@dataclass(frozen=True)
class Launch:
    """One dispatch.

    `operands` maps each binding's name to the name of a value of the call: a node input or output,
    a host-made array or scratch. `uniforms` gives each uniform of the kernel a value, by name.
    `workgroups` is the logical number of workgroups, up to 2**32 - 1; the renderer folds it into
    three dimensions, and kernels read it back as `workgroup_index` (see render.py).
    """

    kernel: Kernel
    operands: tuple[tuple[str, str], ...]
    workgroups: int
    uniforms: tuple[tuple[str, int | float], ...] = ()


@dataclass(frozen=True)
class Program:
    """The launches of one call of one route, in order, and the scratch buffers they share.

    `scratch` are (operand name, bytes) pairs; their contents are undefined before the first write.
    """

    launches: tuple[Launch, ...]
    scratch: tuple[tuple[str, int], ...] = field(default=())
