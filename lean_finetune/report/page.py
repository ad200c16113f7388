"""Write the report: one page of Markdown."""

from collections.abc import Mapping
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
    return {
        "hardware.num_gpus": params.hardware.num_gpus,
        "train.sharding": params.train.sharding,
        "train.method": params.train.method,
        "train.precision": params.train.precision,
        "train.optimizer": params.train.optimizer,
        "train.grad_ckpt": params.train.grad_ckpt,
    }


def page(inputs: Inputs, settings: Mapping[str, Any], metrics: Mapping[str, Any]) -> str:
    """Return the page; `settings` are the parameters to show, `metrics` the report's figures."""
    sections = (
        _summary(inputs, metrics),
        _run(inputs, settings),
        memory_section(inputs, metrics),
        _loss(inputs),
        _answers(inputs),
    )
    return "\n\n".join(["# Fine-tuning report", *sections]) + "\n"


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


def _dropped(tokenize: Mapping[str, Any], rows_read: int) -> str:
    """Count the dropped rows by reason."""
    found = [f"{tokenize[name]:,} {why}" for name, why in DROPPED.items() if tokenize[name]]
    return _share(tokenize["dropped_rows"], rows_read) + (": " if found else "") + ", ".join(found)


def _run(inputs: Inputs, settings: Mapping[str, Any]) -> str:
    """Describe model, data, plan and parameters."""
    tokenize, bucket, train = inputs.tokenize, inputs.bucket, inputs.train
    rows_read = tokenize["train_rows"] + tokenize["heldout_rows"] + tokenize["dropped_rows"]
    rows = [
        ("model", describe_model(inputs.model)),
        ("data", f"{describe_data(inputs.data)}, format {tokenize['format']}"),
        ("rows", f"{tokenize['train_rows']:,} for training, {tokenize['heldout_rows']:,} held out"),
        (
            "truncated rows",
            f"{_share(tokenize['truncated_rows'], rows_read)} longer than data.max_length, which lost trained tokens",
        ),
        ("dropped rows", _dropped(tokenize, rows_read)),
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
        *_idle_time(bucket, settings["hardware.num_gpus"]),
        ("trained parameters", f"{train['trained_parameters']:,}"),
        ("trained on", train["device"]),
        ("speed", f"{train['tokens_per_second']:,.0f} tokens/s"),
        *((name, _shown(value)) for name, value in settings.items()),
    ]
    return "## What was trained\n\n" + table(("", ""), rows)


def _idle_time(bucket: Mapping[str, Any], num_gpus: int) -> list[tuple[str, str]]:
    """Time that GPUs wait for the largest micro-batch; empty for one GPU."""
    if num_gpus == 1:
        return []
    return [("waiting", f"{bucket['straggler_percent']:.1f} % of the GPUs' time, for the GPU with the most tokens")]


def _loss(inputs: Inputs) -> str:
    """Loss curves, and the held-out loss by row length."""
    evaluate = inputs.evaluate
    if not evaluate["evaluated_rows"]:
        return "\n".join(["## Loss", "", "![Loss](loss.png)", "", NOT_EVALUATED])
    columns = ("base_loss", "tuned_loss", "base_perplexity", "tuned_perplexity")
    lengths = sorted(evaluate["by_length"].items(), key=lambda item: (item[0].startswith("over"), _edge(item[0])))
    rows = [
        (f"{name.replace('_', ' ')} tokens", found["rows"], *(_figure(found[column]) for column in columns))
        for name, found in lengths
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
    too_long = inputs.evaluate["unanswerable_rows"]
    skipped = (
        f"Skipped: {too_long:,} held-out rows whose prompt or answer is longer than data.max_length, "
        "evaluate.max_new_tokens or the model's context allows."
    )
    notes = [skipped] if too_long else []
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
    samples = [_sample(line) for line in shown]
    right = table(("family", "prompts", "correct before", "correct after"), families)
    return "\n\n".join(["## Answers", right, *notes, "### Samples", *samples])


def _sample(line: Mapping[str, Any]) -> str:
    """Format a prompt with the expected and the generated answers."""
    parts = [("Prompt", line["prompt"]), ("Expected", line["expected"])]
    for model, title in (("base", "Before"), ("tuned", "After")):
        parts.append((f"{title} ({'correct' if line[f'{model}_correct'] else 'wrong'})", line[model]))
    blocks = (f"{title}:\n\n{indent(_shorten(text), '    ', lambda _: True)}" for title, text in parts)
    return "\n\n".join([f"#### {cell(line['family'])}", *blocks])


def _shorten(text: str) -> str:
    """Shorten a text to fit the page."""
    text = text.strip("\n")
    return text if len(text) <= SAMPLE_CHARACTERS else f"{text[:SAMPLE_CHARACTERS]} …"


def _share(part: int, total: int) -> str:
    """Format a count and its share."""
    return f"{part:,} ({100 * part / total:.1f} %)"


def _edge(name: str) -> int:
    """Return the number in a length bucket's name."""
    return int(name.rpartition("_")[2])


def _shown(value: Any) -> str:
    """Format a parameter as in params.yaml."""
    return {True: "true", False: "false"}[value] if isinstance(value, bool) else str(value)


def _figure(value: float | None) -> str:
    """Format a number with four digits; None becomes a dash."""
    return NONE if value is None else f"{value:.4g}"
