"""The answer of `lean-finetune plan` as lines of at most 80 columns, and as JSON."""

import math
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from cuda_memory.units import COLUMNS, counted, labelled, readable_size, readable_times, round_up, significant
from lean_finetune.commands.choose.sampled_rows import SampledRows
from lean_finetune.memory.advice.run import Run
from lean_finetune.memory.advice.search import REFUSED, Fitting
from lean_finetune.memory.advice.search_space import Candidate
from lean_finetune.memory.advice.what_fits import LENGTH_STEP
from lean_finetune.memory.choice.choose import BF16_UPDATES, Chosen, Lost, known_bytes, what_would_do
from lean_finetune.memory.choice.fastest import FastestSets
from lean_finetune.memory.switches.all_switches import SWITCHES
from lean_finetune.memory.switches.switch import SAME
from lean_finetune.plan.planner import few_steps_note, steps_of_epoch
from lean_finetune.plan.step_tokens import StepTokens

LABEL = 21
"""Columns of a label, as in the answer of fit."""
MOST_LOST = 6
QUANTILES = (50, 90, 99)
METHOD_WORDS = {
    "full": "all weights",
    "lora": "adapters beside exact weights",
    "qlora": "adapters beside weights rounded to 4 bits",
    "int8_lora": "adapters beside weights rounded to 8 bits",
}
BF16_UPDATES_EFFECT = (
    "updates below about 1/256 of a weight are rounded away, and moments have 8 bits. Compare the held-out loss"
)
LONG = 1.5
"""A longest row that is longer than this many times the 99th percentile: fewer tokens are worth a thought."""
SAME_SPEED = 0.005
"""Shares of time below this are not shown."""


def plan_lines(
    chosen: Chosen, rows: SampledRows | None, written: int | None, step: StepTokens, faster: Chosen | None
) -> Iterator[str]:
    """The lines of the answer for a run that fits; `written`: the number of the set that was written.

    `faster`: the answer of `faster_with_bf16_updates`.
    """
    best, start = chosen.choices[0], chosen.start
    p, train = start.run.params, start.run.setting.train
    usable = f"{readable_size(best.run.usable_bytes)} usable on {best.run.device.name}"
    yield labelled("plan", f"fits: needs {readable_size(best.prediction.peak.bytes)}, {usable}")
    if (limit := best.run.limit_text) is not None:
        yield from _wrapped("limit", limit)
    words = [words_of(choice.run) for choice in chosen.choices]
    common = {key: text for key, text in words[0].items() if all(other.get(key) == text for other in words)}
    yield from _wrapped("trains", f"{', '.join(common.values())}: {METHOD_WORDS[train.method]}")
    yield ""
    for place, choice in enumerate(chosen.choices, start=1):
        own = [text for key, text in words[place - 1].items() if key not in common] or ["as above"]
        yield from _wrapped(f"{place}{' (written)' if place == written else ''}", ", ".join(own))
        yield from _wrapped("", _price(choice, chosen))
        yield from _wrapped("", _learning(choice))
    if faster is not None:
        yield from _faster_lines(faster, chosen)
    lost = [*_lost_methods(chosen.lost), *_lost_sets(chosen)][:MOST_LOST]
    for place, text in enumerate(lost):
        yield from _wrapped("" if place else "why not", text)
    yield ""
    if rows is not None:
        yield from _wrapped("rows", rows.text)
        yield from _wrapped("tokens of a row", _length_text(rows, p.data.max_length))
    mode = "packed" if best.run.bucket.mode == "packed" else "padded"
    yield from _wrapped("micro-batches", f"{mode}: {start.mode}")
    rate = "auto" if p.train.lr == "auto" else f"{p.train.lr:g}"
    kept = f"{step.tokens:,} tokens a step, lr {rate}, epochs {p.train.epochs}, {p.train.optimizer}"
    yield labelled("as given", kept)
    if step.is_auto:
        yield from _wrapped("tokens a step", f"auto: {step.tokens:,}, {step.reason}")
    if rows is not None:
        yield from _duration_lines(chosen, rows, step)


def _wrapped(label: str, text: str) -> Iterator[str]:
    for number, line in enumerate(textwrap.wrap(text, COLUMNS - LABEL)):
        yield labelled(label if number == 0 else "", line)


def set_words(run: Run) -> str:
    """The settings of a run that decide memory and speed, in words."""
    return ", ".join(words_of(run).values())


def words_of(run: Run) -> dict[str, str]:
    """The settings of a run in words, by what they are about; what is turned off is left out."""
    train, words = run.setting.train, {}
    words["method"] = train.method + (f" of rank {train.lora.rank}" if train.adapted else "")
    words["precision"] = train.precision + (" with fp32 master weights" if train.master_weights else "")
    bucket = run.bucket
    size = f"{bucket.fixed_rows} rows" if bucket.mode == "fixed" else f"{bucket.max_tokens:,} tokens"
    words["micro-batch"] = f"micro-batches of {size}" + (", packed" if bucket.mode == "packed" else "")
    for switch in SWITCHES:
        words |= switch.words(run.setting)
    return words


