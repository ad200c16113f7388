"""Write the memory section of the report: predicted and measured peaks, and the tensors at the peak."""

from collections.abc import Iterator, Mapping
from typing import Any

from lean_finetune.report.markdown import NONE, size, table
from lean_finetune.report.report_inputs import Inputs


def memory_section(inputs: Inputs, metrics: Mapping[str, Any]) -> str:
    """Return the section as Markdown."""
    verdict = [] if inputs.verdict["refusal"] is None else [f"Verdict: {inputs.verdict['refusal']}.", ""]
    by_rank = []
    if peaks := inputs.train.get("peak_bytes_measured_by_rank"):
        by_rank = [f"Measured peak of each of {len(peaks)} processes: {', '.join(map(size, peaks))}.", ""]
    return "\n".join(
        [
            "## Memory",
            "",
            *verdict,
            f"Measured on {inputs.train['device']}: {inputs.train['peak_measured_how'] or 'nothing'}.",
            "",
            table(("phase", "predicted peak", "measured peak", "error"), _phases(inputs, metrics)),
            "",
            *_reserved(inputs),
            *by_rank,
            "![Peak memory of each phase](memory.png)",
            "",
            f"Memory over the run: {inputs.train['growth']['summary']}.",
            "",
            f"Tensors at the predicted peak ({inputs.estimate['worst_phase']}), by category:",
            "",
            table(("category", "bytes", "share"), _categories(inputs)),
            "",
            "Predicted memory up to the peak, over the largest micro-batches of the plan:",
            "",
            "![Predicted memory over a step](timeline.png)",
            "",
            "The largest tensors at the peak, and the module that allocates them:",
            "",
            table(("category", "allocated by", "module", "shape", "tensors", "bytes"), _largest_tensors(inputs)),
            "",
            "Memory that persists between steps, computed from shapes and types:",
            "",
            table(("category", "content", "tensors", "bytes"), _states(inputs)),
            "",
            "![Predicted peaks by switch](switches.png)",
        ]
    )


def _reserved(inputs: Inputs) -> list[str]:
    """Predicted memory of allocator, process and host; empty on a CPU, whose memory is not reserved."""
    estimate = inputs.estimate
    if estimate["reserved_bytes_predicted"] is None:
        return []
    rows = [
        ("tensors", size(estimate["peak_bytes_predicted"])),
        ("reserved, expandable segments", size(estimate["reserved_bytes_predicted_expandable"])),
        ("reserved, fixed segments", size(estimate["reserved_bytes_predicted_native"])),
        ("reserved with the run's train.expandable_segments", size(estimate["reserved_bytes_predicted"])),
        ("process, without margin", size(estimate["process_bytes_predicted"])),
        ("RAM of the host, without margin", size(estimate["host_bytes_predicted"])),
    ]
    return [table((f"on {estimate['gpu']}", "predicted"), rows), "", *_plan(inputs)]


def _plan(inputs: Inputs) -> list[str]:
    """Predicted reserved memory over the optimizer steps of the plan."""
    estimate = inputs.estimate
    lines = [f"Reserved over the plan: {estimate['reserved_replayed']}."]
    if not inputs.reserved[0]["reserved_gib"]:
        return [*lines, ""]
    lines.append(f"It is constant after optimizer step {estimate['reserved_settled_step']} of these.")
    if estimate["retries_predicted"]:
        lines.append(f"The allocator frees its cache {estimate['retries_predicted']} times because memory is full.")
    return [" ".join(lines), "", "![Predicted memory of the plan](reserved.png)", ""]


def _phases(inputs: Inputs, metrics: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    """Yield predicted and measured peak of every phase."""
    predicted, measured = inputs.estimate["predicted_by_phase"], inputs.train["measured_by_phase"]
    for phase, error in metrics["error_percent_by_phase"].items():
        shown = NONE if error is None else f"{error:+.3f} %"
        yield phase, size(predicted.get(phase)), size(measured.get(phase)), shown


def _categories(inputs: Inputs) -> Iterator[tuple[str, ...]]:
    """Yield the categories at the peak, largest first."""
    peak = inputs.breakdown["peak"]
    total = sum(peak.values())
    for name, count in sorted(peak.items(), key=lambda item: (-item[1], item[0])):
        if count:
            yield name.replace("_", " "), size(count), f"{100 * count / total:.1f} %"


def _largest_tensors(inputs: Inputs) -> Iterator[tuple[Any, ...]]:
    """Yield the largest groups of equal tensors at the peak."""
    for group in inputs.explanation["top"]:
        operation = group["operation"] + (f" in {group['phase']}" if group["phase"] else "")
        shape = NONE if group["shape"] is None else " × ".join(map(str, group["shape"])) + f" {group['dtype']}"
        module = f"`{group['module']}`" if group["module"] else NONE
        yield group["category"].replace("_", " "), operation, module, shape, group["count"], size(group["bytes"])


def _states(inputs: Inputs) -> Iterator[tuple[Any, ...]]:
    """Yield the closed-form memory that persists between steps."""
    for line in inputs.explanation["states"]:
        yield line["category"].replace("_", " "), line["why"], line["tensors"], size(line["bytes"])
