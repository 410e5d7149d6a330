"""Who may import whom: the folders' direction, and that controller and command line are free of jax."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("controller", "workers", "proto", "tools")
FORBIDDEN = {
    "controller": {"waypath.workers", "waypath.tools"},
    "workers": {"waypath.controller", "waypath.tools"},
    "proto": {"waypath.controller", "waypath.workers", "waypath.tools"},
    "tools": set[str](),
}


def imported(source: Path) -> Iterator[str]:
    """Every module named by an import statement of a file, whole dotted names; those under TYPE_CHECKING left out."""

    def walk(node: ast.AST) -> Iterator[str]:
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            return
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        for child in ast.iter_child_nodes(node):
            yield from walk(child)

    yield from walk(ast.parse(source.read_text(encoding="utf-8")))


@pytest.mark.parametrize("folder", FOLDERS)
def test_imports_follow_the_direction_of_the_folders(folder: str) -> None:
    sources = [path for path in sorted((ROOT / folder).rglob("*.py")) if not path.stem.endswith(("_pb2", "_pb2_grpc"))]
    assert sources
    wrong = [
        f"{path.relative_to(ROOT)} imports {name}"
        for path in sources
        for name in imported(path)
        if name.split(".")[0] in FOLDERS or any(f"{name}.".startswith(f"{bad}.") for bad in FORBIDDEN[folder])
    ]
    assert wrong == []


def test_only_the_client_s_tracing_imports_jax_and_nobody_loads_it_but_inside_a_function() -> None:
    tracing = ROOT / "controller" / "client" / "tracing.py"
    for path in sorted((ROOT / "controller").rglob("*.py")):
        names = {name.split(".")[0] for name in imported(path)}
        assert path == tracing or not names & {"jax", "jaxlib", "flax"}, f"{path} imports jax"
        at_top = [node for node in ast.parse(path.read_text(encoding="utf-8")).body if isinstance(node, ast.ImportFrom)]
        loaded = {f"{node.module}.{alias.name}" for node in at_top for alias in node.names}
        assert "waypath.controller.client.tracing" not in loaded | {str(node.module) for node in at_top}, path


@pytest.mark.parametrize("module", ["waypath", "waypath.controller.main", "waypath.tools.cli"])
def test_module_loads_without_jax(module: str) -> None:
    program = (
        f"import sys, {module}; sys.exit(sorted(m for m in sys.modules if m.split('.')[0] in ('jax', 'jaxlib')) or 0)"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 0, ended.stderr
