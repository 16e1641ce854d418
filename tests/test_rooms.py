"""The rooms of the design page: it lists every module, and a module imports only what is listed below its room."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "paceline"
EXCEPTIONS = {
    "paceline.settings -> paceline.strategies": "--strategy is checked against the table of names, which imports nothing",
    "paceline.launch.boot -> paceline.loop.unwinding": "boot sees how the script ends, and unwinding knows at which step",
}
MODULES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for path in PACKAGE.rglob("*.py")
}
WITHOUT_TORCH = ("wires", "folder", "settings", "faults", "launch", "cluster", "watch", "cli")


def listed() -> list[str]:
    """The lines of the page's list of files, below `paceline/`."""
    page = (ROOT / "docs" / "design.md").read_text().partition("```\npaceline/\n")[2]
    return page.partition("\nexamples/")[0].split("\n")


def rooms() -> list[str]:
    """The rooms from the top of the list to its bottom; a module that lies in none is one of its own."""
    names = [line.split()[0] for line in listed() if line[2] != " "]
    return [name.removesuffix("/").removesuffix(".py") for name in names]


def room_of(module: str) -> str:
    return module.split(".")[1] if "." in module else "__init__"


def imports(module: str) -> Iterator[str]:
    """What a module imports when it is used; not what it names for the type checker alone."""
    package = module if MODULES[module].name == "__init__.py" else module.rpartition(".")[0]

    def walk(node: ast.AST) -> Iterator[str]:
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            return
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parents = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*parents, *([node.module] if node.module else [])])
            whole = [f"{base}.{alias.name}" for alias in node.names]
            yield from (name if name in MODULES else base for name in whole)
        for child in ast.iter_child_nodes(node):
            yield from walk(child)

    return (name for name in walk(ast.parse(MODULES[module].read_text())) if name in MODULES)


def test_every_module_is_listed_in_its_room() -> None:
    found, above = set(), ["", ""]
    for line in listed():
        depth = (len(line) - len(line.lstrip())) // 2 - 1
        for name in line.split():
            path = "".join(above[:depth]) + name.removesuffix(",")
            if not path.endswith((".py", "/")):
                break
            if path.endswith("/"):
                above[depth:] = [name, ""]
            else:
                found.add(path)
    there = {str(path.relative_to(PACKAGE)) for path in PACKAGE.rglob("*.py") if path.read_text().count("\n") > 1}
    assert found == there


def test_a_module_imports_only_from_rooms_below_its_own() -> None:
    order = rooms()
    upward = {
        f"{module} -> {other}"
        for module in MODULES
        for other in imports(module)
        if other != "paceline" and order.index(room_of(other)) < order.index(room_of(module))
    }
    assert upward == set(EXCEPTIONS)


@pytest.mark.parametrize("room", WITHOUT_TORCH)
def test_agents_and_verbs_import_no_torch(room: str) -> None:
    """An agent starts in a fraction of a second, and is small, because of this. The programs of a worker import it."""
    programs = ("paceline.cli.probe",)
    names = [name for name in MODULES if room_of(name) == room and name not in programs]
    check = f"import sys; [__import__(name) for name in {names!r}]; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", check], cwd=ROOT).returncode == 0, f"a module of {names} imports torch"


def test_each_meeting_has_a_number_of_its_own() -> None:
    """Workers that came to different places must be seen to: two meetings of one number would be taken for one."""
    numbers: dict[int, str] = {}
    for module, path in MODULES.items():
        for line in ast.parse(path.read_text()).body:
            for call in ast.walk(line) if isinstance(line, ast.Assign) else ():
                match call:
                    case ast.Call(func=ast.Name(id="mix"), args=[ast.Constant(value=int(number))]):
                        assert number not in numbers, f"{number} is one of {numbers[number]} and of {module}"
                        numbers[number] = module
    assert len(numbers) > 20
