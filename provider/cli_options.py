"""The options that the commands share, and how their texts are read. Needs the extra `cli`."""

from pathlib import Path
from typing import Annotated

import typer

ModelPath = Annotated[Path, typer.Argument(help="The model file.", exists=True, dir_okay=False)]
TunedModel = Annotated[
    Path | None,
    typer.Argument(metavar="MODEL", help="Its nodes' shapes.", exists=True, dir_okay=False),
]
Adapter = Annotated[
    str,
    typer.Option(help="auto, hardware, software, none, part of a name, or an index of `devices`."),
]
Backend = Annotated[str, typer.Option(help="auto, wgpu or dawn.")]
Routes = Annotated[
    list[str] | None,
    typer.Option("--route", help="OPERATOR=ROUTE or NODE=ROUTE: the only route that may run it."),
]
Offload = Annotated[
    str, typer.Option(help="all, none, or node names and operator types with commas between.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
Batch = Annotated[int, typer.Option(help="Rows of generated inputs.", min=1)]
Length = Annotated[int, typer.Option(help="New tokens of generated inputs.", min=1)]
Past = Annotated[int, typer.Option(help="Tokens already in generated caches.", min=0)]
Dims = Annotated[list[str] | None, typer.Option("--dim", help="NAME=SIZE of a symbolic dimension.")]
Ranges = Annotated[
    list[str] | None, typer.Option("--range", help="INPUT=LOW:HIGH of generated values.")
]
Seed = Annotated[int, typer.Option(help="Seed of generated inputs.")]
InputFile = Annotated[
    Path | None, typer.Option("--inputs", help="Arrays by input name.", exists=True, dir_okay=False)
]
CandidateName = Annotated[
    str, typer.Option(help="ort-webgpu, ort-cpu, ort-webgpu-ep, or the name of an EP of ORT's.")
]
Library = Annotated[
    Path | None, typer.Option(help="The shared library of a plug-in EP.", exists=True)
]
Python = Annotated[
    Path | None, typer.Option(help="Run the candidate in this interpreter.", exists=True)
]
Isolate = Annotated[bool, typer.Option(help="Run the candidate in a process of its own.")]
Tolerances = Annotated[list[str] | None, typer.Option(help="VALUE or OUTPUT=VALUE.")]
JsonFile = Annotated[Path | None, typer.Option("--json", help="Write JSON here.")]
JunitFile = Annotated[Path | None, typer.Option(help="Write JUnit XML here.")]
HtmlFile = Annotated[Path | None, typer.Option(help="Write a page with plots here.")]
Reference = Annotated[
    str, typer.Option(help="What is right: reference, ort-cpu, or any other candidate.")
]
Golden = Annotated[Path | None, typer.Option(help="Compare with the outputs in this saved run.")]
Saved = Annotated[
    Path | None, typer.Option(help="Do not run: check this saved run against --golden.")
]
Save = Annotated[Path | None, typer.Option(help="Save inputs and outputs of this run.")]
Steps = Annotated[int, typer.Option(help="Steps of a decode loop.", min=1)]
Iterations = Annotated[int, typer.Option(help="Runs with other seeds.", min=1)]
Repeat = Annotated[int, typer.Option(help="Runs of each call, for unsteady ones.", min=1)]
OwnCaches = Annotated[bool, typer.Option(help="Each side keeps its own caches.")]
Nodes = Annotated[bool, typer.Option(help="Judge each node on its own inputs.")]
FailFast = Annotated[bool, typer.Option(help="Stop at the first difference.")]
Repro = Annotated[Path | None, typer.Option(help="Write the first bad node here.")]
Verbose = Annotated[bool, typer.Option(help="Show every step, node call, failure and refusal.")]


def pairs(texts: list[str] | None, option: str) -> dict[str, str]:
    """NAME=VALUE options; the last "=" divides, since node names may hold others."""
    found = {}
    for text in texts or ():
        name, equals, value = text.rpartition("=")
        if not (name and equals and value):
            raise typer.BadParameter(f"{text!r} is not NAME=VALUE", param_hint=option)
        found[name] = value
    return found


def sizes(texts: list[str] | None, option: str) -> dict[str, int]:
    try:
        return {name: int(value) for name, value in pairs(texts, option).items()}
    except ValueError:
        raise typer.BadParameter("sizes are whole numbers", param_hint=option) from None


def bounds(texts: list[str] | None, option: str) -> dict[str, tuple[float, float]]:
    found = {}
    for name, value in pairs(texts, option).items():
        low, _, high = value.partition(":")
        try:
            found[name] = (float(low), float(high))
        except ValueError:
            raise typer.BadParameter(f"{value!r} is not LOW:HIGH", param_hint=option) from None
    return found


def bounds_by_output(
    atol: list[str] | None, rtol: list[str] | None
) -> dict[str, tuple[float, float]]:
    """(absolute, relative) by output, "" for all: each option is VALUE or OUTPUT=VALUE."""
    parts: dict[str, dict[str, float]] = {}
    for option, texts in (("--atol", atol), ("--rtol", rtol)):
        for text in texts or ():
            name, _, value = text.rpartition("=")
            try:
                parts.setdefault(name, {})[option] = float(value)
            except ValueError:
                raise typer.BadParameter(
                    f"{text!r} is neither VALUE nor OUTPUT=VALUE", param_hint=option
                ) from None
    everywhere = parts.get("", {})
    return {
        name: (
            found.get("--atol", everywhere.get("--atol", 0.0)),
            found.get("--rtol", everywhere.get("--rtol", 0.0)),
        )
        for name, found in parts.items()
    }
