"""Micro-batches from row lengths: stage bucket against random order, transformers' samplers, TRL and LLaMA-Factory.

All contestants get the token lengths of one generated chat file, cut at 4,096, for 8 GPUs, and are judged alike:
padding, waiting for the largest micro-batch of a turn, the largest micro-batch, and how random the steps are (1 = as
independent draws). Bins of TRL and LLaMA-Factory count as padded to their capacity, as with our packed mode of one
shape, which is the like of them. Then the stage itself plans ten million rows as a process of its own.
--quick: fewer rows, and none of the contestants that need an environment of their own.
"""

import re
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from benchmarks import batching_cases as cases
from benchmarks.batching_cases import CAPACITY, RANKS, Batches
from benchmarks.chat_file import SCRATCH, lengths
from benchmarks.data import RIVALS
from benchmarks.form import Bar, Measured, Row, benchmark
from lean_finetune.core.atomic_files import atomic_path

PLOT = Path("docs/images/batching.png")
ROWS, QUICK_ROWS = 100_000, 5_000
EPOCHS, QUICK_EPOCHS = 8, 2
"""Several, so that the figure of randomness is known to a few percent."""
PLANNED_ROWS, QUICK_PLANNED_ROWS = 10_000_000, 200_000
PLAN_ROUNDS = 3
MAX_LENGTH = 4096
STEP_BATCHES = 32
"""Micro-batches per optimizer step: 8 GPUs × 4. Packed is shown at 8 as well."""
PADDING_ROOM = 0.07
"""Part of what a step's micro-batches hold that bucketed leaves to padding."""
STEP_ROOM_TOKENS = 1600
"""What packed leaves free in a step: the row that reaches train.tokens_per_step ends behind that mark."""
PADDING_LIMITS = {("bucketed", 32): 7.0, ("packed", 32): 0.5, ("packed", 8): 1.5}
STRAGGLER_LIMIT = 1.5
RANDOMNESS = (0.9, 1.1)
PLAN_LIMIT_S, PLAN_LIMIT_BYTES = 5.0, 2 << 30


def measure(quick: bool) -> Measured:
    """Let every contestant make micro-batches of the same lengths, then time the stage.

    Raises:
        UserError: a contestant failed.
    """
    rows, epochs = (QUICK_ROWS, QUICK_EPOCHS) if quick else (ROWS, EPOCHS)
    known = np.minimum(lengths(rows), MAX_LENGTH)
    table: list[Row] = []
    bars: list[Bar] = []
    for name, make in (_ours(known, epochs) | _samplers(known, epochs)).items():
        figures = make().figures(known)
        table.append({"what": name, **figures})
        if name.startswith("ours") and "fixed" not in name:
            bars += _bars(name, figures, few_steps=quick)
    if not quick:
        packed, skipped = _packed_by_rivals(known, epochs)
        table += packed
        _plot(table)
        table += skipped
    planned, plan_bars = _planning(QUICK_PLANNED_ROWS if quick else PLANNED_ROWS, known)
    return Measured(rows=table + planned, bars=bars + ([] if quick else plan_bars))


def _ours(known: np.ndarray, epochs: int) -> dict[str, Callable[[], Batches]]:
    """Our modes, by what the table calls them."""
    found: dict[str, Callable[[], Batches]] = {}
    for mode, constant_shape, ranks, batches in (
        ("bucketed", False, 1, 32),
        ("bucketed", False, RANKS, 32),
        ("packed", False, RANKS, 32),
        ("packed", False, RANKS, 8),
        ("packed", True, 1, 32),
        ("packed", True, 1, 8),
        ("fixed", False, RANKS, 32),
    ):
        shape = ", one shape" if constant_shape else ""
        gpus = f"{ranks} GPU{'s' * (ranks > 1)}"
        found[f"ours, {mode}{shape}, {gpus}, {batches} per step"] = partial(
            cases.ours,
            known,
            mode=mode,
            constant_shape=constant_shape,
            ranks=ranks,
            tokens_per_step=_tokens_per_step(mode, batches),
            epochs=epochs,
        )
    return found


def _tokens_per_step(mode: str, batches: int) -> int:
    """Tokens that fill `batches` micro-batches."""
    room = STEP_ROOM_TOKENS if mode == "packed" else round(PADDING_ROOM * batches * CAPACITY)
    return batches * CAPACITY - room


def _samplers(known: np.ndarray, epochs: int) -> dict[str, Callable[[], Batches]]:
    """What runs in this environment."""
    batches = STEP_BATCHES
    return {
        "random order, 8 rows": partial(cases.random_order, known, batches, epochs),
        "transformers group_by_length, 8 rows": partial(cases.group_by_length, known, batches, epochs),
        "transformers batch_rebalance": partial(cases.batch_rebalance, known, batches, epochs),
    }


