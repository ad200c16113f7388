"""The content of the report: its figures and tables, before they are laid out."""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from cuda_memory.page.html import Table
from cuda_memory.units import GIB, counted, readable_size, significant
from lean_finetune.config.best_by import FIGURES
from lean_finetune.config.rule import SWITCHED_OFF
from lean_finetune.islands.objectives.registry import OBJECTIVES
from lean_finetune.pinning.locate import describe_data, describe_model
from lean_finetune.report.formats import NONE, figure, size, sizes
from lean_finetune.report.pairs import has_pairs, shares_in_order, words_of
from lean_finetune.report.report_inputs import Inputs, in_order, shortened

# Compute the report's figures: error of the prediction, and changes by training.

CPU = "cpu"
"""Device name of stages estimate and train without a GPU."""

RESULTS = ("predicted_error_percent",)
"""Figures in metrics/report.json, by which runs are compared."""

MEMORY_COLUMNS = ("step", "measured_gib", "predicted_gib")


def comparable(inputs: Inputs) -> bool:
    """Whether prediction and measurement are both for a CPU or both for a GPU.

    A run may be planned for a GPU and trained on a CPU, whose kernels and allocator need other amounts.
    """
    return (inputs.estimate["gpu"] == CPU) == (inputs.train["device"] == CPU)


def error_percent(predicted_bytes: int | None, measured_bytes: int | None) -> float | None:
    """Return the error of a prediction in percent of the measurement; None if one is missing."""
    if predicted_bytes is None or measured_bytes is None:
        return None
    return round(100 * (predicted_bytes / measured_bytes - 1), 4)


def errors_by_phase(inputs: Inputs) -> dict[str, float | None]:
    """Return the error of the prediction in every phase."""
    predicted, measured = inputs.estimate["predicted_by_phase"], inputs.train["measured_by_phase"]
    known = comparable(inputs)
    return {
        phase: error_percent(predicted.get(phase), measured.get(phase)) if known else None
        for phase in in_order({**predicted, **measured})
    }


def errors_by_tier(inputs: Inputs) -> dict[str, float | None]:
    """Return the error of the predicted peak of tensors and of reserved memory, which only GPUs have."""
    estimate, train, known = inputs.estimate, inputs.train, comparable(inputs)
    pairs = {
        "tensors": (estimate["peak_bytes_predicted"], train["peak_bytes_measured"]),
        "reserved": (estimate["reserved_bytes_predicted"], train["peak_reserved_bytes"]),
    }
    return {tier: error_percent(*pair) if known else None for tier, pair in pairs.items()}


def report_metrics(inputs: Inputs) -> dict[str, Any]:
    """Return figures.json: errors of the prediction; change of loss and exact match.

    `predicted_error_percent` is that of the tier by which the run was judged.
    """
    evaluate, by_tier = inputs.evaluate, errors_by_tier(inputs)
    base, tuned = evaluate["base_exact_match_percent"], evaluate["tuned_exact_match_percent"]
    return {
        "predicted_error_percent": by_tier[inputs.estimate["deciding_tier"]],
        "error_percent_by_tier": by_tier,
        "error_percent_by_phase": errors_by_phase(inputs),
        "heldout_loss_change": _change(evaluate["base_loss"], evaluate["tuned_loss"], 6),
        "exact_match_change_points": _change(base, tuned, 3),
    }


def _change(before: float | None, after: float | None, digits: int) -> float | None:
    """Return a difference; None if nothing was evaluated."""
    return None if before is None or after is None else round(after - before, digits)


def summary(inputs: Inputs) -> str:
    """The run in one line: memory, held-out loss, and exact match where answers can be compared."""
    predicted, measured = inputs.estimate["peak_bytes_predicted"], inputs.train["peak_bytes_measured"]
    peak = f"tensor peak {readable_size(predicted)} predicted"
    peak += f", {readable_size(measured)} measured" if measured is not None else ", not measured"
    before, after = inputs.evaluate["base_loss"], inputs.evaluate["tuned_loss"]
    text = peak if before is None or after is None else f"{peak}; held-out loss {before:.4g} → {after:.4g}"
    if inputs.evaluate["compared_rows"]:
        matches = (f"{inputs.evaluate[f'{model}_exact_match_percent']:.1f} %" for model in ("base", "tuned"))
        text += f"; exact match {' → '.join(matches)}"
    return f"{text}; {words_of(inputs).right} {shares_in_order(inputs)}" if has_pairs(inputs) else text


