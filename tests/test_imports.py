"""The imports of titan_gdn: no circles, and lower layers of the code never import higher ones."""

import ast
import pathlib
from typing import NamedTuple

import pytest

import titan_gdn

ROOT = pathlib.Path(titan_gdn.__file__).parent

# From the ground up. A room is a folder or a file; "models/*" is the folder of each model family. A file may
# import from its own room and from lower floors.
FLOORS = [
    ("assets", "ops", "runtime"),
    ("checkpoint", "data", "display", "endings"),
    ("parallel",),
    ("layers",),
    ("models/hybrid",),
    ("models/*", "models"),
    ("config",),
    ("bench", "convert", "plan", "reference", "train"),
]


class Import(NamedTuple):
    """`names` that the file `importer` takes from the file `imported`, or from a package outside."""

    importer: str
    imported: str
    names: str
    deferred: bool  # inside a function: not when the file is imported

    def __str__(self) -> str:
        return f"{self.importer} imports {self.names} from {self.imported}"


def imports_of(path):
    """Every import of a file, those under TYPE_CHECKING and inside functions too."""
    tree = ast.parse(path.read_text())
    importer = path.relative_to(ROOT).as_posix()
    inside = {
        id(node)
        for function in ast.walk(tree)
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        for node in ast.walk(function)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(importer, file_of(alias.name) or alias.name, alias.name, id(node) in inside)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{importer}: relative imports are not used here"
            # A name of a package may be a file of it, or something that its __init__.py defines.
            for alias in node.names:
                imported = file_of(f"{node.module}.{alias.name}") or file_of(node.module) or node.module
                yield Import(importer, imported, alias.name, id(node) in inside)


def file_of(module):
    """The file of a module of titan_gdn, relative to it; None for other packages and for other names."""
    package, *parts = module.split(".")
    if package != "titan_gdn":
        return None
    path = ROOT.joinpath(*parts)
    for candidate in (path.with_suffix(".py"), path / "__init__.py"):
        if candidate.is_file():
            return candidate.relative_to(ROOT).as_posix()
    return None


def room_of(file):
    """`models/hybrid/block.py` is of the room `models/hybrid`, `train.py` of `train`."""
    first, *rest = file.removesuffix(".py").split("/")
    return f"models/{rest[0]}" if first == "models" and len(rest) > 1 else first


def floor_of(room):
    family = room.startswith("models/") and room != "models/hybrid"
    (floor,) = [i for i, rooms in enumerate(FLOORS) if ("models/*" if family else room) in rooms]
    return floor


@pytest.fixture(scope="module")
def imports():
    found = [one for path in sorted(ROOT.rglob("*.py")) for one in imports_of(path)]
    assert len(found) > 300, "the reader of imports finds none"
    return found


@pytest.fixture(scope="module")
def ours(imports):
    """Those of titan_gdn's own files; `titan_gdn/__init__.py` holds nothing."""
    assert not any(one.importer == "__init__.py" for one in imports)
    return [one for one in imports if one.imported.endswith(".py") and one.imported != "__init__.py"]


def test_no_file_imports_itself_through_others(ours):
    """Imports under TYPE_CHECKING count. Imports inside functions do not: they run when both files exist."""
    graph = {}
    for one in ours:
        if not one.deferred:
            graph.setdefault(one.importer, set()).add(one.imported)
    wrong = [str(one) for one in ours if not one.deferred and one.importer in reach(graph, one.imported)]
    assert not wrong, "each of these is part of a circle:\n" + "\n".join(wrong)


def reach(graph, file):
    """The file, what it imports, what that imports, and so on."""
    found, left = set(), [file]
    while left:
        file = left.pop()
        if file not in found:
            found.add(file)
            left.extend(graph.get(file, ()))
    return found


def test_no_file_imports_from_a_higher_floor_or_from_a_room_beside_it(ours):
    """An import inside a function counts too."""
    wrong = []
    for one in ours:
        here, there = room_of(one.importer), room_of(one.imported)
        if here != there and floor_of(there) >= floor_of(here):
            where = "above" if floor_of(there) > floor_of(here) else "beside"
            wrong.append(f"{one}: {there} is {where} {here}")
    assert not wrong, "\n" + "\n".join(wrong)


@pytest.mark.parametrize("room", ["checkpoint", "ops", "parallel"])
def test_operators_exchanges_and_checkpoints_import_neither_torchtitan_nor_fla(imports, room):
    """FLA where a kernel runs, inside a function: importing it takes seconds."""
    packages = {"fla": True, "torchtitan": False}  # and whether a function may import it
    wrong = []
    for one in imports:
        package = one.imported.split(".")[0]
        if room_of(one.importer) == room and package in packages:
            if not (one.deferred and packages[package]):
                wrong.append(str(one))
    assert not wrong, "\n" + "\n".join(wrong)
