"""Prompts of preference pairs: what both answers begin with where no column has it, and rows without any."""

import re
from collections.abc import Collection, Iterable, Mapping
from os.path import commonprefix
from typing import Any

from lean_finetune.core.errors import RowFault
from lean_finetune.data.format.format_base import PROMPT_ROLES, Message
from lean_finetune.data.format.given_images import IMAGE_COLUMNS
from lean_finetune.data.format.row_values import is_given, is_turns, show

# Where a turn begins in a transcript: with a name at the beginning of a line, or a control token of a chat template.
_LINE = r"(?:(?:\A|\n)[ \t]*(?:\*\*)?|\#+[ \t]*)(?:{})(?:\*\*)?[ \t]*:(?:\*\*)?"
_USER = _LINE.format("[Hh]uman|HUMAN|[Uu]ser") + (
    r"|\bUSER:|<\|im_start\|>user\b|<\|(?:user|User|prompter)\|>|<｜User｜>|<\|start_header_id\|>user\b"
    r"|<start_of_turn>user\b|\[INST\]"
)
_ASSISTANT = _LINE.format("[Aa]ssistant") + (
    r"|\bASSISTANT:|<\|im_start\|>assistant\b|<\|(?:a|A)ssistant\|>|<｜Assistant｜>"
    r"|<\|start_header_id\|>assistant<\|end_header_id\|>|<start_of_turn>model\b|\[/INST\]"
)
_USER_TURN, _TURN = re.compile(_USER), re.compile(f"{_USER}|{_ASSISTANT}")
# With names that begin lines of other texts too.
_QUESTION = re.compile(f"{_USER}|{_LINE.format('Question|Instruction|Input|Q')}")
_ANSWER = re.compile(rf"(?:{_ASSISTANT}|{_LINE.format('Answer|Response|Output|AI|GPT|Bot|Chatbot|Model|A')})\n*")
_WORD_END = re.compile(r"(?<=\S)(?=\s)|(?<=\n)(?=\S)|(?<=[。？！：])(?=\S)")
"""The end of a word, whose space belongs to the next one, or of a line."""
_REPEATED_WORDS = 5
"""Words of a prompt from which on two answers that begin with it repeat the row's prompt by mistake."""
_NUMBER = re.compile(r"\s*[-+]?[0-9.,:%/ -]+(?:e[-+]?[0-9]+)?\s*", re.IGNORECASE)
_QUESTION_NAME = re.compile("question|query|instruct|prompt|problem|input|post|title|task|text|context|conver|dialog")


def divided(row: Mapping[str, Any], keys: Collection[str]) -> tuple[str, str, str]:
    """(prompt, chosen answer, rejected answer) of the texts `chosen` and `rejected`, which begin with their prompt.

    The prompt of a transcript ends where the assistant's turn begins in which the texts part. That of other texts ends
    with the last word that both have. `keys` are those that the format reads. Raises RowFault if there is no such
    prompt, or another column may have it.
    """
    chosen, rejected = row["chosen"], row["rejected"]
    common = commonprefix([chosen, rejected])
    size = _transcript_prompt(common)
    if size:
        for key in ("chosen", "rejected"):
            if (turn := _USER_TURN.search(row[key], size)) is not None:
                raise RowFault(
                    f"the transcripts 'chosen' and 'rejected' part before their last answers: {key!r} goes on with "
                    f"{show(turn[0].strip())}; write both as lists of messages, or remove the row"
                )
        return chosen[:size], chosen[size:], rejected[size:]
    if _TURN.search(chosen) or _TURN.search(rejected):
        raise RowFault(
            "the transcripts 'chosen' and 'rejected' do not begin with the same user's turn and the start of an "
            "answer; give both the same prompt, or put it into 'prompt'"
        )
    refuse_unread_question(row, keys)
    last = min(len(common), len(chosen) - 1, len(rejected) - 1)
    ends = ({end.start() for end in _WORD_END.finditer(text, 0, last + 1)} for text in (chosen, rejected))
    size = max(set.intersection(*ends), default=0)
    if not chosen[:size].strip():
        raise RowFault("'chosen' and 'rejected' begin differently, and there is no 'prompt'; add it")
    return chosen[:size], chosen[size:], rejected[size:]


def _transcript_prompt(common: str) -> int:
    """The length of the prompt in what two transcripts begin with: up to the last answer; 0 without one."""
    question = _QUESTION.search(common)
    last = max((answer.end() for answer in _ANSWER.finditer(common)), default=0)
    return last if question and last > question.end() else 0


def refuse_second_prompt(prompt: str, chosen: str, rejected: str) -> None:
    """Raise RowFault for texts that both begin with a prompt beside the row's own: it would be trained as an answer."""
    texts = (chosen.lstrip(), rejected.lstrip())
    begins = len(prompt.split()) >= _REPEATED_WORDS and all(text.startswith(prompt.strip()) for text in texts)
    if begins or all(_USER_TURN.match(text) for text in texts):
        found = "the text of 'prompt'" if begins else "a user's turn"
        raise RowFault(
            f"'chosen' and 'rejected' both begin with {found}, which would be trained as an answer; remove it there, "
            "or name 'prompt' in data.ignore_columns: what both begin with is then the prompt"
        )


def refuse_without_question(messages: Iterable[Message]) -> None:
    """Raise RowFault for the turns of a prompt that ask nothing."""
    if not any(message["role"] in PROMPT_ROLES and message["content"].strip() for message in messages):
        raise RowFault("no user's turn is in front of 'chosen' and 'rejected', so they answer nothing; add the prompt")


def refuse_unread_question(row: Mapping[str, Any], keys: Collection[str], *, as_turn: bool = False) -> None:
    """Raise RowFault if a column that is not read may have the prompt of a row without one, with the line to write.

    `keys` are those that the format reads. `as_turn`: the prompt can only be a turn, since the answers are turns.
    """
    found = [key for key, value in row.items() if key not in (*keys, *IMAGE_COLUMNS) and _may_ask(value)]
    if not found:
        return
    found.sort(key=lambda key: _QUESTION_NAME.search(key.lower()) is None)
    column = found[0]
    names = " and ".join(map(repr, found[:3])) + (" and more" if len(found) > 3 else "")
    if not isinstance(row[column], str):
        mapping = f"data.columns={{prompt: {column}}}"
    elif as_turn or any(is_given(row.get(key)) for key in ("system", "tools", "functions")):
        mapping = f"data.columns={{instruction: {column}}}"
    else:
        mapping = f"data.columns={{instruction: {column}}} (a chat turn) or {{prompt: {column}}} (plain text)"
    raise RowFault(
        f"the row has no prompt, and {names} {'is' if len(found) == 1 else 'are'} not read; if {column!r} is the "
        f"prompt, set {mapping}; name what is none in data.ignore_columns"
    )


def _may_ask(value: Any) -> bool:
    """Whether a value may be a prompt: turns, or a text that is no number."""
    return is_turns(value) or (isinstance(value, str) and is_given(value) and not _NUMBER.fullmatch(value))