def memory_records(inputs: Inputs) -> Iterator[dict[str, float]]:
    """Yield the measured peak of each step and the predicted peak of the run, in GiB."""
    predicted_gib = inputs.estimate["peak_bytes_predicted"] / GIB
    for record in inputs.curves:
        if record["allocated_bytes"]:
            yield {
                "step": int(record["step"]),
                "measured_gib": int(record["allocated_bytes"]) / GIB,
                "predicted_gib": predicted_gib,
            }


# What both pages of the report say: results, figures and tables as plain values.

NOT_EVALUATED = "not evaluated: no rows are held out (data.heldout_fraction is 0)."
WITHOUT_TEXT = "none: a reward model predicts no tokens."
SAMPLES = 6
SHOWN = ("hardware.num_gpus", "train.sharding", "train.method", "train.precision", "train.optimizer", "train.grad_ckpt")
"""Parameters in the table of the run, besides the memory switches that are on."""
# Figure of data/tokens/figures.json → why these rows were dropped.
DROPPED = {
    "no_answer_rows": "had no answer within data.max_length",
    "cut_image_rows": "had an image that data.max_length cuts",
    "dropped_long_rows": "were longer than data.max_length",
    "empty_answer_rows": "had an empty answer",
    "bad_rows": "could not be used",
    "duplicate_rows": "repeated another row",
}


class Result(NamedTuple):
    """A result of the run: a name, its value and what is to be known about it."""

    name: str
    value: str
    note: str


def results(inputs: Inputs, metrics: Mapping[str, Any]) -> list[Result]:
    """Summarise the run, the most important results first."""
    estimate, train, evaluate = inputs.estimate, inputs.train, inputs.evaluate
    share = 100 * estimate["peak_bytes_predicted"] / (estimate["capacity_gib"] * GIB)
    fits = "the run fits" if estimate["fits"] else "the run does not fit"
    errors = metrics["error_percent_by_tier"]
    error = errors["tensors"]
    if train["peak_bytes_measured"] is None:
        measured = f"not measured on {train['device']}"
    elif error is None:
        measured = f"on {train['device']}: another kind of device, so they cannot be compared"
    else:
        measured = f"on {train['device']}: the prediction is off by {error:+.3f} %"
    found = [
        Result("Predicted tensor peak", size(estimate["peak_bytes_predicted"]), f"in {estimate['worst_phase']}"),
        Result("Measured tensor peak", size(train["peak_bytes_measured"]), measured),
        *_reserved(estimate, train, errors["reserved"]),
        Result(
            "Device",
            f"{estimate['gpu']}, {estimate['capacity_gib']:.4g} GiB",
            f"predicted use {significant(share, 3)} %; {fits}",
        ),
        Result("Speed", f"{train['tokens_per_second']:,.0f} tokens/s", f"on {train['device']}"),
    ]
    paired = has_pairs(inputs)
    if paired:
        margins = " → ".join(figure(evaluate[f"{model}_reward_margin"]) for model in ("base", "tuned"))
        note = f"before → after; mean margin {margins}"
        found.append(Result(f"Held-out {words_of(inputs).right}", shares_in_order(inputs), note))
    if evaluate["evaluated_rows"]:
        perplexities = " → ".join(figure(evaluate[f"{model}_perplexity"]) for model in ("base", "tuned"))
        loss = f"{evaluate['base_loss']:.4f} → {evaluate['tuned_loss']:.4f}"
        answers = f" of the {words_of(inputs).better} answers" if paired else ""
        found.append(Result(f"Held-out loss{answers}", loss, f"before → after; perplexity {perplexities}"))
    elif not paired:
        found.append(Result("Held-out loss", NONE, NOT_EVALUATED))
    if evaluate["compared_rows"]:
        right = " → ".join(f"{evaluate[f'{model}_exact_match_percent']:.1f} %" for model in ("base", "tuned"))
        found.append(
            Result("Exact match", right, f"before → after, of {counted(evaluate['compared_rows'], 'greedy answer')}")
        )
    if evaluate["free_text_rows"]:
        shown = counted(evaluate["free_text_rows"], "answer")
        found.append(Result("Free text", shown, "before and after side by side, without a verdict: see Answers"))
    return found


