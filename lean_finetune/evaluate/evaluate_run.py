"""Run stage evaluate: evaluate all models, write their answers and metrics."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer

from cuda_memory.terminal import echo
from lean_finetune.config.declared_params import declared_part, read_params
from lean_finetune.config.schema import BaseWeights, Params
from lean_finetune.core.atomic_files import (
    FIGURES,
    atomic_directory,
    read_sealed,
    seal_tables,
    write_json,
    write_sealed,
    write_text,
)
from lean_finetune.data.chat.tokenizer_files import compile_own_template
from lean_finetune.distributed.processes import uses_cuda
from lean_finetune.evaluate.base_and_tuned import (
    RESULTS,
    EvaluationRows,
    evaluate_metrics,
    evaluate_models,
    generation_lines,
)
from lean_finetune.evaluate.generate import choose_prompts, special_ids, spread_rows
from lean_finetune.evaluate.harness_tasks import HarnessTasks, load_tasks, task_figures
from lean_finetune.islands.heldout import HELDOUT
from lean_finetune.model.allocator_settings import use_segments
from lean_finetune.model.model_config import max_positions
from lean_finetune.model.precision import precision_of, resolved
from lean_finetune.pinning.read_locks import read_tokenizer_lock
from lean_finetune.run.assets import Assets
from lean_finetune.run.rows import complete_rows
from lean_finetune.step.evaluation_limits import EvaluationLimits
from lean_finetune.step.token_rows import TokenRows


def run_stage(
    *,
    tokens: Path,
    model_lock: Path,
    tokenizer_lock: Path,
    reference: Path,
    tuned: Path,
    precision: Path,
    out: Path,
    metrics: Path,
) -> None:
    """Evaluate each model and write losses and answers; the paths are the command's options."""
    p = read_params()
    torch.set_num_threads(p.run.cpu_threads or torch.get_num_threads())
    device = torch.device("cuda" if uses_cuda(p.run.device) else "cpu")
    if note := use_segments(p.train.expandable_segments, device):
        echo(f"note: {note}", err=True)
    weights, assets = resolved(p, precision_of(p, precision)), Assets.pinned(model_lock)
    verified = assets.verify(read_tokenizer_lock(tokenizer_lock)["files"])
    tokenizer = Tokenizer.from_file(str(assets.directory / "tokenizer.json"))
    rows = TokenRows(tokens, "heldout", p.train.row_kind)
    config = assets.config(weights, rows.attached)
    complete_rows({"heldout": rows}, assets, config, weights, tokens=tokens, reference=reference)
    limits, positions = EvaluationLimits.from_params(p, rows.supervised), max_positions(config)
    evaluated = _choose_rows(p, tokens, rows, limits, positions, tokenizer)
    tasks = _harness_tasks(p, tokens, tuned, tokenizer, evaluated, limits, positions, weights, device)
    if not evaluated.loss_rows:
        echo("note: no rows are held out (data.heldout_fraction is 0), so there is nothing to evaluate on", err=True)
    outputs = evaluate_models(
        assets,
        tuned,
        weights,
        evaluated,
        limits,
        device=device,
        progress=p.run.progress,
        merged=p.evaluate.merged,
        tasks=tasks,
        seed=p.seed,
    )
    for files in verified:
        files.refuse_change()
    lines = generation_lines(evaluated, outputs, tokenizer)
    scores = task_figures({name: one.tasks for name, one in outputs.items()})
    figures = {**evaluate_metrics(evaluated, outputs, lines), "max_new_tokens": limits.max_new_tokens, **scores}
    losses = {name: (one.row_losses, one.other_losses) for name, one in outputs.items()}
    figures |= evaluated.compared.metrics(losses)
    compared_lines = evaluated.compared.lines(losses, tokenizer)
    with atomic_directory(out) as directory:
        write_text(directory / "generations.jsonl", _json_lines(lines))
        if compared_lines is not None:
            write_text(directory / "pairs.jsonl", _json_lines(compared_lines))
        write_sealed(directory / FIGURES, figures)
        seal_tables(directory)
    results = (*RESULTS, *evaluated.compared.results)
    write_json(metrics, {**{name: figures[name] for name in results}, **scores}, sort_keys=False)


def _harness_tasks(
    p: Params,
    tokens: Path,
    tuned: Path,
    tokenizer: Tokenizer,
    evaluated: EvaluationRows,
    limits: EvaluationLimits,
    positions: int | None,
    weights: BaseWeights,
    device: torch.device,
) -> HarnessTasks | None:
    """The tasks of evaluate.tasks; None without any."""
    names, task_rows = p.evaluate.tasks, p.evaluate.task_rows
    with_template, date = p.evaluate.apply_chat_template, p.data.template_date
    if not names:
        return None
    if with_template == "auto":
        with_template = read_sealed(tokens / "meta.json")["chat_template_sha256"] is not None
    manager, found = load_tasks(names)
    return HarnessTasks(
        manager=manager,
        tasks=found,
        rows=task_rows,
        tokenizer=tokenizer,
        template=compile_own_template(tuned, date) if with_template else None,
        max_length=min(limits.max_tokens, positions or limits.max_tokens),
        limits=limits,
        weights=weights,
        pad_id=evaluated.pad_id,
        eos_id=evaluated.pad_id if evaluated.eos_id is None else evaluated.eos_id,
        device=device,
    )


def _json_lines(lines: Iterable[Mapping[str, Any]]) -> str:
    return "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)


def _choose_rows(
    p: Params, tokens: Path, rows: TokenRows, limits: EvaluationLimits, positions: int | None, tokenizer: Tokenizer
) -> EvaluationRows:
    """Choose held-out rows and prompts; `positions` of the model."""
    kind = p.train.row_kind
    numbers = np.arange(len(rows))
    is_better = kind.is_better(numbers, rows.column(kind.label_column))
    rows.dropped = rows.dropped | (numbers % kind.token_rows > 0)
    chosen = np.array(spread_rows(rows.used, p.evaluate.loss_rows), np.int64)
    better, worse = chosen[is_better[chosen]], chosen[~is_better[chosen]]
    rows.dropped = rows.dropped | ~is_better  # The worse answers are no examples.
    meta = read_sealed(tokens / "meta.json")
    special = special_ids(tokenizer)
    most_prompt_tokens = None if positions is None else positions - limits.max_new_tokens
    prompts, unanswerable_rows = choose_prompts(
        rows,
        p.evaluate.generate_rows,
        max_length=meta["max_length"],
        max_prompt_tokens=most_prompt_tokens,
        max_new_tokens=limits.max_new_tokens,
        special=special,
    )
    declared_part(p.train.preference)  # For rows that are no pairs too, DVC compares all that decides the figures.
    return EvaluationRows(
        rows=rows,
        loss_rows=better.tolist(),
        prompts=prompts,
        unanswerable_rows=unanswerable_rows,
        special=special,
        eos_id=meta["eos_id"],
        pad_id=meta["pad_id"],
        compared=HELDOUT[kind.name](
            rows=rows, better=better, worse=worse, objective=p.train.goal, values=p.train.preference_values
        ),
    )
