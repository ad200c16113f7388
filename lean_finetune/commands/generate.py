"""The command `lean-finetune generate`: answers to a file of prompts."""

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from cuda_memory.units import counted
from cuda_memory.user_paths import PATH, output_file
from lean_finetune.commands.chat import BITS, MODEL, NEW_TOKENS, note
from lean_finetune.commands.fit_images import SHOWN_FILES
from lean_finetune.core.errors import DoesNotFit, UserError
from lean_finetune.core.stage_command import StageCommand
from lean_finetune.pinning.config_file import refuse_no_model

if TYPE_CHECKING:
    from lean_finetune.commands.tuned.tuned_model import TunedModel
    from lean_finetune.memory.trace.known_images import KnownImages


@click.command(cls=StageCommand)
@click.argument("prompts", type=PATH)
@click.argument("answers", type=PATH)
@MODEL
@BITS
@NEW_TOKENS
@click.option(
    "--rows", type=click.IntRange(min=1), default=32, show_default=True, help="Most prompts decoded together."
)
@SHOWN_FILES
def generate(
    prompts: Path,
    answers: Path,
    model: Path,
    bits: str | None,
    max_new_tokens: int,
    rows: int,
    files: tuple[str, ...],
) -> None:
    """Answer a file of prompts.

    PROMPTS is a JSON Lines file. ANSWERS appears complete or not at all. Decoding is greedy. A line has `messages`
    (a conversation, answered by its chat template) or `prompt` (plain text). It is written back with the key
    `answer`. Prompts decoded together are as many as the predicted memory has room for.

    Conversations name images as rows of training do, by paths relative to PROMPTS. --image shows the same
    images in all of them.

    For example: lean-finetune generate prompts.jsonl answers.jsonl
    """
    refuse_no_model(model)
    if not prompts.exists():
        raise UserError(f"{prompts}: file does not exist; name a JSON Lines file of prompts")
    out = output_file(answers, "ANSWERS")
    from lean_finetune.commands.tuned.conversation import Prompter
    from lean_finetune.commands.tuned.prompt_images import given_files, image_reader
    from lean_finetune.commands.tuned.prompt_lines import PromptReader, read_prompts
    from lean_finetune.commands.tuned.tuned_model import find_tuned
    from lean_finetune.core.atomic_files import write_text
    from lean_finetune.evaluate.generate import greedy_answers, stop_ids
    from lean_finetune.step.evaluation_limits import EvaluationLimits
    from lean_finetune.train.process.training_device import training_device

    tuned, device = find_tuned(model, bits), training_device()
    prompter = Prompter(tuned.directory, tuned.vocabulary)
    ends = prompter.stops()
    with image_reader(tuned, prompter) as reader:
        lines = read_prompts(prompts, PromptReader(prompter, reader, given_files(files), tuned, max_new_tokens))
        shown = [line.shown for line in lines if line.shown]
        tuned = tuned.whole() if shown else tuned
        known = reader.known(shown) if reader is not None and shown else None
        longest = max(len(line.ids) for line in lines) + max_new_tokens
        at_once = rows_at_once(tuned, min(rows, len(lines)), longest, max_new_tokens, known)
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
            [line.prompt for line in lines],
            stops=sorted({*stop_ids(lm, None, [], set()), *ends}),
            limits=limits,
            pad_id=prompter.pad_id,
            device=device,
            progress="answers" if sys.stderr.isatty() else None,
            show=None if reader is None else reader.show,
        )
    rows_out = ({**line.row, "answer": prompter.text(ids)} for line, ids in zip(lines, found, strict=True))
    write_text(out, "".join(map(json_line, rows_out)))
    note(f"{counted(len(lines), 'answer')}: {answers}")


def json_line(row: dict[str, Any]) -> str:
    """A row as a line of JSON; in ASCII if it has lone surrogates, which UTF-8 cannot write."""
    line = json.dumps(row, ensure_ascii=False) + "\n"
    try:
        line.encode()
    except UnicodeEncodeError:
        return json.dumps(row) + "\n"
    return line


def rows_at_once(
    tuned: "TunedModel", rows: int, tokens: int, new_tokens: int, shown: "KnownImages | None" = None
) -> int:
    """How many prompts of this length, halved as often as needed, fit the free memory by prediction.

    Raises:
        DoesNotFit: not even one does.
    """
    from lean_finetune.commands.tuned.answer_memory import answer_bytes, free_bytes, longest_that_fits

    free, _ = free_bytes()
    while rows > 1 and answer_bytes(tuned, rows=rows, tokens=tokens, new_tokens=new_tokens, shown=shown) > free:
        rows //= 2
    if rows == 1 and longest_that_fits(tuned, tokens, new_tokens, shown=shown) < tokens:
        raise DoesNotFit(
            f"--model: the longest prompt with its answer has {tokens} tokens, which do not fit the free memory "
            "(predicted); shorten it, lower --max-new-tokens, or store the base in fewer bits with --bits 4"
        )
    return rows