def _reserved(estimate: Mapping[str, Any], train: Mapping[str, Any], error: float | None) -> Iterator[Result]:
    """Predicted and measured reserved memory; nothing where they cannot be compared."""
    if error is not None:
        judged = ", by which the run is judged" if estimate["deciding_tier"] == "reserved" else ""
        value = f"{size(estimate['reserved_bytes_predicted'])} → {size(train['peak_reserved_bytes'])}"
        yield Result("Reserved memory", value, f"predicted → measured: off by {error:+.3f} %{judged}")


def run_table(inputs: Inputs, parameters: Mapping[str, Any]) -> Table:
    """Describe model, data, plan and parameters."""
    tokenize, bucket, train = inputs.tokenize, inputs.bucket, inputs.train
    reasons = ", ".join(f"{tokenize[name]:,} {why}" for name, why in DROPPED.items() if tokenize.get(name))
    words = OBJECTIVES[parameters["train.objective"]].kind.words
    rows_read = tokenize["train_rows"] + tokenize["heldout_rows"] + tokenize["dropped_rows"]
    waiting = f"{bucket['straggler_percent']:.1f} % of the GPUs' time, for the GPU with the most tokens"
    names = [*SHOWN, *(name for name, off in SWITCHED_OFF.items() if parameters[name] != off)]
    shown = {"learning rate": f"{train['lr']:g} at its peak", **{name: parameters[name] for name in names}}
    rows = [
        ("model", describe_model(inputs.model)),
        *([("weights", text)] if (text := inputs.estimate.get("weights")) else []),
        *([("not loaded", not_loaded)] if (not_loaded := inputs.estimate.get("not_loaded")) else []),
        ("data", f"{describe_data(inputs.data)}, format {tokenize['format']}"),
        (
            words.rows,
            f"{tokenize['train_rows']:,} for training, {tokenize['heldout_rows']:,} held out",
        ),
        *((title, f"{count:,} for training") for name, title in words.tokenized if (count := tokenize.get(name))),
        (
            "truncated rows",
            f"{_share(tokenize['truncated_rows'], rows_read)} longer than data.max_length, which lost trained tokens",
        ),
        ("dropped rows", _share(tokenize["dropped_rows"], rows_read) + (f": {reasons}" if reasons else "")),
        ("tokens", f"{tokenize['train_tokens']:,}, {tokenize['supervised_percent']:.1f} % of them trained"),
        ("longest row", f"{tokenize['longest']:,} tokens"),
        ("optimizer steps", f"{bucket['optimizer_steps']:,}, in {counted(bucket['micro_batches'], 'micro-batch')}"),
        ("tokens a step", _step_tokens(bucket)),
        (
            "micro-batches",
            f"{bucket['mode']}; at most {bucket['max_batch_tokens']:,} padded tokens, "
            + counted(bucket["max_batch_rows"], "row")
            # In packed mode rows are packed to the length before.
            + ("" if bucket["mode"] == "packed" else f", {bucket['max_batch_length']:,} tokens a row"),
        ),
        ("padding", f"{bucket['padding_percent']:.1f} % of the tokens computed"),
        *([("waiting", waiting)] if parameters["hardware.num_gpus"] > parameters["train.pipeline_stages"] else []),
        ("trained parameters", f"{train['trained_parameters']:,}"),
        *_experts(train),
        *_kept(train, parameters["train.best_by"]),
        ("trained on", train["device"]),
        *((name, str(value).lower() if isinstance(value, bool) else value) for name, value in shown.items()),
    ]
    return Table(("", ""), rows)


