"""Make a project: the files of the template with the user's values, in a git and DVC repository."""

import glob
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cuda_memory.user_paths import no_option, shell_line, text_path, user_path
from lean_finetune.commands.project.params_file import change_params
from lean_finetune.commands.project.repository import (
    enclosing_repository,
    git,
    has_identity,
    stage_files,
    start_dvc,
    start_git,
)
from lean_finetune.commands.project.template import (
    IGNORE_FILES,
    PARAMS,
    SAMPLE,
    STAMP,
    installed_version,
    stamp,
    template_files,
    template_links,
    with_missing_lines,
)
from lean_finetune.commands.project.write_all import undone_after_fault, write_all
from lean_finetune.config.field_types import HUB_PREFIX
from lean_finetune.config.load import COMMON_PARAMS, parse_values
from lean_finetune.core.atomic_files import write_errors
from lean_finetune.core.errors import UsageFault, UserError
from lean_finetune.core.file_names import refuse_link_out
from lean_finetune.core.read_yaml import parse_yaml, read_yaml
from lean_finetune.memory.gpu_names import named_gpu
from lean_finetune.pinning.config_file import glob_base
from lean_finetune.pinning.hub import HUB_ID, gated_note
from lean_finetune.pinning.locate import TINY, example_names, find_model
from lean_finetune.pinning.watched_links import refuse_outputs

MOST_BYTES = 1 << 28
"""Size of a file whose first rows are looked at: it is hashed for that."""
BY_ROWS = (("train", "tokens_per_step"), ("train", "heldout_every_steps"), ("evaluate", "max_new_tokens"))
"""Parameters that suit the shipped sample in a new project, and are chosen from the rows where these are the user's."""
PIPELINE = "dvc.yaml"
README = "README.md"


@dataclass(frozen=True, kw_only=True)
class Choices:
    """What the user chose for a new project; None: the default."""

    model: str | None = None
    data: str | None = None
    gpu: str | None = None
    method: str | None = None
    sets: Mapping[str, Any] = field(default_factory=dict)
    """Values of further parameters, by section."""


def create_project(directory: Path, choices: Choices) -> list[str]:
    """Make a project in a directory; return the lines that say what was done and what comes next.

    Raises:
        UserError: it cannot be made there, or a choice is wrong. Nothing is written then.
    """
    with new_project(directory, choices) as (done, added):
        here = Path(os.path.abspath(directory))
        return [*done, "next:", *(f"  {command}" for command in _next_commands(directory, here, added, choices))]


@contextmanager
def new_project(directory: Path, choices: Choices) -> Iterator[tuple[list[str], list[str]]]:
    """Make a project; yield the lines that say what was done, and the paths to add to git.

    If the block raises an exception, all is undone.

    Raises:
        UserError: it cannot be made there, or a choice is wrong. Nothing is written then.
    """
    here = Path(os.path.abspath(directory))
    if here.exists() and not here.is_dir():
        raise UserError(f"{directory}: is a file; name a directory")
    was_empty = not (here.is_dir() and any(here.iterdir()))
    params = params_text(here, choices)
    files = _new_files(directory, here, params, sample=choices.data is None)
    appended = [name for name in IGNORE_FILES if name in files and (here / name).is_file()]
    kept = [README] if README not in files else []
    with ExitStack() as block:
        with write_errors(directory):
            undo = block.enter_context(undone_after_fault(here))
            repository = enclosing_repository(here)
            started = []
            if repository is None:
                start_git(here, undo)
                started.append("git init")
            if not (here / ".dvc").is_dir():
                start_dvc(here, repository or here, undo)
                started.append("dvc init")
            write_all(here, files, {}, undo)
            # After .gitignore, which decides which rows copies of the project have.
            links = {name: to for name, to in _links(here, params).items() if not (here / name).is_symlink()}
            write_all(here, {}, links, undo)
            # Stages refuse rows in the project that git neither tracks nor ignores.
            stage_files(here, sorted({*files, *links} - {*appended}), undo)
        added = ["."] if was_empty else sorted({name.partition("/")[0] for name in (*files, *links, ".dvc/config")})
        yield _done_lines(directory, params, started, appended, kept, choices), added


