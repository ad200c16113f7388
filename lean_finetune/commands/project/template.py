"""The files of a project, as `lean-finetune init` writes them."""

import hashlib
import json
from importlib.metadata import version
from pathlib import Path

from lean_finetune.pinning.watched_links import DIRECTORY_LINKS, FILE_LINKS, MODEL_LINKS, NOTHING_LOCAL

PACKAGE = Path(__file__).parents[2]
TEMPLATE = PACKAGE / "project"
DOTTED = ("dvc", "dvcignore", "gitignore")
"""Names in the template that begin with a dot in a project."""
ENTRY = """{docstring}

from lean_finetune.stages.{name} import main

if __name__ == "__main__":
    main()
"""
PARAMS, SAMPLE = "params.yaml", "data/raw/sample.jsonl"
IGNORE_FILES = (".gitignore", ".dvcignore", "data/.gitignore")
"""Files whose missing lines are appended: the user and DVC write to them, too."""
OWN = ("README.md", SAMPLE)
"""Files that belong to the user once they are written."""
FORMER: tuple[str, ...] = ()
"""Files that an earlier version wrote and this one does not, which an upgrade removes: a dropped name goes here."""
STAMP = "locks/project.json"
"""The version that made a project, and the hash of each file as it wrote them."""


def template_files() -> dict[str, str]:
    """The text of each file of a project with default parameters, by its path there."""
    files = {}
    for path in TEMPLATE.rglob("*"):
        if path.is_file():
            parts = path.relative_to(TEMPLATE).parts
            files["/".join(f".{part}" if part in DOTTED else part for part in parts)] = path.read_text(encoding="utf-8")
    for path in (PACKAGE / "stages").glob("*.py"):
        docstring = path.read_text(encoding="utf-8").partition("\n")[0]
        files[f"stages/{path.name}"] = ENTRY.format(docstring=docstring, name=path.stem) if docstring else ""
    return dict(sorted(files.items()))


def template_links() -> dict[str, str]:
    """The target of each link through which DVC watches sources: at first, of nothing local."""
    nothing = NOTHING_LOCAL.name
    here = {f"locks/{name}": nothing for name in (*DIRECTORY_LINKS, *MODEL_LINKS)}
    return {**here, f"locks/{FILE_LINKS}/0": f"../{nothing}"}


def generated_files() -> dict[str, str]:
    """The files that an upgrade may replace."""
    return {name: text for name, text in template_files().items() if name not in (PARAMS, *IGNORE_FILES, *OWN)}


def installed_version() -> str:
    """The version of this package."""
    return version("lean-finetune")


def text_hash(text: str) -> str:
    """Hex SHA-256 of a text."""
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()


def stamp() -> str:
    """The text of the stamp of this version."""
    hashes = {name: text_hash(text) for name, text in generated_files().items()}
    return json.dumps({"version": installed_version(), "files": hashes}, indent=2) + "\n"


def with_missing_lines(text: str, template: str) -> str:
    """An ignore file with the lines of the template that it lacks."""
    has = text.splitlines()
    missing = [line for line in template.splitlines() if line not in has]
    if missing and text and not text.endswith("\n"):
        text += "\n"
    return text + "".join(f"{line}\n" for line in missing)
