"""The measure of the house: what it counts, and that it still finds each capability."""

import ast

import pytest

from benchmarks import house
from tests.conftest import ROOT


def test_a_file_is_foreign_unless_its_name_or_its_package_is_of_the_capability(monkeypatch: pytest.MonkeyPatch):
    """A capability that moves into a package of its own would count as spread as before."""
    modules = {"lean_finetune/plan/rows.py": "images = 1", "lean_finetune/plan/row_images.py": "images = 1"}
    modules |= {"lean_finetune/seen/rows.py": "images = 1", "cuda_memory/page.py": "images = 1"}
    named = house.naming_files(modules)
    assert named["images"] == [path for path in modules if path.startswith("lean_finetune/")] and not named["experts"]
    assert [house.is_home(path, "images") for path in named["images"]] == [False, True, False]
    monkeypatch.setattr(house, "ISLANDS", {"seen": "images"})
    assert [house.is_home(path, "images") for path in named["images"]] == [False, True, True]
    assert not house.is_home("lean_finetune/seen/rows.py", "experts")


def test_every_capability_is_found_in_the_library_and_every_island_exists():
    """A renamed parameter or package makes its line of the table 0, which looks like success."""
    named = house.naming_files(house.sources())
    assert len(named) == 18 and [name for name, files in named.items() if not files] == []
    assert [name for name in house.ISLANDS if not (ROOT / "lean_finetune" / name).is_dir()] == []


@pytest.mark.parametrize(
    ("code", "count"),
    [
        ("x = a.images is None", 1),
        ("x = images if (images := f()) is not None else 2", 1),
        ("x = p.train.objective == 'sft'", 1),
        ("x = rows.kind is RowKind.PAIR", 1),
        ("x = 1 if isinstance(a.goal, PairObjective) else isinstance(b, int)", 1),
        ("if run.images and not p.scores: pass", 2),
        ("if p.train.goal.compares: pass", 1),
        ("x = [row for row in rows if row.answers]", 1),
        ("x = device.kind == 'cuda' or a is None", 0),
        ("x = images + 1 if a.count(images) else images", 0),
    ],
)
def test_decisions_on_kinds_are_counted(code: str, count: int):
    assert house.branches(ast.parse(code)) == count


def test_an_assembler_makes_most_parts_of_a_run():
    """The file that only loads a model, or only reads pins, is none."""
    parts = ["read_model_lock(a)", "locate.model_directory(b)", "read_config(c)", "resolved(d)"]
    assert house.assembles_run(ast.parse("\n".join(parts)))
    assert not house.assembles_run(ast.parse("\n".join([*parts[:3], "load_base(c)", "resolved"])))


def test_imports_count_modules_once_and_also_within_functions():
    sources = {
        "a/__init__.py": "",
        "a/b.py": "import a.c\nfrom a import c\ndef f():\n    from a.d import g",
        "a/c.py": "",
    }
    sources |= {"a/d.py": "from a.c import x\nimport os"}
    found = house.imported({path: ast.parse(source) for path, source in sources.items()})
    assert found["a/b.py"] == {"a/c.py", "a/d.py"} and found["a/d.py"] == {"a/c.py"}


def test_a_walk_counts_named_functions_and_no_bodies_of_classes(monkeypatch: pytest.MonkeyPatch):
    """The old figure counted 41 files of which only bodies of classes run, when they are imported."""
    monkeypatch.setattr(house, "library_file", lambda name: "here.py" if name == "here.py" else None)
    source = """
class A:
    x = [n for n in range(2)]
    def m(self):
        return (lambda: 1)()
def f():
    return A().m()
f(); f()
"""
    found = house.walk(lambda: exec(compile(source, "here.py", "exec"), {}))
    assert list(found.calls) == [("here.py", "f"), ("here.py", "A.m")] and found.changes == 0
    found.calls = dict.fromkeys([("a.py", "f"), ("b.py", "g"), ("b.py", "h"), ("a.py", "k")])
    assert found.changes == 2


def test_the_table_names_the_files_that_it_counts():
    modules = {"lean_finetune/a.py": "def f(images):\n    return 1 if images else 2\n", "stages/b.py": "import x"}
    short, long = (list(house.figures_of_text(modules, show_files)) for show_files in (False, True))
    assert ("foreign files that name images", 1, "<= 20") in short
    listed = [name.strip() for name, figure, _ in long if figure == ""]
    assert listed == ["lean_finetune/a.py", "lean_finetune/a.py 1", "lean_finetune/a.py"]
