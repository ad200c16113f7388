"""Imports run one way: a room imports those above it in this list, never one below."""

import ast
from pathlib import Path

from tests.conftest import ROOT

PACKAGE = "lean_finetune"
ROOMS = """
core config pinning
data/read data/format data/chat data/encode data/shards
plan model step distributed
memory memory/trace memory/predict memory/allocator memory/advice memory/estimate
train/monitor train/oom train/process train/checkpoint train/callbacks train
evaluate report
""".split()
MOST_MODULES = 15


def imported_rooms(path: Path) -> set[str]:
    """The rooms that a module imports from."""
    names: list[str] = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names += [f"{node.module}.{alias.name}" for alias in node.names]
    folders = [name.split(".")[1:] for name in names if name.startswith(f"{PACKAGE}.")]
    return {next(room for n in (2, 1) if (room := "/".join(parts[:n])) in ROOMS) for parts in folders}


def test_no_room_imports_one_below_it():
    """A cycle between rooms: nobody could then read, test or replace one of them alone."""
    wrong = []
    for number, room in enumerate(ROOMS):
        for path in sorted((ROOT / PACKAGE / room).glob("*.py")):
            wrong += [f"{path.name}: {other}" for other in imported_rooms(path) if ROOMS.index(other) > number]
    assert wrong == []


def test_every_module_is_in_a_room_of_few():
    """A folder of 56 modules, in which nobody finds anything."""
    found = {path.parent.relative_to(ROOT / PACKAGE).as_posix() for path in (ROOT / PACKAGE).rglob("*.py")}
    parents = {"data"}
    assert found - {"."} - parents == set(ROOMS)
    sizes = {room: len(list((ROOT / PACKAGE / room).glob("[!_]*.py"))) for room in ROOMS}
    assert max(sizes.values()) <= MOST_MODULES, sizes