def _done_lines(
    directory: Path, params: str, started: list[str], appended: list[str], kept: list[str], choices: Choices
) -> list[str]:
    """What was done, and what the user should know of the model and the rows."""
    done = f"{directory}: a new project of lean-finetune {installed_version()}"
    lines = [f"{done} ({', '.join(started)})" if started else done]
    lines += [f"{name}: lines added" for name in appended] + [f"{name}: yours is kept" for name in kept]
    if (note := gated_note(parse_yaml(params)["model"]["name"])) is not None:
        lines.append(f"note: {note}")
    if choices.data is not None and (need := _objective_note(choices.data, params)) is not None:
        lines.append(f"note: {need}")
    return lines


def _new_files(directory: Path, here: Path, params: str, *, sample: bool) -> dict[str, str]:
    """The text of each file to write.

    Raises UserError if a file of the user would be overwritten, or a link leads out of the directory.
    """
    if (here / STAMP).is_file():
        raise UserError(f"{directory}: is a project already; `lean-finetune init --upgrade` brings it to this version")
    files = {**template_files(), PARAMS: params, STAMP: stamp()}
    if not sample:
        del files[SAMPLE]
    if (here / README).exists():
        del files[README]
    for path in (*map(Path, files), *(Path(link).parent for link in template_links())):
        refuse_link_out(here, here / path)
    present = {name: _text(here / name) for name in files if os.path.lexists(here / name)}
    for name in IGNORE_FILES:
        if present.get(name) is not None:
            files[name] = with_missing_lines(str(present.pop(name)), files[name])
    wrong = [name for name, text in present.items() if text != files[name]]
    if PIPELINE in wrong:
        raise UserError(f"{directory}: has another project's {PIPELINE}; name another directory")
    wrong += [name for name in template_links() if os.path.lexists(here / name) and not (here / name).is_symlink()]
    if wrong:
        raise UserError(
            f"{directory}: {', '.join(wrong)} would be overwritten; name another directory, or move them away"
        )
    return {name: text for name, text in files.items() if present.get(name) != text}


