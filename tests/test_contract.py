"""dvc.yaml == imports: a stage whose code deps are short of its imports would keep a stale cache after an edit."""

import ast
import shlex
from pathlib import Path

import pytest
from ruamel.yaml import YAML

ROOT = Path(__file__).parents[1]
STAGES = YAML(typ="safe").load((ROOT / "dvc.yaml").read_text())["stages"]


def import_closure(path: Path, seen: set[Path] | None = None) -> set[Path]:
    """Every file of this project that `path` imports, directly or not, itself included; relative to the root."""
    seen = set() if seen is None else seen
    if path in seen:
        return seen
    seen.add(path)
    for node in ast.walk(ast.parse((ROOT / path).read_text())):
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert node.level == 0, f"{path}: relative import hides its target from this test"
            modules = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        else:
            continue
        for module in modules:
            file = Path(*module.split(".")).with_suffix(".py")
            if module.startswith(("stages.", "lean_finetune.")) and (ROOT / file).exists():
                import_closure(file, seen)
    return seen


def entry_file(stage: str) -> Path:
    """The file that the stage's command runs."""
    argv = shlex.split(STAGES[stage]["cmd"])
    assert argv[:2] == ["python", "-m"], "a script path would import the workspace's code in --temp runs"
    return Path(*argv[2].split(".")).with_suffix(".py")


@pytest.mark.parametrize("stage", STAGES)
def test_code_deps_equal_the_import_closure(stage):
    """An unlisted helper leaves a stale cache; a listed file that is not imported reruns stages for nothing."""
    listed = {Path(dep) for dep in STAGES[stage]["deps"] if dep.endswith(".py")}
    assert listed == import_closure(entry_file(stage))


@pytest.mark.parametrize("stage", STAGES)
def test_no_entry_imports_another_entry(stage):
    """A stage that imports another's entry would couple their command lines."""
    entries = {path for path in import_closure(entry_file(stage)) if path.parent == Path("stages")}
    assert entries == {entry_file(stage)}


def test_packages_are_empty():
    """Code in __init__.py would be a dependency that no list names."""
    assert [
        str(p)
        for room in ("lean_finetune", "stages")
        for p in (ROOT / room).rglob("__init__.py")
        if p.read_text().strip()
    ] == []
