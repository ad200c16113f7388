"""The command `lean-finetune generate`: answers to a file of prompts."""

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from cuda_memory.units import counted
from lean_finetune.commands.chat import BITS, MODEL, NEW_TOKENS, note
from lean_finetune.core.errors import DoesNotFit, UserError
from lean_finetune.core.stage_command import StageCommand

if TYPE_CHECKING:
    from lean_finetune.commands.tuned.conversation import Prompter
    from lean_finetune.commands.tuned.tuned_model import TunedModel

PATH = click.Path(path_type=Path)


@click.command(cls=StageCommand)
@click.argument("prompts", type=PATH)
@click.argument("answers", type=PATH)
@MODEL
@BITS
@NEW_TOKENS
@click.option(
    "--rows", type=click.IntRange(min=1), default=32, show_default=True, help="Most prompts decoded together."
)
def generate(prompts: Path, answers: Path, model: Path, bits: str | None, max_new_tokens: int, rows: int) -> None:
    """Answer a file of prompts.

    PROMPTS is a JSON Lines file. ANSWERS appears complete or not at all. Decoding is greedy. A line has `messages`
    (a conversation, answered by its chat template) or `prompt` (plain text). It is written back with the key
    `answer`. Prompts decoded together are as many as the predicted memory has room for.

    For example: lean-finetune generate prompts.jsonl answers.jsonl
    """
    from lean_finetune.commands.tuned.conversation import Prompter
    from lean_finetune.commands.tuned.tuned_model import find_tuned
    from lean_finetune.core.atomic_files import write_text
    from lean_finetune.evaluate.generate import NO_FAMILY, Prompt, greedy_answers, stop_ids
    from lean_finetune.step.evaluation_limits import EvaluationLimits
    from lean_finetune.train.process.training_device import training_device

    tuned, device = find_tuned(model, bits), training_device()
    prompter = Prompter(tuned.directory, tuned.vocabulary)
    ends = prompter.stops()
    lines = read_prompts(prompts, prompter, tuned.positions, max_new_tokens)
    longest = max(len(ids) for _, ids in lines) + max_new_tokens
    at_once = rows_at_once(tuned, min(rows, len(lines)), longest, max_new_tokens)
    limits = EvaluationLimits(
        max_tokens=at_once * longest,
        logits_chunk=at_once * longest,
        max_new_tokens=max_new_tokens,
        generate_batch_rows=at_once,
    )
    lm = tuned.load(device)
    found = greedy_answers(
        lm,
        tuned.weights,
        [Prompt(family=NO_FAMILY, ids=ids, answer_ids=[]) for _, ids in lines],
        stops=sorted({*stop_ids(lm, None, [], set()), *ends}),
        limits=limits,
        pad_id=prompter.pad_id,
        device=device,
        progress="answers" if sys.stderr.isatty() else None,
    )
    rows_out = ({**row, "answer": prompter.text(ids)} for (row, _), ids in zip(lines, found, strict=True))
    write_text(answers, "".join(map(json_line, rows_out)))
    note(f"{counted(len(lines), 'answer')}: {answers}")


def json_line(row: dict[str, Any]) -> str:
    """A row as a line of JSON; in ASCII if it has lone surrogates, which UTF-8 cannot write."""
    line = json.dumps(row, ensure_ascii=False) + "\n"
    try:
        line.encode()
    except UnicodeEncodeError:
        return json.dumps(row) + "\n"
    return line


def read_prompts(
    file: Path, prompter: "Prompter", positions: int | None, new_tokens: int
) -> list[tuple[dict[str, Any], list[int]]]:
    """Each line of a file with its prompt's ids.

    Raises:
        UserError: with file and line.
    """
    try:
        texts = file.read_text(encoding="utf-8-sig").split("\n")  # `splitlines` also divides texts at U+2028.
    except FileNotFoundError:
        raise UserError(f"{file}: file does not exist; name a JSON Lines file of prompts") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{file}: must be a JSON Lines file in UTF-8; {error}; name another") from None
    lines = [(f"{file}:{number}", text) for number, text in enumerate(texts, 1) if text.strip()]
    if not lines:
        raise UserError(f"{file}: has no prompts; write one JSON object a line, with 'messages' or 'prompt'")
    return [_prompt(where, text, prompter, positions, new_tokens) for where, text in lines]


def _prompt(
    where: str, text: str, prompter: "Prompter", positions: int | None, new_tokens: int
) -> tuple[dict[str, Any], list[int]]:
    """The row of a line, and its prompt's ids."""
    from lean_finetune.data.format.format_base import RowFault
    from lean_finetune.data.read.decode_rows import parse_line

    row, wrong, _ = parse_line(text.encode())
    if row is None:
        raise UserError(f"{where}: {wrong}")
    messages, prompt = row.get("messages"), row.get("prompt")
    try:
        if isinstance(messages, list) and all(isinstance(message, dict) for message in messages):
            ids = prompter.of_messages(messages, row.get("tools"))
        elif isinstance(prompt, str):
            ids = prompter.of_text(prompt)
        else:
            raise UserError(f"{where}: must have 'messages', a list of messages, or 'prompt', a text; add one")
    except RowFault as fault:
        raise UserError(f"{where}: {fault}") from None
    except RecursionError:
        raise UserError(f"{where}: nested too deep; make it flatter") from None
    if positions is not None and len(ids) + new_tokens > positions:
        tokens = counted(len(ids), "token")
        raise UserError(
            f"{where}: {tokens} and an answer of up to {new_tokens} exceed the model's {positions}; shorten it, or "
            "lower --max-new-tokens"
        )
    return row, ids


def rows_at_once(tuned: "TunedModel", rows: int, tokens: int, new_tokens: int) -> int:
    """How many prompts of this length, halved as often as needed, fit the free memory by prediction.

    Raises:
        DoesNotFit: not even one does.
    """
    from lean_finetune.commands.tuned.tuned_model import free_bytes

    free, _ = free_bytes()
    while rows > 1 and tuned.peak_bytes(rows=rows, tokens=tokens, new_tokens=new_tokens) > free:
        rows //= 2
    if rows == 1 and tuned.longest_that_fits(tokens, new_tokens) < tokens:
        raise DoesNotFit(
            f"--model: the longest prompt with its answer has {tokens} tokens, which do not fit the free memory "
            "(predicted); shorten it, lower --max-new-tokens, or store the base in fewer bits with --bits 4"
        )
    return rows
