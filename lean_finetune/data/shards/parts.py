"""Tokenizing on several machines: each makes a part of the shards with a manifest, and one merges them."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lean_finetune.core.atomic_files import read_json, sha256_json, write_json
from lean_finetune.core.errors import UsageFault, UserError
from lean_finetune.data.shards.merge_shards import LocatedShard
from lean_finetune.data.shards.shard_files import Shard, finished_shard

MANIFEST_SCHEMA = 1
MANIFEST = "manifest.json"
PART = re.compile(r"([0-9]+)/([0-9]+)")


@dataclass(frozen=True, kw_only=True)
class TokenizePart:
    """Part `number` (from 0) of `of` parts: the shards whose number modulo `of` is `number`."""

    number: int
    of: int

    def includes(self, shard: int) -> bool:
        """Whether a shard belongs to this part."""
        return shard % self.of == self.number

    def directory(self, out: Path) -> Path:
        """The part's directory below `out`, which parts may share."""
        return out / f"part-{self.number}-of-{self.of}"


def parse_part(text: str) -> TokenizePart:
    """The part written as `i/n`. Raises UsageFault if the text has another form, or there is no such part."""
    match = PART.fullmatch(text)
    if match is None or int(match[1]) >= int(match[2]):
        raise UsageFault(f"--part: must be i/n with 0 <= i < n, as 0/4 for the first of four; got {text!r}")
    return TokenizePart(number=int(match[1]), of=int(match[2]))


def write_manifest(
    root: Path, part: TokenizePart, inputs: Mapping[str, str], key: str, shards: Sequence[Shard], all_shards: int
) -> None:
    """Write the manifest of a finished part: its inputs and shards. The shards' markers have the file hashes."""
    manifest = {
        "schema": MANIFEST_SCHEMA,
        "key": key,
        "made_of": dict(inputs),
        "part": part.number,
        "parts": part.of,
        "all_shards": all_shards,
        "shards": [shard.number for shard in shards],
    }
    write_json(root / MANIFEST, {**manifest, "sha256": sha256_json(manifest)})


def collect(directories: Sequence[Path], inputs: Mapping[str, str], key: str) -> list[LocatedShard]:
    """All shards in order, from the parts below these directories.

    Raises UserError if a part is missing, damaged, named twice, or has other inputs than this checkout.
    """
    located: dict[int, LocatedShard] = {}
    all_shards = 0
    for directory in directories:
        manifests = sorted(directory.glob(f"part-*/{MANIFEST}"))
        if not manifests:
            raise UserError(f"{directory}: has no finished part; make one with --part i/n --out {directory}")
        for path in manifests:
            root, manifest = path.parent, read_json(path)
            _check(path, manifest, inputs, key)
            all_shards = manifest["all_shards"]
            for number in manifest["shards"]:
                if number in located:
                    raise UserError(f"{root}: shard {number} is also in {located[number][0]}; name each part once")
                shard = finished_shard(root, number, key)
                if shard is None:
                    raise UserError(f"{root}: a file is missing or damaged; run this part again")
                located[number] = root, shard
    missing = sorted(set(range(all_shards)) - set(located))
    if missing:
        raise UserError(
            f"--merge: {len(missing)} of {all_shards} shards are missing (first {missing[0]}); name the directories of "
            "all parts, and run the parts that are not finished"
        )
    return [located[number] for number in sorted(located)]


def _check(path: Path, manifest: Any, inputs: Mapping[str, str], key: str) -> None:
    """Compare the manifest with its own hash, and with the inputs here."""
    if not isinstance(manifest, dict) or manifest.get("schema") != MANIFEST_SCHEMA:
        raise UserError(f"{path}: is of another version of this project; make the part again")
    if manifest.pop("sha256", None) != sha256_json(manifest):
        raise UserError(f"{path}: is damaged; run this part again")
    if manifest["key"] != key:
        other = [name for name, value in inputs.items() if manifest["made_of"].get(name) != value]
        raise UserError(
            f"{path}: made with other {' and '.join(other)} than here; use the same on all machines, then make the "
            "part again, or remove it"
        )
