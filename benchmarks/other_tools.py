"""Configurations that other tools publish as examples: how many are answered, refused and why, and read wrongly.

DIRECTORIES are checkouts of their repositories. Every YAML file there, and every shell script that starts ms-swift, is
converted for one GPU. Method, objective, precision, length, micro-batch and step are compared with a second reading by
other code. Nothing of the directories is copied into the results but paths.
"""

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from benchmarks.harness import Measured, at_least, at_most, benchmark
from benchmarks.other_tools_read import Reading, another_kind, read_again
from cuda_memory.units import round_up
from lean_finetune.commands.convert.conversions import LENGTH, PAD_MULTIPLE, Converted
from lean_finetune.commands.convert.read_config import read_config_of_tool
from lean_finetune.config.load import COMMON_PARAMS, load_params, with_flags
from lean_finetune.core.errors import UserError

SKIPPED = {".git", ".github", "node_modules", "docs"}
STARTS_SWIFT = re.compile(r"^[^#\n]*\b(swift|megatron) \w+", re.MULTILINE)
FEWEST_FILES = 1


def config_files(directory: Path) -> Iterator[Path]:
    """YAML files below a directory, and scripts that start ms-swift."""
    for path in sorted(directory.rglob("*")):
        if path.is_file() and not SKIPPED & {*path.relative_to(directory).parts}:
            if path.suffix in (".yaml", ".yml"):
                yield path
            elif path.suffix == ".sh" and STARTS_SWIFT.search(path.read_text(encoding="utf-8", errors="replace")):
                yield path


def differences(converted: Converted, tool: str, reading: Reading) -> list[str]:
    """Where our parameters are not what the tool would do."""
    length = reading.length or LENGTH
    sides = 1 if reading.objective in ("sft", "kto") else 2
    tokens = reading.rows * sides * round_up(length, PAD_MULTIPLE)
    values = converted.values
    pairs = {
        "tool": (converted.tool, tool),
        "method": (values["train.method"], reading.method),
        "objective": (values.get("train.objective", "sft"), reading.objective),
        "precision": (values.get("train.precision", "auto"), reading.precision),
        "length": (values["data.max_length"], length),
        "micro-batch": (values["bucket.max_tokens"], tokens),
        "step": (values["train.tokens_per_step"], tokens * reading.steps),
    }
    return [f"{name}: {ours} instead of {theirs}" for name, (ours, theirs) in pairs.items() if ours != theirs]


def reason_of(error: UserError, path: Path) -> str:
    """The rule of a refusal, without the file and the value."""
    text = re.sub(r"^/\S+: ", "", str(error).removeprefix(f"{path}: ").removeprefix(f"{path}:"))
    return re.sub(r"its command reads \S+", "its command reads a file", text).partition("; ")[0].partition(", ")[0]


def judge(path: Path) -> tuple[str, str]:
    """answered, refused or wrong; and the tool, the reason or the difference."""
    try:
        read_config_of_tool(path, gpus=1)
        converted = read_config_of_tool(path, gpus=1, with_data=False)
        with_flags(load_params(COMMON_PARAMS), ["model.name=org/model", *converted.flags()])
    except UserError as error:
        return "refused", reason_of(error, path)
    if (line := another_kind(path)) is not None:
        return "wrong", f"answered in spite of: {line}"
    again = read_again(path)
    if again is None:
        return "wrong", f"answered as {converted.tool}, but the second reading knows no tool"
    found = differences(converted, *again)
    return ("wrong", "; ".join(found)) if found else ("answered", converted.tool)


def measure(quick: bool, directories: tuple[Path, ...]) -> Measured:
    """Judge every configuration below the directories."""
    rows: list[dict[str, Any]] = []
    for directory in directories:
        paths = list(config_files(directory))
        found: Counter[tuple[str, str]] = Counter()
        for path in paths[:: 10 if quick else 1]:
            verdict, why = judge(path)
            why = f"{path.relative_to(directory)}: {why}" if verdict == "wrong" else why
            found[verdict, why] += 1
        rows += [
            {"repository": directory.name, "verdict": verdict, "tool or reason": why, "files": count}
            for (verdict, why), count in sorted(found.items(), key=lambda item: (item[0][0], -item[1], item[0][1]))
        ]
    total = {
        verdict: sum(row["files"] for row in rows if row["verdict"] == verdict) for verdict in ("answered", "wrong")
    }
    bars = [
        at_least("configurations answered", total["answered"], FEWEST_FILES),
        at_most("configurations read wrongly", total["wrong"], 0),
    ]
    return Measured(rows=rows, bars=bars)


OPTIONS = [click.Argument(["directories"], nargs=-1, required=True, type=click.Path(path_type=Path, exists=True))]
main = benchmark("other_tools", measure, OPTIONS)

if __name__ == "__main__":
    main()
