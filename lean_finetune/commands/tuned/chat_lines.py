"""Conversations as JSON lines: `chat --json` reads one a line, and prints its answer as events."""

import json
import signal
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

from cuda_memory.terminal import echo_text, json_text
from lean_finetune.commands.tuned.conversation import Message
from lean_finetune.core.errors import RowFault, UserError

IdsOf = Callable[[list[Message]], list[int]]
"""The ids of a prompt. Raises RowFault if the template refuses the messages."""
ROLES = ("user", "assistant")
MOST_LINE = 64 << 20
"""Characters of a line; the rest of a longer one is the next line."""


def fitting(
    ids_of: IdsOf, most_tokens: int, opening: list[Message], turns: list[Message]
) -> tuple[list[int], list[Message]]:
    """The ids of a conversation without its oldest turns that are too much, and the turns that stay.

    `opening` are messages that always stay; the last turn is a question.

    Raises:
        RowFault: the template refuses the conversation.
        TooLong: the question alone is too long.
    """
    while True:
        ids = ids_of([*opening, *turns])
        if len(ids) <= most_tokens:
            return ids, turns
        if len(turns) == 1:
            raise TooLong(len(ids))
        turns = turns[2:]


class TooLong(Exception):
    """A question has more tokens than fit."""

    def __init__(self, tokens: int):
        super().__init__(f"{tokens} tokens")
        self.tokens = tokens


def event(name: str, **figures: Any) -> None:
    """Print an event: one JSON object in a line."""
    echo_text(json_text({"event": name, **figures}))


class ChatLines:
    """Answers conversations from standard input, each with all its messages, within a limit of tokens."""

    def __init__(self, ids_of: IdsOf, most_tokens: int, opening: list[Message]):
        """As `fitting`."""
        self._ids_of, self._most, self._opening = ids_of, most_tokens, opening
        self._is_answering = False

    def run(self, answer: Callable[[list[int], Callable[[str], None]], str]) -> None:
        """Answer each line until the end of the input; `answer` calls its second argument with each part of the text.

        SIGINT stops an answer; between answers it does nothing.
        """
        before = signal.signal(signal.SIGINT, self._interrupt)
        try:
            while line := sys.stdin.readline(MOST_LINE):
                if line.strip():
                    self._answer(line, answer)
        finally:
            signal.signal(signal.SIGINT, before)

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        if self._is_answering:
            self._is_answering = False
            raise KeyboardInterrupt

    def _answer(self, line: str, answer: Callable[[list[int], Callable[[str], None]], str]) -> None:
        try:
            turns = turns_of(line)
            ids, kept = fitting(self._ids_of, self._most, self._opening, turns)
        except (RowFault, UserError) as fault:
            event("fault", text=str(fault))
        except TooLong as fault:
            event("fault", text=f"the question has {fault.tokens} tokens and {self._most} fit; shorten it")
        else:
            text = self._answered(lambda: answer(ids, lambda part: event("text", text=part)))
            event("answer", text=text, left_out=len(turns) - len(kept), stopped=text is None)

    def _answered(self, answer: Callable[[], str]) -> str | None:
        """The answer; None if SIGINT stopped it."""
        try:
            self._is_answering = True
            try:
                return answer()
            finally:
                self._is_answering = False
        except KeyboardInterrupt:
            return None


def turns_of(line: str) -> list[Message]:
    """The messages of a line. Raises RowFault if they are no conversation that ends with a question."""
    try:
        found = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise RowFault(f"the line is not JSON ({error})") from None
    turns = found.get("messages") if isinstance(found, dict) else None
    if not isinstance(turns, list) or len(turns) % 2 == 0 or not all(map(_is_turn, turns, ROLES * len(turns))):
        raise RowFault(
            "the line must have 'messages': texts of the user and the assistant in turn, the user's first and last, as "
            '{"messages": [{"role": "user", "content": "Hello"}]}'
        )
    return turns


def _is_turn(turn: Any, role: str) -> bool:
    return (
        isinstance(turn, dict)
        and turn.keys() == {"role", "content"}
        and turn["role"] == role
        and isinstance(turn["content"], str)
        and turn["content"].strip() != ""
    )
