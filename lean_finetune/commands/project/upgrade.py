"""Compare a project with the template of the installed version, and bring it to that version."""

import json
import os
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from lean_finetune.commands.project.merge_params import merge_params
from lean_finetune.commands.project.template import (
    FORMER,
    IGNORE_FILES,
    PARAMS,
    STAMP,
    generated_files,
    installed_version,
    stamp,
    template_files,
    template_links,
    text_hash,
    with_missing_lines,
)
from lean_finetune.commands.project.write_all import undone_after_fault, write_all
from lean_finetune.config.load import parse_params
from lean_finetune.core.atomic_files import write_errors
from lean_finetune.core.errors import UserError, shortened
from lean_finetune.core.file_names import refuse_link_out
from lean_finetune.core.read_yaml import parse_yaml, read_yaml
from lean_finetune.pinning.config_file import NotAnObject, read_object


@dataclass(frozen=True, kw_only=True)
class Upgrade:
    """What brings a project to the installed version."""

    made_by: str
    """The version whose files the project has."""
    files: dict[str, str | None] = field(default_factory=dict)
    """The text of each file to write; None: it is removed."""
    links: dict[str, str] = field(default_factory=dict)
    lines: list[str] = field(default_factory=list)
    """What differs, for the user: first what is changed, then what stays."""

    @property
    def needed(self) -> bool:
        """Whether a file of the project changes."""
        return bool(self.files or self.links)


def find_upgrade(directory: Path) -> Upgrade:
    """What differs between a project and the template of the installed version.

    Raises:
        UserError: there is no project, its stamp names other files than a project's, its params.yaml cannot be merged,
            or a link leads out of it.
    """
    ours = generated_files()
    made_by, hashes = _read_stamp(directory, {*ours, *FORMER})
    files: dict[str, str | None] = {}
    changed, kept = [], []
    for name in sorted({*ours, *hashes}):
        text, was = _text(directory / name), hashes.get(name)
        new = ours.get(name)
        if text == new:
            continue
        if text is None:
            files[name] = new
            changed.append(f"{name}: is missing")
        elif text_hash(text) == was:
            files[name] = new
            changed.append(f"{name}: is of another version" if new is not None else f"{name}: is not used any more")
        elif new is None:
            kept.append(f"{name}: edited by you, and stays, although this version does not use it")
        elif text_hash(new) == was:
            kept.append(f"{name}: edited by you, and stays")
        else:
            kept.append(f"{name}: edited by you, and stays, although this version's differs; move it away to get that")
    for name in IGNORE_FILES:
        text = _text(directory / name) or ""
        if (new := with_missing_lines(text, template_files()[name])) != text:
            files[name] = new
            changed.append(f"{name}: lacks {', '.join(line for line in new[len(text) :].splitlines() if line)}")
    if lines := list(_merge_params(directory, files)):
        changed += lines
    links = {name: to for name, to in template_links().items() if not os.path.lexists(directory / name)}
    changed += [f"{name}: is missing" for name in links]
    for path in (*map(Path, files), *(Path(link).parent for link in links)):
        refuse_link_out(directory, directory / path)
    return Upgrade(made_by=made_by, files=files, links=links, lines=changed + kept)


def _read_stamp(directory: Path, known: Collection[str]) -> tuple[str, Mapping[str, str]]:
    """The version that made a project, and the hashes of the files that it wrote.

    Raises UserError if one is not `known` as a file that a version writes: an upgrade may remove it.
    """
    path = directory / STAMP
    if not path.is_file():
        raise UserError(
            f"{directory}: is no project of `lean-finetune init`: it has no {STAMP}; name another directory"
        )
    try:
        content = read_object(path)
        made_by, hashes = str(content["version"]), {name: str(digest) for name, digest in content["files"].items()}
    except (NotAnObject, LookupError, TypeError, AttributeError) as error:
        raise UserError(f"{path}: cannot be read ({error}); restore it with git") from None
    if other := sorted(hashes.keys() - set(known)):
        raise UserError(
            f"{path}: names {shortened(other[0])!r}, which no version up to {installed_version()} writes; restore it "
            f"with git, or install lean-finetune {shortened(made_by)}, which made the project"
        )
    return made_by, hashes


def _text(path: Path) -> str | None:
    """The text of a file, with the bytes of other encodings as surrogates; None if there is none."""
    return path.read_text(encoding="utf-8", errors="surrogateescape") if path.is_file() else None


def _merge_params(directory: Path, files: dict[str, str | None]) -> Iterator[str]:
    """Add the merged params.yaml to `files` if it differs; yield what differs."""
    path, template = directory / PARAMS, template_files()[PARAMS]
    if not path.is_file():
        files[PARAMS] = template
        yield f"{PARAMS}: is missing"
        return
    if not isinstance(read_yaml(path, "is missing"), Mapping):
        raise UserError(f"{path}: must be a mapping of sections; change it")
    merged = merge_params(path.read_text(encoding="utf-8"), template)
    parse_params(parse_yaml(merged.text), path)  # Also without new keys: a section may be blank.
    if not (merged.added or merged.removed):
        return
    files[PARAMS] = merged.text
    for key, value in merged.added.items():
        yield f"{PARAMS}: {key} is new" + ("" if isinstance(value, Mapping) else f" ({_shown(value)})")
    for key, value in merged.removed.items():
        yield f"{PARAMS}: {key} is no parameter any more; it was {_shown(value)}"


def _shown(value: object) -> str:
    return "blank" if value is None else json.dumps(value, default=str)


def apply_upgrade(directory: Path, found: Upgrade) -> None:
    """Write all files of an upgrade, or none. Raises UserError if the disk cannot be written."""
    here = Path(os.path.abspath(directory))
    with write_errors(directory), undone_after_fault(here) as undo:
        write_all(here, {**found.files, STAMP: stamp()}, found.links, undo)


def version_line(directory: Path, found: Upgrade) -> str:
    """Which version made a project, and which is installed."""
    installed = installed_version()
    if found.made_by == installed:
        return f"{directory}: a project of lean-finetune {installed}"
    return f"{directory}: a project of lean-finetune {found.made_by}; {installed} is installed"
