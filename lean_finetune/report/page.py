"""Write the report: one page of Markdown."""

from collections.abc import Iterator, Mapping
from operator import attrgetter
from textwrap import indent
from typing import Any

from lean_finetune.config.schema import Params
from lean_finetune.pinning.descriptions import describe_data, describe_model
from lean_finetune.report.markdown import NONE, cell, size, table
from lean_finetune.report.memory_section import memory_section
from lean_finetune.report.report_inputs import Inputs

NOT_EVALUATED = "not evaluated: no rows are held out (data.heldout_fraction is 0)."
SAMPLES = 6
SAMPLE_CHARACTERS = 800
SHOWN = (
    "hardware.num_gpus",
    "train.sharding",
    "train.method",
    "train.precision",
    "train.optimizer",
    "train.grad_ckpt",
)
"""Parameters that the page shows."""
# Figure of data/tokens/figures.json → why these rows were dropped.
DROPPED = {
    "no_answer_rows": "had no answer within data.max_length",
    "dropped_long_rows": "were longer than data.max_length",
    "empty_answer_rows": "had an empty answer",
    "bad_rows": "could not be used",
    "duplicate_rows": "repeated another row",
}


def shown_parameters(params: Params) -> dict[str, Any]:
    """Return the parameters that the page shows."""
    return {name: attrgetter(name)(params) for name in SHOWN}


def page(inputs: Inputs, settings: Mapping[str, Any], metrics: Mapping[str, Any]) -> str:
    """Return the page; `settings` are the parameters to show, `metrics` the report's figures."""
    sections = [
        "# Fine-tuning report",
        _summary(inputs, metrics),
        _run(inputs, settings),
        memory_section(inputs, metrics),
        _loss(inputs),
        _answers(inputs),
    ]
    return "\n\n".join(sections) + "\n"


def _summary(inputs: Inputs, metrics: Mapping[str, Any]) -> str:
    """Summarise the results."""
    estimate, train, evaluate = inputs.estimate, inputs.train, inputs.evaluate
    fits = "fits" if estimate["fits"] else "does not fit"
    peak = f"- **Memory**: predicted {size(estimate['peak_bytes_predicted'])} at its peak ({estimate['worst_phase']})"
    if train["peak_bytes_measured"] is None:
        peak += f"; not measured on {train['device']}."
    else:
        peak += f", measured {size(train['peak_bytes_measured'])}"
        error = metrics["predicted_error_percent"]
        if error is None:
            peak += f" on {train['device']}: another kind of device, so they cannot be compared."
        else:
            peak += f": the prediction was off by {error:+.3f} %."
    lines = [
        peak,
        f"- **Device**: {estimate['gpu']}, {estimate['capacity_gib']:.4g} GiB: the run {fits}.",
        f"- **Held-out loss**: {evaluate['base_loss']:.4f} before, {evaluate['tuned_loss']:.4f} after "
        f"(perplexity {_figure(evaluate['base_perplexity'])} before, {_figure(evaluate['tuned_perplexity'])} after)."
        if evaluate["evaluated_rows"]
        else f"- **Held-out loss**: {NOT_EVALUATED}",
    ]
    if evaluate["generated_rows"]:
        lines.append(
            f"- **Exact match** of {evaluate['generated_rows']} greedy answers: "
            f"{evaluate['base_exact_match_percent']:.1f} % before, {evaluate['tuned_exact_match_percent']:.1f} % after."
        )
    return "\n".join(lines)


def _run(inputs: Inputs, settings: Mapping[str, Any]) -> str:
    """Describe model, data, plan and parameters."""
    tokenize, bucket, train = inputs.tokenize, inputs.bucket, inputs.train
    reasons = ", ".join(f"{tokenize[name]:,} {why}" for name, why in DROPPED.items() if tokenize[name])
    rows_read = tokenize["train_rows"] + tokenize["heldout_rows"] + tokenize["dropped_rows"]
    waiting = f"{bucket['straggler_percent']:.1f} % of the GPUs' time, for the GPU with the most tokens"
    rows = [
        ("model", describe_model(inputs.model)),
        *([("not loaded", not_loaded)] if (not_loaded := inputs.estimate.get("not_loaded")) else []),
        ("data", f"{describe_data(inputs.data)}, format {tokenize['format']}"),
        ("rows", f"{tokenize['train_rows']:,} for training, {tokenize['heldout_rows']:,} held out"),
        (
            "truncated rows",
            f"{_share(tokenize['truncated_rows'], rows_read)} longer than data.max_length, which lost trained tokens",
        ),
        ("dropped rows", _share(tokenize["dropped_rows"], rows_read) + (f": {reasons}" if reasons else "")),
        ("tokens", f"{tokenize['train_tokens']:,}, {tokenize['supervised_percent']:.1f} % of them trained"),
        ("longest row", f"{tokenize['longest']:,} tokens"),
        ("optimizer steps", f"{bucket['optimizer_steps']:,}, in {bucket['micro_batches']:,} micro-batches"),
        (
            "micro-batches",
            f"{bucket['mode']}; at most {bucket['max_batch_tokens']:,} padded tokens, {bucket['max_batch_rows']:,} rows"
            # In packed mode rows are joined to the length before.
            + ("" if bucket["mode"] == "packed" else f", {bucket['max_batch_length']:,} tokens a row"),
        ),
        ("padding", f"{bucket['padding_percent']:.1f} % of the tokens computed"),
        *([("waiting", waiting)] if settings["hardware.num_gpus"] > 1 else []),
        ("trained parameters", f"{train['trained_parameters']:,}"),
        *_experts(train),
        ("trained on", train["device"]),
        ("speed", f"{train['tokens_per_second']:,.0f} tokens/s"),
        *((name, str(value).lower() if isinstance(value, bool) else value) for name, value in settings.items()),
    ]
    return "## What was trained\n\n" + table(("", ""), rows)


