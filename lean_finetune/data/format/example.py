"""What a row means: a conversation for the chat template, or plain text."""

import hashlib
import json
from dataclasses import dataclass
from typing import Any

import orjson

from lean_finetune.core.errors import one_line

ROLES = ("system", "developer", "user", "assistant", "tool")
PROMPT_ROLES = ("user", "tool")
"""Roles that an assistant's turn answers."""

Message = dict[str, Any]


class RowFault(Exception):
    """A row that cannot be used: the rule and the remedy, as one line. The caller adds file and line."""

    def __init__(self, rule: str):
        super().__init__(one_line(rule))


class EmptyAnswer(RowFault):
    """A trained turn is empty, so the model would learn only to end it."""


@dataclass(frozen=True, kw_only=True)
class Conversation:
    """A row for the chat template. Every assistant turn that is not in `context` is trained."""

    messages: list[Message]
    """Each with a known `role` and text in `content`."""
    tools: list[Any] | None
    context: frozenset[int] = frozenset()
    """Indices in `messages` of assistant turns that are shown but not trained (weight 0, or part of a prompt)."""

    def trained_turns(self) -> list[int]:
        """Indices in `messages` of the turns that are trained."""
        return [n for n in self.turns() if n not in self.context]

    def turns(self) -> list[int]:
        """Indices in `messages` of the assistant's turns."""
        return [n for n, message in enumerate(self.messages) if message["role"] == "assistant"]

    def prompt_key(self) -> bytes:
        """Everything before the first answer to a question: conversations that begin alike have equal keys.

        A greeting before the first question belongs to the key. Without any question the key is the whole row.
        """
        roles = [message["role"] for message in self.messages]
        question = next((n for n, role in enumerate(roles) if role in PROMPT_ROLES), len(roles))
        first = next((n for n in self.turns() if n > question), None)
        return canonical({"messages": self.messages[:first], "tools": self.tools})

    def has_empty_answer(self) -> bool:
        """Whether a trained turn has neither text, nor tool calls, nor another value that a template may show."""
        return any(_is_empty(self.messages[n]) for n in self.trained_turns())


@dataclass(frozen=True, kw_only=True)
class PlainText:
    """A row without a chat template: `completion` and the end-of-sequence token are trained."""

    prompt: str
    completion: str

    def prompt_key(self) -> bytes:
        """The prompt, or the text where there is none."""
        return canonical({"prompt": self.prompt} if self.prompt else {"text": self.completion})

    def has_empty_answer(self) -> bool:
        """Whether there is no text to train."""
        return not self.completion.strip()


def is_heldout(example: Conversation | PlainText, fraction: float, seed: int) -> bool:
    """Whether the hash of `seed` and the prompt key falls into the held-out fraction.

    Rows with equal prompts are on the same side, and adding rows moves no other row.
    """
    digest = hashlib.blake2b(example.prompt_key(), digest_size=8, key=seed.to_bytes(8, "little")).digest()
    return int.from_bytes(digest, "little") < fraction * 2**64


def canonical(value: Any) -> bytes:
    """A JSON value as bytes that do not depend on the order of keys."""
    try:
        return orjson.dumps(value, option=orjson.OPT_SORT_KEYS)
    except orjson.JSONEncodeError:
        # orjson refuses lone surrogates, integers past 64 bits, and what Parquet has and JSON lacks (bytes, decimals).
        return json.dumps(value, sort_keys=True, separators=(",", ":"), default=str).encode()


def _is_empty(message: Message) -> bool:
    content = message["content"]
    if content and not content.isspace():
        return False
    return not any(value for key, value in message.items() if key not in ("role", "name", "content"))
