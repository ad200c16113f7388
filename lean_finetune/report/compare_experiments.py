"""Compare experiments: the rows of `make compare`, and whether a stage ran with a row's parameters."""

import json
import subprocess
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path, PurePosixPath
from typing import Any

from ruamel.yaml import YAML

from cuda_memory.terminal import echo, echo_text, visible

# Which stages of an experiment ran with its own parameters and inputs, and so wrote its metrics.
#
# `dvc exp run -S … estimate` commits the metrics of all stages. Those of stages that did not run are of an earlier
# run. dvc.lock says with what each stage ran last.

Lock = Mapping[str, Any]
"""The stages of a dvc.lock."""
HashInside = Callable[[str, PurePosixPath], str | None]
"""Hash of a directory and a path in it → hash of what is there; None if DVC's cache does not have the directory."""
WORKSPACE = "workspace"
"""DVC's name for the files of the checkout."""
TRAINED, CURVES = "data/train", "curves.csv"
"""Output of stage train, and its file with a line for each step."""
ABSENT = object()


def own_stages(lock: Lock, params: Mapping[str, Any], hash_inside: HashInside) -> set[str]:
    """Return the stages that ran with `params`, the content of params.yaml, and with what earlier stages then wrote."""
    producers = {out["path"]: (stage, out["md5"]) for stage, entry in lock.items() for out in entry.get("outs", ())}

    @cache
    def is_own(stage: str) -> bool:
        recorded = lock[stage].get("params", {}).get("params.yaml", {})
        same = all(_parameter(params, name) == value for name, value in recorded.items())
        return same and all(map(is_current, lock[stage].get("deps", ())))

    def is_current(dep: Mapping[str, Any]) -> bool:
        path = PurePosixPath(dep["path"])
        out = next((place for place in (path, *path.parents) if str(place) in producers), None)
        if out is None:
            return True  # No stage writes it. DVC compared it when it ran the experiment.
        producer, written = producers[str(out)]
        if out != path:
            # Without DVC's cache, as in a fresh clone, only parameters and complete outputs are compared.
            written = hash_inside(written, path.relative_to(out)) or dep["md5"]
        return written == dep["md5"] and is_own(producer)

    return {stage for stage in lock if is_own(stage)}


def own_files(lock: Lock, params: Mapping[str, Any], hash_inside: HashInside) -> Iterator[str]:
    """Yield the paths of what `own_stages` wrote."""
    for stage in own_stages(lock, params, hash_inside):
        yield from (out["path"] for out in lock[stage].get("outs", ()))


def lock_of(revision: str) -> Lock:
    """Return the stages of dvc.lock in a commit or in the workspace; empty if it has no such file."""
    if revision == WORKSPACE:
        lock = Path("dvc.lock")
        text = lock.read_text(encoding="utf-8") if lock.exists() else ""
    else:
        text = subprocess.run(
            ["git", "show", f"{revision}:./dvc.lock"], capture_output=True, encoding="utf-8", errors="replace"
        ).stdout
    return (YAML(typ="safe").load(text) or {}).get("stages", {})


def hashes_in_cache() -> HashInside:
    """Return a function that reads listings of directories in the cache of this directory's DVC repository."""
    from dvc.repo import Repo
    from dvc_data.hashfile.hash_info import HashInfo
    from dvc_data.hashfile.tree import Tree

    with Repo() as repo:
        store = repo.cache.local

    @cache
    def listing(md5: str) -> Tree | None:
        return Tree.load(store, HashInfo("md5", md5)) if store.exists(md5) else None

    @cache
    def hash_inside(md5: str, path: PurePosixPath) -> str | None:
        tree = listing(md5)
        if tree is None:
            return None
        below, depth = Tree(), len(path.parts)
        for parts, meta, content in tree:
            if parts == path.parts:
                return content.value
            if parts[:depth] == path.parts:
                below.add(parts[depth:], meta, content)
        below.digest()
        return below.oid

    return hash_inside


def _parameter(params: Mapping[str, Any], dotted: str) -> Any:
    """Return a parameter by its dotted name; `ABSENT` if there is none."""
    value: Any = params
    for key in dotted.split("."):
        value = value.get(key, ABSENT) if isinstance(value, Mapping) else ABSENT
    return value


# Print experiments as a table with the change of their loss; reads `dvc exp show --json` from stdin.
#
# A metric is shown only if the stage that wrote it ran with the experiment's own parameters (`own_stages`).

NAME = "Experiment"
STATE = "state"
"""Column of experiments without results: queued, running, failed, or not readable."""
REVISION = "revision"
"""Not shown: the revision of a row whose stage train ran with the row's own parameters."""
LOSS = "tuned_loss"
CHANGE = "loss_change"
PAIRS = ("tuned_reward_accuracy", "tuned_reward_margin")
"""Of preference pairs."""
RESULTS = ("peak_gib_predicted", "peak_gib_measured", "tokens_per_second", LOSS, CHANGE, *PAIRS)
"""Columns after the name, so that they are seen in a terminal of 120 columns."""
OTHER_RESULTS = ("predicted_error_percent", "tuned_exact_match_percent")
"""Columns after the parameters."""
NO_RESULT = "run."
"""Start of the parameters that change no result, which are left out."""
OTHER_LOSS = ("model.", "data.")
"""Start of the parameters that decide what a loss is of: losses of different models or data cannot be subtracted."""
BASELINE = "baseline"
FINISHED = "success"
DIGITS = 4
EMPTY_NOTE = "empty: nothing was measured with these parameters; `dvc exp show` may have an earlier run's figures there"

