"""Steps of a run in an npz file: inputs to run again, and outputs to compare with later.

Keys are `step<i>.in.<input>` and `step<i>.out.<output>` (`.ref.` is read like `.out.`). A file
without such keys holds one step under the plain names.
"""

import os
import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ort_webgpu.conformance.case import Array
from ort_webgpu.errors import InvalidInputError

__all__ = ["Step", "load_steps", "save_steps"]

_KEY = re.compile(r"(?:step(\d+)\.)?(in|out|ref)\.(.+)")


@dataclass(frozen=True)
class Step:
    """One call. A later step may lack inputs: they are those of the step before, or what came of
    it (the past is the present of the step before)."""

    inputs: dict[str, Array]
    outputs: dict[str, Array] = field(default_factory=dict)


def load_steps(
    path: str | os.PathLike, inputs: Collection[str], outputs: Collection[str] = ()
) -> list[Step]:
    """The steps in `path`. `inputs` and `outputs` are the names that the model has.

    Raises InvalidInputError where the file holds no input, or plain keys that are no names of the
    model's (but for keys that begin with an output's name, which are taken for variants of it).
    """
    with np.load(path, allow_pickle=False) as file:
        arrays = dict(file)
    steps: dict[int, Step] = {}
    for key, array in arrays.items():
        found = _KEY.fullmatch(key)
        if found:
            number, kind, name = int(found[1] or 0), found[2], found[3]
        else:
            number, kind, name = 0, _plain_kind(path, key, inputs, outputs), key
        step = steps.setdefault(number, Step({}, {}))
        if kind == "in" and name in inputs:
            step.inputs[name] = array
        elif kind in ("out", "ref"):
            step.outputs[name] = array
    if not any(step.inputs for step in steps.values()):
        raise InvalidInputError(
            f"{os.fspath(path)!r} holds none of the model's inputs {sorted(inputs)};"
            f" it has {sorted(arrays)[:20]}"
        )
    return [steps[number] for number in sorted(steps)]


def save_steps(path: str | os.PathLike, steps: Iterable[Step]) -> None:
    """Write `steps` for `load_steps`."""
    arrays: dict[str, Any] = {}
    for number, step in enumerate(steps):
        arrays |= {f"step{number}.in.{name}": array for name, array in step.inputs.items()}
        arrays |= {f"step{number}.out.{name}": array for name, array in step.outputs.items()}
    np.savez(path, **arrays)


def _plain_kind(
    path: str | os.PathLike, key: str, inputs: Collection[str], outputs: Collection[str]
) -> str:
    if key in inputs:
        return "in"
    if key in outputs:
        return "out"
    if outputs and any(key.startswith(name) for name in outputs):
        return "variant"
    raise InvalidInputError(
        f"{os.fspath(path)!r} holds {key!r}, which is no input of the model; its inputs are"
        f" {sorted(inputs)}. Rename the array or leave it out"
    )