def _step_tokens(bucket: Mapping[str, Any]) -> str:
    """What train.tokens_per_step is, and why if it is automatic."""
    reason = bucket["tokens_per_step_auto"]
    return f"{bucket['tokens_per_step']:,}" + ("" if reason is None else f", by train.tokens_per_step: auto: {reason}")


def _experts(train: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Rows about a mixture of experts; none for other models."""
    if (in_experts := train.get("trained_expert_parameters")) is not None:
        yield "of these in experts", f"{in_experts:,}"
    if (busiest := train.get("expert_load_max")) is not None:
        idle = f"{100 * train['idle_experts_share']:.1f} % of the experts had none"
        yield "tokens by expert", f"the busiest had {busiest:.2f} times an even share, {idle}; no token was dropped"


def _kept(train: Mapping[str, Any], best_by: str) -> Iterator[tuple[str, str]]:
    """Rows about a run that ended early, or keeps the weights of an earlier step; none for other runs."""
    by = FIGURES[best_by]
    if (stopped := train.get("stopped_after_step")) is not None:
        yield "ended early", f"after optimizer step {stopped:,}: {by.no_gain}"
    if (kept := train.get("kept_step")) is not None:
        found = figure(train[f"{by.column}_kept"])
        yield "kept weights", f"those after optimizer step {kept:,}, with the {by.best} ({found})"


def loss_table(inputs: Inputs) -> Table:
    """Held-out loss and perplexity by row length."""
    evaluate = inputs.evaluate
    columns = ("base_loss", "tuned_loss", "base_perplexity", "tuned_perplexity")
    lengths = evaluate["by_length"].items()
    rows: list[tuple[Any, ...]] = [
        (f"{name.replace('_', ' ')} tokens", found["rows"], *(figure(found[column]) for column in columns))
        for name, found in sorted(lengths, key=lambda item: (item[0].startswith("over"), int(item[0].split("_")[-1])))
    ]
    rows.append(("all", evaluate["evaluated_rows"], *(figure(evaluate[column]) for column in columns)))
    header = ("row length", "rows", "loss before", "loss after", "perplexity before", "perplexity after")
    return Table(header, rows)


def merged_note(inputs: Inputs) -> str | None:
    """Loss of the merged model; None if evaluate.merged is false."""
    evaluate = inputs.evaluate
    if "merged_loss" not in evaluate:
        return None
    text = f"Merged into one model: loss {figure(evaluate['merged_loss'])}"
    text += f", {evaluate['merged_minus_tuned_loss']:+.2g} compared with the adapter on its base"
    if (right := evaluate["merged_exact_match_percent"]) is not None:
        text += f"; exact match {right:.1f} %"
    return f"{text}."


def answers_note(inputs: Inputs) -> str | None:
    """Why rows have no answer; None if all have one."""
    if not inputs.evaluate["evaluated_rows"]:
        return WITHOUT_TEXT if has_pairs(inputs) else NOT_EVALUATED
    notes = []
    if inputs.evaluate["tuned_exact_match_percent"] == 0 and inputs.generations:
        notes.append("No answer is exact: the run was short, the model is small, or answers can differ in wording.")
    if not inputs.generations:
        notes.append("None: no held-out row has a prompt that can be answered, or evaluate.generate_rows is 0.")
    evaluate = inputs.evaluate
    if free := evaluate["free_text_rows"]:
        notes.append(
            f"Free text, which can be good in many words: {counted(free, 'answer')}. Read before and after side by "
            "side; only short, closed answers are called correct or wrong."
        )
    longest = f"{counted(evaluate['max_new_tokens'], 'token')} (evaluate.max_new_tokens)"
    if cut := evaluate["generated_rows"] - evaluate["compared_rows"] - free:
        notes.append(
            f"Not compared: {counted(cut, 'answer')} to rows whose own answer is longer than {longest}, or was "
            "truncated at data.max_length. Answers end there."
        )
    if too_long := evaluate["unanswerable_rows"]:
        notes.append(
            f"Skipped: {counted(too_long, 'held-out row')} whose prompt and {longest} are longer than the model's "
            "context."
        )
    return " ".join(notes) or None


def families_table(inputs: Inputs) -> Table:
    """Exact match by family."""
    rows = [
        (name, found["rows"], *(_percent(found[f"{model}_exact_match_percent"]) for model in ("base", "tuned")))
        for name, found in sorted(inputs.evaluate["by_family"].items())
    ]
    return Table(("family", "prompts", "correct before", "correct after"), rows)


def _percent(value: float | None) -> str:
    return NONE if value is None else f"{value:.0f} %"


def tasks_table(inputs: Inputs) -> Table | None:
    """Scores of evaluate.tasks before and after; None without tasks."""
    rows = [
        (task, metric, *(figure(found[model].get(metric)) for model in ("base", "tuned")))
        for task, found in inputs.evaluate.get("tasks", {}).items()
        for metric in found["tuned"]
    ]
    return Table(("task", "metric", "before", "after"), rows) if rows else None


class AnswerSample(NamedTuple):
    """A held-out prompt with its answers, to show."""

    family: str
    files: list[bytes]
    """The hashes of the prompt's files."""
    parts: list[tuple[str, str, bool | None]]
    """Title, text and correctness of the prompt, and of its expected and generated answers."""


def answer_samples(inputs: Inputs) -> list[AnswerSample]:
    """A few prompts with their answers."""
    # The file alternates families, so its first lines are of different ones.
    pool = inputs.generations[: max(SAMPLES, len(inputs.evaluate["by_family"]))]
    count = min(SAMPLES, len(pool))
    lines = [pool[index * len(pool) // count] for index in range(count)]
    return [
        AnswerSample(
            line["family"],
            list(map(bytes.fromhex, line.get("images", ()))),
            [
                ("Prompt", shortened(line["prompt"].strip("\n")), None),
                ("Expected", shortened(line["expected"].strip("\n")), None),
                ("Before", shortened(line["base"].strip("\n")), line["base_correct"]),
                ("After", shortened(line["tuned"].strip("\n")), line["tuned_correct"]),
            ],
        )
        for line in lines
    ]


def phases_table(inputs: Inputs, metrics: Mapping[str, Any]) -> Table:
    """Predicted and measured peak of the tensors in every phase."""
    predicted, measured = inputs.estimate["predicted_by_phase"], inputs.train["measured_by_phase"]
    errors = metrics["error_percent_by_phase"]
    texts = sizes(peaks.get(phase) for phase in errors for peaks in (predicted, measured))
    rows = [
        (phase, *texts[2 * number : 2 * number + 2], NONE if error is None else f"{error:+.3f} %")
        for number, (phase, error) in enumerate(errors.items())
    ]
    return Table(("phase", "predicted tensor peak", "measured tensor peak", "error"), rows)


def dash_note(inputs: Inputs) -> str | None:
    """Why cells of `phases_table` have a dash; None if none has."""
    predicted, measured = inputs.estimate["predicted_by_phase"], inputs.train["measured_by_phase"]
    reasons = []
    for word, peaks in (("measured", measured), ("predicted", predicted)):
        if names := [phase for phase in in_order({**predicted, **measured}) if peaks.get(phase) is None]:
            reasons.append(f"not {word} ({', '.join(names)})")
    if not comparable(inputs):
        reasons.append("no error, as the run was predicted and measured for different kinds of device")
    return f"{NONE} means {'; '.join(reasons)}." if reasons else None


def tiers_table(inputs: Inputs) -> Table | None:
    """Predicted memory of allocator, process and host; None on a CPU, whose memory is not reserved."""
    estimate = inputs.estimate
    if estimate["reserved_bytes_predicted"] is None:
        return None
    rows = {
        "tensors": estimate["peak_bytes_predicted"],
        "reserved, expandable segments": estimate["reserved_bytes_predicted_expandable"],
        "reserved, fixed segments": estimate["reserved_bytes_predicted_native"],
        "reserved with the run's train.expandable_segments": estimate["reserved_bytes_predicted"],
        "process, without margin": estimate["process_bytes_predicted"],
        f"RAM of a host (GPUs: {estimate['processes_per_host']})": estimate["host_bytes_predicted"],
    }
    return Table((f"on {estimate['gpu']}", "predicted"), list(zip(rows, sizes(rows.values()), strict=True)))


def plan_note(inputs: Inputs) -> str:
    """Predicted reserved memory over the optimizer steps of the plan, of a GPU."""
    estimate = inputs.estimate
    text = f"Reserved over the plan: {estimate['reserved_replayed']}."
    if inputs.reserved:
        text += f" It is constant after optimizer step {estimate['reserved_settled_step']} of these."
        if retries := estimate["retries_predicted"]:
            text += f" The allocator frees its cache {counted(retries, 'time')} because memory is full."
    return text


def measured_note(inputs: Inputs) -> str:
    """How memory was measured, and the peak of each process if there are several."""
    text = f"Measured on {inputs.train['device']}: {inputs.train['peak_measured_how'] or 'nothing'}."
    if peaks := inputs.train.get("peak_bytes_measured_by_rank"):
        text += f" Measured peak of each of {len(peaks)} processes: {', '.join(map(size, peaks))}."
    return text


def categories_table(inputs: Inputs) -> Table:
    """The categories at the peak, largest first."""
    peak = inputs.breakdown["peak"]
    total = sum(peak.values())
    found = [item for item in sorted(peak.items(), key=lambda item: (-item[1], item[0])) if item[1]]
    texts = sizes(count for _, count in found)
    rows = [
        (name.replace("_", " "), text, f"{100 * count / total:.1f} %")
        for (name, count), text in zip(found, texts, strict=True)
    ]
    return Table(("category", "bytes", "share"), rows)


def tensors_table(inputs: Inputs) -> Table:
    """The largest groups of equal tensors at the peak."""
    rows, groups = [], inputs.explanation["top"]
    for group, text in zip(groups, sizes(group["bytes"] for group in groups), strict=True):
        operation = group["operation"] + (f" in {group['phase']}" if group["phase"] else "")
        shape = NONE if group["shape"] is None else " × ".join(map(str, group["shape"])) + f" {group['dtype']}"
        category, module = group["category"].replace("_", " "), group["module"] or NONE
        rows.append((category, operation, module, shape, group["count"], text))
    return Table(("category", "allocated by", "module", "shape", "tensors", "bytes"), rows)


def states_table(inputs: Inputs) -> Table:
    """The closed-form memory that persists between steps."""
    states = inputs.explanation["states"]
    texts = sizes(line["bytes"] for line in states)
    rows = [
        (line["category"].replace("_", " "), line["why"], line["tensors"], text)
        for line, text in zip(states, texts, strict=True)
    ]
    return Table(("category", "content", "tensors", "bytes"), rows)


def switches(inputs: Inputs) -> list[tuple[str, int, int]]:
    """Switch, predicted peak and bytes saved compared with the run, which is `current`; what saves most comes first."""
    peaks = {record["switch"]: round(float(record["peak_gib"]) * GIB) for record in inputs.switches}
    found = [(switch, peak, peaks["current"] - peak) for switch, peak in peaks.items()]
    return sorted(found, key=lambda line: (line[1], line[0]))


def switches_table(inputs: Inputs) -> Table:
    """Predicted peak after changing one switch."""
    found = switches(inputs)
    rows = []
    for (name, peak, saved), text in zip(found, sizes(peak for _, peak, _ in found), strict=True):
        percent = f"{100 * abs(saved) / (peak + saved):.1f} %"
        change = f"saves {percent}" if saved > 0 else f"costs {percent} more"
        rows.append(("this run", text, "") if name == "current" else (name, text, change if saved else "the same"))
    return Table(("switch", "predicted tensor peak", "against this run"), rows)


def _share(part: int, total: int) -> str:
    """Format a count and its share."""
    return f"{part:,} ({100 * part / total:.1f} %)"