ExperimentRow = dict[str, Any]
Own = Callable[[str, Mapping[str, Any]], Collection[str]]
"""Revision and params.yaml of a row → the files that the row's own stages wrote."""


def rows_of(commits: Iterable[Mapping[str, Any]], own: Own) -> Iterator[ExperimentRow]:
    """Yield name, parameters and own metrics: of the workspace, of each baseline and of its experiments."""
    for commit in commits:
        yield _row(commit, WORKSPACE if commit["rev"] == WORKSPACE else BASELINE, FINISHED, own)
        for experiment in commit["experiments"] or ():
            state, newest = (experiment["executor"] or {}).get("state", FINISHED), experiment["revs"][0]
            yield _row(newest, experiment["name"] or newest["name"] or newest["rev"][:7], state, own)


def _row(revision: Mapping[str, Any], name: str, state: str, own: Own) -> ExperimentRow:
    """Return a row. An experiment that is not finished has the metrics of its baseline in DVC, so they are left out."""
    data = revision["data"]
    if data is None:
        return {NAME: name, STATE: state if state != FINISHED else "not readable"}
    params = data["params"].get("params.yaml", {}).get("data", {})
    row = {NAME: name, STATE: "" if state == FINISHED else state}
    row |= {dotted: value for dotted, value in _leaves(params) if not dotted.startswith(NO_RESULT)}
    if state == FINISHED:
        files = own(revision["rev"], params)
        for path in data["metrics"].keys() & files:
            row |= data["metrics"][path].get("data", {})
        if TRAINED in files:
            row[REVISION] = revision["rev"]
    return row


def table(rows: Sequence[ExperimentRow]) -> str:
    """Return rows as aligned columns: results, and parameters that differ between rows."""
    baseline = next((row for row in rows if row[NAME] == BASELINE), {})
    shown = [{**row, CHANGE: loss_change(row, baseline)} for row in rows]
    parameters = {name: None for row in rows for name in row if "." in name or name == "seed"}
    differing = [name for name in parameters if len({str(row[name]) for row in rows if name in row}) > 1]
    possible = (NAME, STATE, *RESULTS, *differing, *OTHER_RESULTS)
    columns = [name for name in possible if name in differing or any(cell(row.get(name)) for row in shown)]
    cells = [columns, *([cell(row.get(name)) for name in columns] for row in shown)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    padded = ([f"{cell:<{width}}" for cell, width in zip(line, widths, strict=True)] for line in cells)
    return "\n".join("  ".join(line).rstrip() for line in padded)


def loss_change(row: ExperimentRow, baseline: ExperimentRow) -> str | None:
    """Return the loss minus the baseline's; None if unknown, or if the row has another model or other data."""
    loss, before = row.get(LOSS), baseline.get(LOSS)
    same = all(row.get(name) == baseline.get(name) for name in {*row, *baseline} if name.startswith(OTHER_LOSS))
    return f"{loss - before:+.{DIGITS}g}" if same and loss is not None and before is not None else None


def _leaves(params: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield dotted name and value of each parameter."""
    for key, value in params.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def cell(value: Any) -> str:
    """Return a value as text: decimal numbers with `DIGITS`, nothing for None."""
    if isinstance(value, float):
        return f"{value:.{DIGITS}g}"
    return "" if value is None else visible(str(value)).replace("\n", "\\n").replace("\t", "\\t")


def own_rows(commits: Iterable[Mapping[str, Any]]) -> list[ExperimentRow]:
    """The rows of what `dvc exp show --json` prints in this directory, with the metrics of their own stages."""
    hash_inside = hashes_in_cache()
    return list(rows_of(commits, lambda revision, params: set(own_files(lock_of(revision), params, hash_inside))))


def curve_files(rows: Iterable[ExperimentRow]) -> list[Path | None]:
    """The curves of each row's training, in the workspace or in DVC's cache; None if it has none of its own there."""
    from dvc.repo import Repo

    hash_inside = hashes_in_cache()
    with Repo() as repo:
        store = repo.cache.local

    def found(revision: str | None) -> Path | None:
        if revision in (None, WORKSPACE):
            return None if revision is None else Path(TRAINED, CURVES)
        outs = lock_of(str(revision)).get("train", {}).get("outs", ())
        written = next((out["md5"] for out in outs if out["path"] == TRAINED), None)
        content = None if written is None else hash_inside(written, PurePosixPath(CURVES))
        return None if content is None else Path(store.oid_to_path(content))

    return [found(row.get(REVISION)) for row in rows]


def main() -> None:
    """Print the table, and what its empty cells mean."""
    text = sys.stdin.read()
    commits = json.loads(text) if text.strip() else []
    if not commits:
        sys.exit("error: dvc exp show: printed no experiments; see its message above")
    rows = own_rows(commits)
    echo_text(table(rows))
    if any(row.keys().isdisjoint(RESULTS[1:]) for row in rows):
        echo(EMPTY_NOTE)


if __name__ == "__main__":
    main()
