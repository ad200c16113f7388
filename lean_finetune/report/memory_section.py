"""The report's section on memory: prediction against measurement, and why the peak is where it is."""

from collections.abc import Iterator, Mapping
from typing import Any

from lean_finetune.report.markdown import NONE, size, table
from lean_finetune.report.report_inputs import Inputs


def memory_section(inputs: Inputs, metrics: Mapping[str, Any]) -> str:
    """Prediction against measurement, where the bytes are and what made them, and what a switch would change."""
    verdict = [] if inputs.verdict["refusal"] is None else [f"Verdict: {inputs.verdict['refusal']}.", ""]
    return "\n".join(
        [
            "## Memory",
            "",
            *verdict,
            f"Measured on {inputs.train['device']}: {inputs.train['peak_measured_how'] or 'nothing'}.",
            "",
            table(("phase", "predicted peak", "measured peak", "error"), _phases(inputs, metrics)),
            "",
            *_tiers(inputs),
            *_by_rank(inputs),
            "![Peak memory of each phase](memory.png)",
            "",
            f"Over the steps that were trained: {inputs.train['growth']['told']}.",
            "",
            f"Where the bytes are at the predicted peak ({inputs.estimate['worst_phase']}):",
            "",
            table(("what", "bytes", "share"), _categories(inputs)),
            "",
            "The way up to it, in the worst micro-batches of the plan:",
            "",
            "![Predicted memory over a step](timeline.png)",
            "",
            "The largest tensors at the peak, and the module each was made for:",
            "",
            table(("what", "made by", "in", "shape", "number", "bytes"), _holdings(inputs)),
            "",
            "What stays from step to step, by arithmetic alone:",
            "",
            table(("what", "why", "tensors", "bytes"), _states(inputs)),
            "",
            "![Predicted peaks by switch](switches.png)",
        ]
    )


def _tiers(inputs: Inputs) -> list[str]:
    """What the GPU's allocator and the process take above the tensors; nothing on a CPU, which reserves nothing."""
    estimate = inputs.estimate
    if estimate["reserved_bytes_predicted"] is None:
        return []
    rows = [
        ("tensors", size(estimate["peak_bytes_predicted"])),
        ("reserved, expandable segments", size(estimate["reserved_bytes_predicted_expandable"])),
        ("reserved, fixed segments", size(estimate["reserved_bytes_predicted_native"])),
        ("reserved, as train.expandable_segments says", size(estimate["reserved_bytes_predicted"])),
        ("process, without margin", size(estimate["process_bytes_predicted"])),
        ("RAM of the host, without margin", size(estimate["host_bytes_predicted"])),
    ]
    return [table((f"on {estimate['gpu']}", "predicted"), rows), "", *_plan(inputs)]


def _by_rank(inputs: Inputs) -> list[str]:
    """What each of several GPUs held; above stands the most of any."""
    peaks = inputs.train.get("peak_bytes_measured_by_rank")
    if peaks is None:
        return []
    return [f"Measured peak of each of {len(peaks)} processes: {', '.join(map(size, peaks))}.", ""]


def _plan(inputs: Inputs) -> list[str]:
    """What the plan reserves step by step, and from which step on no more."""
    estimate = inputs.estimate
    lines = [f"Reserved over the plan: {estimate['reserved_replayed']}."]
    if not inputs.reserved[0]["reserved_gib"]:
        return [*lines, ""]
    lines.append(f"What is reserved changes last in optimizer step {estimate['reserved_settled_step']} of these.")
    if estimate["retries_predicted"]:
        lines.append(f"Cached blocks are given back {estimate['retries_predicted']} times for want of memory.")
    return [" ".join(lines), "", "![Predicted memory of the plan](reserved.png)", ""]


def _phases(inputs: Inputs, metrics: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    """Predicted and measured peak of every phase."""
    predicted, measured = inputs.estimate["predicted_by_phase"], inputs.train["measured_by_phase"]
    for phase, error in metrics["error_percent_by_phase"].items():
        shown = NONE if error is None else f"{error:+.3f} %"
        yield phase, size(predicted.get(phase)), size(measured.get(phase)), shown


def _categories(inputs: Inputs) -> Iterator[tuple[str, ...]]:
    """Categories at the peak, largest first."""
    peak = inputs.breakdown["peak"]
    total = sum(peak.values())
    for name, count in sorted(peak.items(), key=lambda item: (-item[1], item[0])):
        if count:
            yield name.replace("_", " "), size(count), f"{100 * count / total:.1f} %"


def _holdings(inputs: Inputs) -> Iterator[tuple[Any, ...]]:
    """The largest kinds of tensors at the peak instant."""
    for held in inputs.explanation["top"]:
        made = held["operation"] + (f" in {held['phase']}" if held["phase"] else "")
        shape = NONE if held["shape"] is None else " × ".join(map(str, held["shape"])) + f" {held['dtype']}"
        module = f"`{held['module']}`" if held["module"] else NONE
        yield held["category"].replace("_", " "), made, module, shape, held["count"], size(held["bytes"])


def _states(inputs: Inputs) -> Iterator[tuple[Any, ...]]:
    """The closed form, line by line."""
    for line in inputs.explanation["states"]:
        yield line["category"].replace("_", " "), line["why"], line["tensors"], size(line["bytes"])