def _price(choice: Fitting, chosen: Chosen) -> str:
    """Peak, speed, and what it needs of the host."""
    parts = [f"peak {readable_size(choice.prediction.peak.bytes)}"]
    if (speed := chosen.start.tokens_per_second(choice.slowdown)) is not None:
        slow, fast = (significant(tokens, 2) if tokens < 100 else f"{round(tokens, -2):,.0f}" for tokens in speed)
        parts.append(f"{slow} to {fast} tokens/s")
    more = choice.slowdown / chosen.choices[0].slowdown - 1
    if choice is not chosen.choices[0]:
        parts.append("as fast" if abs(more) < SAME_SPEED else f"{abs(more):.0%} {'slower' if more > 0 else 'faster'}")
    for what, where, size in choice.run.host_bytes(choice.prediction):
        parts.append(f"{readable_size(size)} of {what} {where}")
    return "; ".join(parts)


def _faster_lines(faster: Chosen, chosen: Chosen) -> Iterator[str]:
    """A much faster set with another training result, which the user must ask for."""
    words, own = (words_of(one.choices[0].run) for one in (faster, chosen))
    yield from _wrapped("faster", ", ".join(text for key, text in words.items() if own.get(key) != text))
    yield from _wrapped("", _price(faster.choices[0], faster))
    yield from _wrapped("", f"changes training: {BF16_UPDATES_EFFECT}")
    yield from _wrapped("", f"to take it: {' '.join(f'-S {key}={value}' for key, value in BF16_UPDATES.items())}")


def _learning(choice: Fitting) -> str:
    """What it changes in training against a run without memory switches."""
    same = choice.effect == SAME
    return "same training result" if same else f"changes training: {choice.effect_text}"


def _lost_methods(lost: Sequence[Lost]) -> Iterator[str]:
    for one in lost:
        if one.why is not None:
            yield f"{one.method}: {one.why}"
        else:
            over = readable_size(max(0, one.least_bytes - one.most_bytes))
            yield f"{one.method}: {readable_size(one.least_bytes)} or more without offload, {over} above the limit"


def _lost_sets(chosen: Chosen) -> Iterator[str]:
    """Faster sets that differ from the best one in one switch, and by how much they do not fit."""
    sets, best = chosen.sets, chosen.choices[0]
    own = words_of(best.run)
    for one in _neighbours(sets, best):
        most, needed = sets.most_bytes(one), known_bytes(sets, one)
        words = words_of(one.run)
        names = [words[key] for key in words if own.get(key) != words[key]]
        names += [f"without {own[key]}" for key in own if key not in words]
        traced = sets.traced.get(one.flags)
        if traced is not None and traced[1] is REFUSED:
            yield f"{', '.join(names)}: not possible with the rest"
        elif needed > most:
            or_more = "" if traced is not None else " or more"
            over = readable_size(needed - most)
            yield f"{', '.join(names)}: {readable_size(needed)}{or_more}, {over} above the limit"


def _neighbours(sets: FastestSets, best: Candidate) -> list[Candidate]:
    """Combinations that differ from the best one in one switch and are faster, the fastest first."""

    def differs(one: Candidate) -> int:
        return sum(a.level != b.level for a, b in zip(one.options, best.options, strict=True))

    alike = [one for group in sets.groups.values() for one in group if differs(one) == 1]
    faster = [one for one in alike if one.slowdown < best.slowdown]
    nearest: dict[int, Candidate] = {}
    for one in sorted(faster, key=lambda one: one.total_level):  # Of each switch the variant most like the best one's.
        place = next(k for k, (a, b) in enumerate(zip(one.options, best.options, strict=True)) if a.level != b.level)
        nearest[place] = one
    return sorted(nearest.values(), key=lambda one: one.slowdown)


def _length_text(rows: SampledRows, max_length: int) -> str:
    """Quantiles of the rows' tokens, and how many rows end at data.max_length."""
    lengths = rows.index.lengths
    quantiles = np.percentile(lengths, QUANTILES)
    shown = [f"{name} {tokens:,.0f}" for name, tokens in zip(("median", "p90", "p99"), quantiles, strict=True)]
    high = round_up(math.ceil(quantiles[-1]), LENGTH_STEP)
    text = f"{', '.join(shown)}, longest {int(lengths.max()):,}; data.max_length {max_length:,}"
    if (cut := float((lengths > max_length).mean())) > 0:
        return f"{text}, at which {cut:.1%} of the rows end"
    if max_length > LONG * high:
        return f"{text}; --length {high} would cut {(lengths > high).mean():.1%} of the rows, and need less memory"
    return f"{text}, which would cut longer rows added later" if max_length < LENGTH_STEP + lengths.max() else text


