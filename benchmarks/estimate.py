"""Predicted memory against figures that others measured: every figure of benchmarks/facts, misses too."""

from collections.abc import Iterator
from statistics import mean

from benchmarks.estimate_facts import (
    PEFT_REFERENCE,
    PEFT_STATISTICS,
    Fact,
    fit_length,
    openrlhf_facts,
    peft_fact,
    peft_runs,
    published_facts,
)
from benchmarks.estimate_t4 import t4_figures, t4_runs
from benchmarks.harness import Measured, Row, at_most, benchmark

FITTED_LENGTHS = {"reserved_avg": 301, "reserved_99th": 595, "reserved_max": 660}
"""Results of `fit_length`, which --quick uses."""
PEFT_MEAN_PERCENT, PEFT_WORST_PERCENT, DORA_WORST_PERCENT = 1.5, 3.0, 6.0
T4_WORST_PERCENT = {"fitcheck on T4, step": 1.0, "fitcheck on T4, allocated": 2.0}
FITTED = "not counted: the batch length was fitted to this figure"


def measure(quick: bool) -> Measured:
    """Compare every figure, summarise each source, and check the bars."""
    figures = [*_peft_rows(quick), *(row_of(fact, size) for fact, size in _others(quick))]
    summary = list(summary_of(figures))
    of_source = {row["source"]: row for row in summary}
    peft, dora = of_source["PEFT on L40S"], of_source["PEFT on L40S, DoRA"]
    bars = [
        at_most("PEFT on L40S: mean error, percent", peft["mean_percent"], PEFT_MEAN_PERCENT),
        at_most("PEFT on L40S: worst error, percent", peft["worst_percent"], PEFT_WORST_PERCENT),
        at_most("PEFT on L40S, DoRA: worst error, percent", dora["worst_percent"], DORA_WORST_PERCENT),
        *(
            at_most(f"{source}: worst error, percent", of_source[source]["worst_percent"], bar)
            for source, bar in T4_WORST_PERCENT.items()
        ),
    ]
    return Measured(rows=[*figures, *_summary_rows(summary)], bars=bars)


def _peft_rows(quick: bool) -> Iterator[Row]:
    """Three statistics of each run, each with one batch length for all runs."""
    for statistic in PEFT_STATISTICS:
        length = FITTED_LENGTHS[statistic] if quick else fit_length(statistic)
        for name, row in peft_runs().items():
            fact = peft_fact(row, statistic, length)
            note = FITTED if name == PEFT_REFERENCE else ""
            yield row_of(fact, fact.predicted_bytes(), note)


def _others(quick: bool) -> Iterator[tuple[Fact, int]]:
    """The figures of the other sources; with `quick` one run of each."""
    for row in t4_runs()[:1] if quick else t4_runs():
        yield from t4_figures(row)
    seen: set[str] = set()
    for fact in published_facts():
        if quick and fact.source in seen:
            continue
        seen.add(fact.source)
        yield fact, fact.predicted_bytes()
    yield from openrlhf_facts()


def row_of(fact: Fact, predicted_bytes: int, note: str = "") -> Row:
    """A figure and its prediction."""
    error = None if fact.figure_bytes is None else 100 * (predicted_bytes / fact.figure_bytes - 1)
    return {
        "source": fact.source,
        "run": fact.run,
        "measured_bytes": fact.figure_bytes,
        "predicted_bytes": predicted_bytes,
        "error_percent": error,
        "note": note or fact.why_off,
        "assumed": fact.assumed,
    }


def summary_of(figures: list[Row]) -> Iterator[Row]:
    """Mean and worst error of each source, without fitted figures."""
    for source in dict.fromkeys(row["source"] for row in figures):
        counted = [row for row in figures if row["source"] == source and row["note"] != FITTED]
        errors = [abs(row["error_percent"]) for row in counted if row["error_percent"] is not None]
        yield {
            "source": source,
            "figures": len(errors),
            "mean_percent": mean(errors),
            "worst_percent": max(errors),
        }


def _summary_rows(summary: list[Row]) -> Iterator[Row]:
    """Two rows of the table for each source."""
    for source in summary:
        for kind in ("mean", "worst"):
            run = f"{kind} of {source['figures']} errors"
            yield {"source": source["source"], "run": run, "error_percent": source[f"{kind}_percent"]}


if __name__ == "__main__":
    benchmark("estimate", measure)()