def _text(path: Path) -> str | None:
    """The text of a file, with the bytes of other encodings as surrogates; None if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="surrogateescape") if path.is_file() else None
    except OSError:
        return None


def params_text(here: Path, choices: Choices) -> str:
    """The params.yaml of a new project. Raises UserError for a wrong choice."""
    values: dict[str, Any] = {}
    common = read_yaml(COMMON_PARAMS, "is missing")
    if choices.model not in (None, TINY):
        values = {name: common[name] for name in ("bucket", "train", "evaluate")} | {
            "data": {"max_length": common["data"]["max_length"]}
        }
    elif choices.data is not None:
        for section, key in BY_ROWS:
            values = merged(values, {section: {key: common[section][key]}})
    values = merged(values, chosen_values(here, choices))
    with tempfile.TemporaryDirectory() as made:
        path = Path(made) / PARAMS
        path.write_text(template_files()[PARAMS], encoding="utf-8")
        if values:
            change_params(values, path, path)
        return path.read_text(encoding="utf-8")


def chosen_values(here: Path, choices: Choices) -> dict[str, Any]:
    """The parameters that the user chose, by section. Raises UserError for a wrong choice."""
    values: dict[str, Any] = {}
    if choices.gpu is not None and choices.gpu.strip().lower() != "auto":
        try:
            named_gpu(choices.gpu)
        except UserError as error:
            raise UsageFault(str(error)) from None
    chosen = {
        ("model", "name"): choices.model and _model(here, choices.model),
        ("data", "source"): choices.data and _data(here, choices.data),
        ("hardware", "gpu"): choices.gpu,
        ("train", "method"): choices.method,
    }
    for (section, key), value in chosen.items():
        if value is not None:
            values[section] = {**values.get(section, {}), key: value}
    return merged(values, choices.sets)


def merged(values: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """Sections of parameters with the values of `other`."""
    both = {
        key: merged(values[key], other[key]) for key in values.keys() & other.keys() if isinstance(other[key], Mapping)
    }
    return {**values, **other, **both}


def _model(here: Path, name: str) -> str:
    """The value of model.name."""
    path = text_path(name, "--model")
    if not path.exists():
        if name in example_names():
            raise UserError(f"--model: {name} is a configuration without weights, for `fit`; name the model itself")
        if name == TINY or HUB_ID.fullmatch(name):
            return name
    return _from_project(here, find_model(str(path)))


def _data(here: Path, source: str) -> str:
    """The value of data.source."""
    if source.startswith(HUB_PREFIX):
        if not HUB_ID.fullmatch(source.removeprefix(HUB_PREFIX)):
            raise UsageFault(f"--data: a hub data set is {HUB_PREFIX}org/name; got {source!r}")
        return source
    path = text_path(source, "--data")
    if not path.exists() and not (glob.has_magic(str(path)) and glob.glob(str(path), recursive=True)):
        raise UserError(f"--data: must be a file, a glob, a directory or {HUB_PREFIX}org/name; there is no {source}")
    refuse_outputs("--data", source, path if path.exists() else Path(glob_base(str(path))), project=here)
    return _from_project(here, path)


def _from_project(here: Path, path: Path) -> str:
    """A path as params.yaml names it: relative to the project if it is in it, else absolute."""
    absolute = Path(os.path.abspath(path))
    return absolute.relative_to(here).as_posix() if absolute.is_relative_to(here) else str(absolute)


def _objective_note(source: str, params: str) -> str | None:
    """What train.objective the rows of a local file need, if they say so; None for all others."""
    from lean_finetune.data.shards.tokenize_job import needs_objective  # Here: only rows need them.
    from lean_finetune.pinning.data_source import unwatched_lock

    path = user_path(source, "--data")
    if not path.is_file() or path.stat().st_size > MOST_BYTES:
        return None
    p = parse_values(parse_yaml(params))
    data = p.data.model_copy(update={"source": str(path.absolute()), "split": None, "config": None, "revision": None})
    try:
        return needs_objective(data, unwatched_lock("--data", data), p.train.row_kind)
    except UserError:  # Of rows that cannot be read; stage tokenize says so.
        return None


def _links(here: Path, params: str) -> dict[str, str]:
    """The target of each link as the first run would write it, which then changes no file that git tracks."""
    links, values = template_links(), parse_yaml(params)
    data, model, adapter = values["data"]["source"], values["model"]["name"], values["model"].get("adapter")
    if isinstance(data, str) and not data.startswith(HUB_PREFIX):
        is_glob = glob.has_magic(data) and not os.path.exists(here / data)
        links["locks/watched-data"] = _link_text(here, glob_base(data) if is_glob else data)
    if os.path.isdir(here / model):
        links["locks/watched-model"] = _link_text(here, model)
    if adapter is not None and os.path.isdir(here / adapter):
        links["locks/watched-adapter"] = _link_text(here, adapter)
    return links


def _link_text(here: Path, value: str) -> str:
    """The target of a link in locks/, relative for what copies of the repository have too: see `watch`."""
    path = Path(os.path.abspath(here / value))
    in_copies = path.is_relative_to(here) and git(here, "check-ignore", "-q", str(path)).returncode != 0
    return os.path.relpath(path, here / "locks") if in_copies else str(path)


def _next_commands(directory: Path, here: Path, added: list[str], choices: Choices) -> list[str]:
    """What the user does next, in a shell."""
    commands = []
    if shutil.which("dvc") is None:
        commands.append(f"source {shell_line([os.path.join(sys.prefix, 'bin', 'activate')])}")
    if here != Path.cwd():
        commands.append(shell_line(["cd", no_option(directory)]))
    if not has_identity(here):
        commands.append('git config user.name "Your Name" && git config user.email you@example.org')
    if choices.model or choices.data:
        commands.append("lean-finetune plan   # writes the fastest memory switches that fit into params.yaml")
    commands.append(f'git add {shell_line(added)} && git commit -m "Start a lean-finetune project"')
    return [*commands, "dvc repro            # train; then open data/report/report.html"]
