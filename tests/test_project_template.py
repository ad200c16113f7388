"""This repository's root is a project such as `lean-finetune init` makes: one template, no file maintained twice."""

from lean_finetune.commands.project.template import OWN, TEMPLATE, template_files, template_links
from lean_finetune.config.load import COMMON_PARAMS
from tests.conftest import ROOT
from tests.project_template import shared_files


def test_the_template_is_this_repositorys_root():
    """A parameter, stage or plot that new projects lack. The differences are those that project_template.py states."""
    paths = (path for path in TEMPLATE.rglob("*") if path.is_file())
    packed = {path.relative_to(TEMPLATE).as_posix(): path.read_bytes() for path in paths}
    packed.pop("README.md")
    ours = shared_files()
    assert [name for name in {**packed, **ours} if packed.get(name) != ours.get(name)] == [], "run `make project`"


def test_a_projects_stages_are_ours():
    files = {name: text for name, text in template_files().items() if name.startswith("stages/")}
    assert files == {f"stages/{path.name}": path.read_text() for path in (ROOT / "stages").glob("*.py")}


def test_a_projects_links_are_ours():
    """DVC refuses a pipeline without a dependency."""
    ours = {path.relative_to(ROOT).as_posix() for path in (ROOT / "locks").rglob("*") if path.is_symlink()}
    assert set(template_links()) == ours


def test_the_readme_of_a_project_is_short():
    """All on one screen: commands, what to change first, where results are."""
    assert len(template_files()[OWN[0]].splitlines()) <= 40
    assert COMMON_PARAMS.parent == TEMPLATE.parent
