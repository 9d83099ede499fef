"""NodeCall: what one offloaded node read and gave in one run, for tools that check node by node."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from ort_webgpu.graph_tools import Node
from ort_webgpu.ops.spec import Caps
from ort_webgpu.steps import Env, GpuNode
from ort_webgpu.values import to_host
from ort_webgpu.wgsl.kernel import Kernel
from ort_webgpu.wgsl.render import render

__all__ = ["NodeCall", "Observer", "node_call"]


@dataclass(frozen=True)
class NodeCall:
    """One call of one node. Arrays by position, None where the node has no such value.

    `route` is None where no route took the call and the node ran on the CPU. `card` names the
    variant of the kernel cards that the route is for this call, if there is one. `tuned` is the
    measurement that put the route first, "" where a rule did.
    """

    node: Node
    inputs: tuple[np.ndarray | None, ...]
    outputs: tuple[np.ndarray | None, ...]
    route: str | None
    kernels: tuple[Kernel, ...]
    dialect: str
    card: str | None = None
    tuned: str = ""

    def shaders(self) -> Mapping[str, str]:
        """The WGSL of each kernel that ran, by the kernel's label."""
        return {kernel.label: render(kernel, self.dialect) for kernel in self.kernels}


Observer = Callable[[NodeCall], None]


def node_call(one: GpuNode, env: Env, caps: Caps) -> NodeCall:
    """The call that just put the outputs of `one` into `env`; its values are downloaded."""
    names = (*one.node.inputs, *one.node.outputs)
    to_host(env[name] for name in names if name)
    arrays = [env[name].host().copy() if name else None for name in names]
    count = len(one.node.inputs)
    choice = one.choice
    program = choice.program if choice else None
    kernels = dict.fromkeys(launch.kernel for launch in program.launches) if program else {}
    route = choice.route if choice else None
    return NodeCall(
        one.node,
        tuple(arrays[:count]),
        tuple(arrays[count:]),
        route.name if route else None,
        tuple(kernels),
        caps.dialect,
        route.card_variant(choice.problem, caps) if route and choice else None,
        str(choice.finding) if choice and choice.finding else "",
    )
