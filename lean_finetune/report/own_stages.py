"""Which stages of an experiment ran with its own parameters and inputs, and so wrote its metrics.

`dvc exp run -S … estimate` commits the metrics of all stages. Those of stages that did not run are of an earlier run.
dvc.lock says with what each stage ran last.
"""

import subprocess
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path, PurePosixPath
from typing import Any

from ruamel.yaml import YAML

Lock = Mapping[str, Any]
"""The stages of a dvc.lock."""
HashInside = Callable[[str, PurePosixPath], str | None]
"""Hash of a directory and a path in it → hash of what is there; None if DVC's cache does not have the directory."""
WORKSPACE = "workspace"
"""DVC's name for the files of the checkout."""
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
        text = subprocess.run(["git", "show", f"{revision}:./dvc.lock"], capture_output=True, text=True).stdout
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
