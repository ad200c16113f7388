"""The lines of a file of prompts."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from cuda_memory.units import counted
from lean_finetune.commands.tuned.conversation import Prompter
from lean_finetune.commands.tuned.prompt_images import (
    PromptImages,
    Shown,
    conversation_of,
    refuse_without_place,
    unread_fault,
)
from lean_finetune.commands.tuned.tuned_model import TunedModel
from lean_finetune.core.errors import RowFault, UserError
from lean_finetune.data.format.format_base import Message
from lean_finetune.data.format.given_images import GivenImage
from lean_finetune.data.read.decode_rows import parse_line
from lean_finetune.evaluate.generate import NO_FAMILY, Prompt


class PromptLine(NamedTuple):
    """A line of a file of prompts."""

    row: dict[str, Any]
    ids: list[int]
    shown: Shown

    @property
    def prompt(self) -> Prompt:
        """The prompt to answer."""
        hashes = tuple(one.digest for one in self.shown)
        return Prompt(family=NO_FAMILY, ids=self.ids, answer_ids=[], files=hashes)


@dataclass(frozen=True)
class PromptReader:
    """Reads the prompts of rows."""

    prompter: Prompter
    files: PromptImages | None
    """Reads what a model takes beside text; None if it takes nothing."""
    shown: Sequence[GivenImage]
    """What each conversation shows, from an option of the command."""
    tuned: TunedModel
    new_tokens: int

    def prompt(self, row: dict[str, Any], directory: Path) -> PromptLine | None:
        """The prompt of a row of a file in `directory`; None if it has neither messages nor a text.

        Raises RowFault if it cannot be read.
        """
        messages, text = row.get("messages"), row.get("prompt")
        if isinstance(messages, list) and all(isinstance(message, dict) for message in messages):
            return self._conversation(row, messages, directory)
        if not isinstance(text, str):
            return None
        refuse_without_place(row, self.shown)
        return PromptLine(row, self.prompter.of_text(text), ())

    def _conversation(self, row: dict[str, Any], messages: list[Message], directory: Path) -> PromptLine:
        example = conversation_of(row, messages, self.shown, takes_images=self.files is not None)
        if example is None:
            return PromptLine(row, self.prompter.of_messages(messages, row.get("tools")), ())
        if self.files is None:
            raise unread_fault(self.tuned)
        stored = self.files.stored(example.others, directory)
        return PromptLine(row, self.files.ids(example.messages, example.tools, stored), stored)


def read_prompts(file: Path, reader: PromptReader) -> list[PromptLine]:
    """The prompts of a file's lines.

    Raises:
        UserError: with file and line.
    """
    try:
        texts = file.read_text(encoding="utf-8-sig").split("\n")  # `splitlines` also divides texts at U+2028.
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{file}: must be a JSON Lines file in UTF-8; {error}; name another") from None
    lines = [(f"{file}:{number}", text) for number, text in enumerate(texts, 1) if text.strip()]
    if not lines:
        raise UserError(f"{file}: has no prompts; write one JSON object a line, with 'messages' or 'prompt'")
    return [_prompt(where, text, reader, file.parent) for where, text in lines]


def _prompt(where: str, text: str, reader: PromptReader, directory: Path) -> PromptLine:
    """The prompt of a line."""
    row, wrong, _ = parse_line(text.encode())
    if row is None:
        raise UserError(f"{where}: {wrong}")
    try:
        line = reader.prompt(row, directory)
    except RowFault as fault:
        raise UserError(f"{where}: {fault}") from None
    except RecursionError:
        raise UserError(f"{where}: nested too deep; make it flatter") from None
    if line is None:
        raise UserError(f"{where}: must have 'messages', a list of messages, or 'prompt', a text; add one")
    positions, new_tokens = reader.tuned.positions, reader.new_tokens
    if positions is not None and len(line.ids) + new_tokens > positions:
        tokens = counted(len(line.ids), "token")
        raise UserError(
            f"{where}: {tokens} and an answer of up to {new_tokens} exceed the model's {positions}; shorten it, or "
            "lower --max-new-tokens"
        )
    return line