def _experts(train: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Rows about a mixture of experts; none for other models."""
    if (in_experts := train.get("trained_expert_parameters")) is not None:
        yield "of these in experts", f"{in_experts:,}"
    if (busiest := train.get("expert_load_max")) is not None:
        idle = f"{100 * train['idle_experts_share']:.1f} % of the experts had none"
        yield "tokens by expert", f"the busiest had {busiest:.2f} times an even share, {idle}; no token was dropped"


def _loss(inputs: Inputs) -> str:
    """Loss curves, and the held-out loss by row length."""
    evaluate = inputs.evaluate
    if not evaluate["evaluated_rows"]:
        return "\n".join(["## Loss", "", "![Loss](loss.png)", "", NOT_EVALUATED])
    columns = ("base_loss", "tuned_loss", "base_perplexity", "tuned_perplexity")
    lengths = evaluate["by_length"].items()
    rows = [
        (f"{name.replace('_', ' ')} tokens", found["rows"], *(_figure(found[column]) for column in columns))
        for name, found in sorted(lengths, key=lambda item: (item[0].startswith("over"), int(item[0].split("_")[-1])))
    ]
    rows.append(("**all**", evaluate["evaluated_rows"], *(_figure(evaluate[column]) for column in columns)))
    header = ("row length", "rows", "loss before", "loss after", "perplexity before", "perplexity after")
    lines = ["## Loss", "", "![Loss](loss.png)", "", "Held-out rows:", "", table(header, rows), *_merged(evaluate)]
    return "\n".join(lines)


def _merged(evaluate: Mapping[str, Any]) -> list[str]:
    """Loss of the merged model; empty if evaluate.merged is false."""
    if "merged_loss" not in evaluate:
        return []
    text = f"Merged into one model: loss {_figure(evaluate['merged_loss'])}"
    text += f", {evaluate['merged_minus_tuned_loss']:+.2g} compared with the adapter on its base"
    if (right := evaluate["merged_exact_match_percent"]) is not None:
        text += f"; exact match {right:.1f} %"
    return ["", f"{text}."]


def _answers(inputs: Inputs) -> str:
    """Exact match by family, and a few sample answers."""
    notes = []
    if too_long := inputs.evaluate["unanswerable_rows"]:
        skipped = f"Skipped: {too_long:,} held-out rows whose prompt or answer is longer than data.max_length, "
        notes.append(skipped + "evaluate.max_new_tokens or the model's context allows.")
    if not inputs.generations:
        if not inputs.evaluate["evaluated_rows"]:
            return f"## Answers\n\n{NOT_EVALUATED}"
        nothing = "None: no held-out row has a prompt that can be answered, or evaluate.generate_rows is 0."
        return "\n\n".join(["## Answers", nothing, *notes])
    families = [
        (name, found["rows"], *(f"{found[f'{model}_exact_match_percent']:.0f} %" for model in ("base", "tuned")))
        for name, found in sorted(inputs.evaluate["by_family"].items())
    ]
    # The file alternates families, so its first lines are of different ones.
    pool = inputs.generations[: max(SAMPLES, len(families))]
    shown = [pool[index * len(pool) // SAMPLES] for index in range(min(SAMPLES, len(pool)))]
    right = table(("family", "prompts", "correct before", "correct after"), families)
    return "\n\n".join(["## Answers", right, *notes, "### Samples", *map(_sample, shown)])


def _sample(line: Mapping[str, Any]) -> str:
    """Format a prompt with the expected and the generated answers."""
    parts = [("Prompt", line["prompt"]), ("Expected", line["expected"])]
    for model, title in (("base", "Before"), ("tuned", "After")):
        parts.append((f"{title} ({'correct' if line[f'{model}_correct'] else 'wrong'})", line[model]))
    blocks = [f"#### {cell(line['family'])}"]
    for title, text in parts:
        text = text.strip("\n")
        text = text if len(text) <= SAMPLE_CHARACTERS else f"{text[:SAMPLE_CHARACTERS]} …"
        blocks.append(f"{title}:\n\n{indent(text, '    ', lambda _: True)}")
    return "\n\n".join(blocks)


def _share(part: int, total: int) -> str:
    """Format a count and its share."""
    return f"{part:,} ({100 * part / total:.1f} %)"


def _figure(value: float | None) -> str:
    """Format a number with four digits; None becomes a dash."""
    return NONE if value is None else f"{value:.4g}"