def _duration_lines(chosen: Chosen, rows: SampledRows, step: StepTokens) -> Iterator[str]:
    """How many optimizer steps the run has, how long it takes, and what would give it more steps if they are few."""
    p = chosen.start.run.params
    epochs, trained = p.train.epochs, rows.trained(p)
    cut = replace(rows.index, lengths=np.minimum(rows.index.lengths, p.data.max_length))
    mean_length = float(cut.of_kind(p.train.row_kind, joined=False).step_tokens.mean())
    tokens = trained * mean_length
    steps = epochs * steps_of_epoch(tokens, mean_length, step.tokens)
    each = f"{counted(epochs, 'epoch', 'epochs')} of {round(tokens):,} tokens, {step.tokens:,} a step"
    yield from _wrapped("optimizer steps", f"about {steps:,}: {each}")
    if (speed := chosen.start.tokens_per_second(chosen.choices[0].slowdown)) is not None:
        slow, fast = (epochs * tokens / rate for rate in speed)
        yield labelled("duration", f"{readable_times(fast, slow)} for all epochs, by the data sheet")
    note = few_steps_note(
        steps,
        round(trained * epochs),
        mean_length=mean_length,
        tokens_per_step=step.tokens,
        epochs=epochs,
        is_auto=step.is_auto,
    )
    if note is not None:
        yield from _wrapped("note", f"{note}. plan changes neither, as both change training")


def nothing_fits(chosen: Chosen, lighter: Chosen | None) -> str:
    """One line for a model that does not fit: the smallest GPU that would do, and the smallest change.

    `lighter` is the answer for a method with less memory that fits, if there is one.
    """
    would, run = what_would_do(chosen), chosen.start.run
    changes = [f"rows of at most {would.length} tokens (--length {would.length})"] if would.length is not None else []
    if lighter is not None:
        peak = readable_size(lighter.choices[0].prediction.peak.bytes)
        changes.append(f"--method {lighter.method}, with a peak of {peak}")
    gpu = f"the smallest known GPU that would do is {would.gpu}" if would.gpu else "no known GPU is large enough"
    changed = f"; here, {' or '.join(changes)} would fit" if changes else ""
    gpus = f"{run.params.hardware.num_gpus} x " if run.params.hardware.num_gpus > 1 else ""
    host = "" if run.host_ram_bytes is None else f" and {readable_size(run.host_ram_bytes)} of host memory"
    needs = f"needs {readable_size(would.peak_bytes)} of {run.limit_text or readable_size(run.fitting_bytes)}"
    if would.peak_bytes <= run.fitting_bytes:
        needs += ", but blocks that the allocator reserves, or what the host must hold, do not fit"
    return (
        f"hardware.gpu: nothing fits {gpus}{run.device.name}{host}: with every memory switch {chosen.method} "
        f"{needs}; {gpu}{changed}"
    )


def plan_json(chosen: Chosen, rows: SampledRows | None, flags: Sequence[str], faster: Chosen | None) -> dict[str, Any]:
    """The answer as JSON. Sizes are in bytes, lengths in tokens."""
    return {
        "faster_with_bf16_updates": [] if faster is None else [_choice_json(faster.choices[0], faster)],
        "sets": [_choice_json(choice, chosen) for choice in chosen.choices],
        "method": chosen.method,
        "asked": list(flags),
        "usable_bytes": chosen.start.run.usable_bytes,
        "lost": [
            {"method": one.method, "refused": one.why, "least_bytes": one.least_bytes, "most_bytes": one.most_bytes}
            for one in chosen.lost
        ],
        "why_not": list(_lost_sets(chosen)) if chosen.choices else [],
        "bucket_mode": chosen.start.mode,
        "tokens_per_step": chosen.start.run.setting.train.step_tokens,
        "rows": rows and _rows_json(rows),
        "would_do": None if chosen.choices else vars(what_would_do(chosen)),
        "traces": len(chosen.sets.traced),
    }


def _choice_json(choice: Fitting, chosen: Chosen) -> dict[str, Any]:
    return {
        "settings": [f"{key}={value}" for key, value in chosen.settings(choice).items()],
        "words": set_words(choice.run),
        "peak_bytes": choice.prediction.peak.bytes,
        "tokens_per_second": chosen.start.tokens_per_second(choice.slowdown),
        "slowdown": round(choice.slowdown / chosen.choices[0].slowdown, 4),
        "effect": choice.effect_text,
        "outside_of_the_device": [
            {"what": what, "where": where, "bytes": size}
            for what, where, size in choice.run.host_bytes(choice.prediction)
        ],
    }


def _rows_json(rows: SampledRows) -> Mapping[str, Any]:
    lengths = rows.index.lengths
    quantiles = {f"p{q}": float(np.percentile(lengths, q)) for q in QUANTILES}
    return {"tokenized": rows.tokenized, "total": rows.total, **quantiles, "longest": int(lengths.max())}