def _packed_by_rivals(known: np.ndarray, epochs: int) -> tuple[list[Row], list[Row]]:
    """Rows of the contestants with environments of their own; and of those that could not be had, with the reason."""
    table: list[Row] = []
    skipped: list[Row] = []
    for rival in RIVALS:
        script = {"trl_sft.py": "trl_bfd.py", "llama_factory.py": "llama_factory_knapsack.py"}.get(rival.script)
        if script is None:
            continue
        if reason := rival.prepare():
            skipped.append({"what": rival.name, "skipped": reason})
            continue
        batches = cases.packed_by(rival, script, known, STEP_BATCHES, epochs)
        table.append({"what": f"{rival.name} packing", **batches.figures(known)})
    return table, skipped


def _bars(name: str, figures: Mapping[str, Any], *, few_steps: bool) -> list[Bar]:
    """The promises about one of our modes; of few steps, which the first and the last one sway, only the budget."""
    mode, batches = name.split(", ")[1], int(name.split(", ")[-1].split()[0])
    found = [Bar(name=f"{name}: largest micro-batch", value=figures["largest_tokens"], rule="<=", limit=CAPACITY)]
    if few_steps:
        return found
    low, high = RANDOMNESS
    found.append(Bar(name=f"{name}: straggler %", value=figures["straggler_percent"], rule="<=", limit=STRAGGLER_LIMIT))
    found.append(Bar(name=f"{name}: randomness", value=figures["randomness"], rule=">=", limit=low))
    found.append(Bar(name=f"{name}: randomness", value=figures["randomness"], rule="<=", limit=high))
    if limit := PADDING_LIMITS.get((mode, batches)):
        found.append(Bar(name=f"{name}: padding %", value=figures["padding_percent"], rule="<=", limit=limit))
    return found


def _planning(rows: int, known: np.ndarray) -> tuple[list[Row], list[Bar]]:
    """Time and memory of the stage as a process, from its start to its end, for drawn lengths like the file's."""
    drawn = np.random.default_rng(1).choice(known, rows)
    table: list[Row] = []
    for mode in ("bucketed", "packed"):
        for ranks in (1, RANKS):
            tokens_per_step = _tokens_per_step(mode, STEP_BATCHES)
            directory = SCRATCH / "runs" / f"bucket-{mode}-{ranks}"
            cases.prepare_stage(directory, drawn, mode=mode, ranks=ranks, tokens_per_step=tokens_per_step)
            usages = [cases.run_stage(directory) for _ in range(PLAN_ROUNDS)]
            wall_s = round(median(usage.wall_s for usage in usages), 2)
            peak = max(usage.peak_rss_bytes for usage in usages)
            what = f"(stage bucket: {rows:,} rows, {mode}, {ranks} GPU{'s' * (ranks > 1)})"
            table.append({"what": what, "wall_s": wall_s, "peak_rss_bytes": peak})
    slowest = max(row["wall_s"] for row in table)
    largest = max(row["peak_rss_bytes"] for row in table)
    return table, [
        Bar(name=f"planning {rows:,} rows, seconds", value=slowest, rule="<=", limit=PLAN_LIMIT_S),
        Bar(name=f"planning {rows:,} rows, peak bytes", value=largest, rule="<=", limit=PLAN_LIMIT_BYTES),
    ]


def _plot(table: list[Row]) -> None:
    """Padding against randomness: the corner to be in is below, at 1."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    points: dict[tuple[float, float], list[str]] = {}
    for row in table:
        if not any(other in row["what"] for other in (" 8 per step", "bucketed, 1 GPU")):
            name = re.sub(r", (\d+ GPUs?|32 per step|8 rows)", "", row["what"])
            points.setdefault((row["randomness"], row["padding_percent"]), []).append(name)
    figure, axes = pyplot.subplots(figsize=(8, 4.5), layout="constrained")
    axes.axvspan(*RANDOMNESS, color="0.92", zorder=0)
    for (randomness, padding), names in sorted(points.items()):
        color = "C0" if names[0].startswith("ours") else "0.35"
        axes.scatter(randomness, padding, color=color, zorder=3)
        at_right = randomness > RANDOMNESS[1]
        axes.annotate(
            "\n".join(names),
            (randomness, padding),
            xytext=(-8 if at_right else 8, 0),
            textcoords="offset points",
            ha="right" if at_right else "left",
            va="bottom" if names[0].startswith("random") else "top" if "fixed" in names[0] else "center",
            fontsize=8,
            color=color,
        )
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xticks([1, 2, 5, 10], labels=["1", "2", "5", "10"])
    axes.set_yticks([0.01, 0.1, 1, 10, 100], labels=["0.01", "0.1", "1", "10", "100"])
    axes.minorticks_off()
    axes.set_xlim(0.8, 20)
    axes.set_ylim(0.008, 150)
    axes.set_xlabel("spread of the steps' mean log-length (1 = independent draws)")
    axes.set_ylabel("padding, % of all tokens computed")
    axes.spines[["top", "right"]].set_visible(False)
    with atomic_path(PLOT) as aside:
        figure.savefig(aside, dpi=150, format="png", metadata={"Software": None})
    pyplot.close(figure)


main = benchmark("batching", measure)

if __name__ == "__main__":
    main()
