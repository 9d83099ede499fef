"""The package as a whole: who imports whom, what an import does, what the wheel holds."""

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import ort_webgpu

REPOSITORY = Path(__file__).parents[1]
PACKAGE = "ort_webgpu"
FOLDERS = {
    "provider": PACKAGE,
    "wgsl": f"{PACKAGE}.wgsl",
    "graph_tools": f"{PACKAGE}.graph_tools",
    "conformance": f"{PACKAGE}.conformance",
}

# Module or package of ours -> the only modules or packages of ours that it may import; a package
# stands for all that is in it. The first entry that fits a module holds.
ARROWS: dict[str, tuple[str, ...]] = {
    "ort_webgpu.errors": (),
    "ort_webgpu._version": (),
    "ort_webgpu.wgsl": ("ort_webgpu.wgsl",),
    "ort_webgpu.graph_tools": ("ort_webgpu.graph_tools",),
    "ort_webgpu.ops": (
        "ort_webgpu.ops",
        "ort_webgpu.wgsl.kernel",
        "ort_webgpu.errors",
        "ort_webgpu.graph_tools.nodes",
    ),
    "ort_webgpu.commands": ("ort_webgpu.errors",),
    "ort_webgpu.adapters": ("ort_webgpu.errors", "ort_webgpu.ops.spec"),
    "ort_webgpu.pool": (),
    "ort_webgpu.device": (
        "ort_webgpu.adapters",
        "ort_webgpu.pool",
        "ort_webgpu.wgsl",
        "ort_webgpu.errors",
        "ort_webgpu.ops.spec",
        "ort_webgpu.commands",
    ),
}

# What each package may import from outside the standard library.
OUTSIDE: dict[str, set[str]] = {
    "ort_webgpu.graph_tools": {"onnx", "numpy", "google"},  # google.protobuf: what onnx is made of
    "ort_webgpu.wgsl": {"jinja2"},
    "ort_webgpu.ops": {"numpy"},
}


def sources() -> dict[str, Path]:
    """Every module of the package by its import name."""
    found = {}
    for folder, package in FOLDERS.items():
        for path in (REPOSITORY / folder).rglob("*.py"):
            parts = path.relative_to(REPOSITORY / folder).with_suffix("").parts
            name = ".".join((package, *parts)).removesuffix(".__init__")
            found[name] = path
    return found


SOURCES = sources()


def imports(path: Path) -> Iterator[tuple[str, int]]:
    """Every (module, line) that a file imports, anywhere in it; importlib's calls included."""
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import"
            module = node.module or ""
            names = [f"{module}.{alias.name}" for alias in node.names]
            yield from ((n if n in SOURCES else module, node.lineno) for n in names)
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "import_module":
            target = node.args[0]
            name = target.value if isinstance(target, ast.Constant) else "<computed>"
            yield str(name), node.lineno


def within(module: str, package: str) -> bool:
    return module == package or module.startswith(f"{package}.")


def offences(allowed) -> list[str]:
    """`allowed(importer, imported)` is asked about every import of the package."""
    return [
        f"{path.relative_to(REPOSITORY)}:{line}: {importer} imports {imported}"
        for importer, path in sorted(SOURCES.items())
        for imported, line in imports(path)
        if not allowed(importer, imported)
    ]


def test_imports_follow_the_arrows():
    def allowed(importer: str, imported: str) -> bool:
        if not within(imported, PACKAGE):
            return True
        for package, targets in ARROWS.items():
            if within(importer, package):
                return any(within(imported, target) for target in targets)
        if within(imported, f"{PACKAGE}.conformance"):
            return within(importer, f"{PACKAGE}.conformance") or importer == f"{PACKAGE}.cli"
        return True

    assert offences(allowed) == []


def test_layers_import_only_what_is_outside_for_them():
    def allowed(importer: str, imported: str) -> bool:
        top = imported.partition(".")[0]
        if top == PACKAGE or top in sys.stdlib_module_names:
            return True
        return all(top in names for part, names in OUTSIDE.items() if within(importer, part))

    assert offences(allowed) == []


def test_only_adapters_imports_wgpu():
    def allowed(importer: str, imported: str) -> bool:
        if importer == f"{PACKAGE}.adapters":
            return True
        return imported.partition(".")[0] not in ("wgpu", "wgpudawn", "<computed>")

    assert offences(allowed) == []


def test_folders_are_imported_by_the_package_name():
    # `import wgsl.kernel` works at the repository root, as a second copy of the module
    assert offences(lambda _, imported: imported.partition(".")[0] not in FOLDERS) == []


def test_no_import_cycle():
    arrows = {
        importer: {imported for imported, _ in imports(path) if imported in SOURCES}
        for importer, path in SOURCES.items()
    }
    while leaves := {name for name, targets in arrows.items() if not targets - {name}}:
        arrows = {n: t - leaves for n, t in arrows.items() if n not in leaves}
    # What is left imports each other in a circle, or imports something that does
    assert sorted(arrows) == []


@pytest.mark.parametrize("first", ["provider", PACKAGE])
def test_provider_at_the_root_gives_the_same_class(first: str):
    second = PACKAGE if first == "provider" else "provider"
    code = (
        f"from {first} import WebGPUSession as A\nfrom {second} import WebGPUSession as B\n"
        "assert A is B, (A, B)\nimport onnxruntime\n"
        "assert issubclass(A, onnxruntime.InferenceSession)"
    )
    run_python(code, cwd=REPOSITORY)


def test_no_import_loads_wgpu_or_makes_an_adapter():
    names = [n for n in SOURCES if not n.endswith("__main__")]
    code = (
        f"import importlib, sys\nfor name in {sorted(names)}: importlib.import_module(name)\n"
        "assert not {'wgpu', 'wgpudawn'} & set(sys.modules), 'an import loaded wgpu'"
    )
    run_python(code, cwd=Path(__file__).parent)


def test_package_is_where_it_should_be():
    here = Path(ort_webgpu.__file__).parent
    if wheel := os.environ.get("ORT_WEBGPU_TEST_WHEEL"):
        assert here == Path(wheel) / PACKAGE
        return
    assert here == REPOSITORY / "provider"


@pytest.mark.skipif("ORT_WEBGPU_TEST_WHEEL" not in os.environ, reason="checks the built wheel")
def test_wheel_holds_every_module_and_template():
    root = Path(os.environ["ORT_WEBGPU_TEST_WHEEL"])
    packed = {p.relative_to(root).as_posix() for p in (root / PACKAGE).rglob("*") if p.is_file()}
    written = set()
    for folder, package in FOLDERS.items():
        for pattern in ("*.py", "*.j2", "*.json", "py.typed"):
            for path in (REPOSITORY / folder).rglob(pattern):
                inner = path.relative_to(REPOSITORY / folder).as_posix()
                written.add(f"{package.replace('.', '/')}/{inner}")
    assert {p for p in packed if "__pycache__" not in p} == written
    # Generic names would shadow other people's packages
    assert not [folder for folder in FOLDERS if (root / folder).exists()]


def run_python(code: str, cwd: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], cwd=cwd, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
