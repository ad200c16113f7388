"""What a row means: a conversation for the chat template, or plain text."""

import hashlib
import json
from dataclasses import dataclass
from typing import Any

import orjson

ROLES = frozenset(("system", "developer", "user", "assistant", "tool"))
ASKING_ROLES = frozenset(("user", "tool"))

Message = dict[str, Any]


class RowFault(Exception):
    """What is wrong with a row and what mends it, without its place, which the caller knows."""


class EmptyAnswer(RowFault):
    """Only the end of a trained turn would be learnt."""


@dataclass(frozen=True, kw_only=True)
class Conversation:
    """A row for the chat template; every assistant turn but those in `context` is trained."""

    messages: list[Message]
    """Each with a known `role` and text in `content`."""
    tools: list[Any] | None
    context: frozenset[int] = frozenset()
    """Places in `messages` of assistant turns that are shown but not trained (weight 0, or part of a prompt)."""

    def trained_turns(self) -> list[int]:
        """Places in `messages` of the turns that are trained."""
        return [n for n in self.turns() if n not in self.context]

    def turns(self) -> list[int]:
        """Places in `messages` of the assistant's turns."""
        return [n for n, message in enumerate(self.messages) if message["role"] == "assistant"]

    def prompt_key(self) -> bytes:
        """All before the first answer, which a conversation shares with all it begins with or goes on to.

        A greeting that nobody asked for is part of that; a row where nobody asks is told by the whole of it.
        """
        first, asked = None, False
        for place, message in enumerate(self.messages):
            if message["role"] in ASKING_ROLES:
                asked = True
            elif asked and message["role"] == "assistant":
                first = place
                break
        return canonical({"messages": self.messages[:first], "tools": self.tools})

    def has_empty_answer(self) -> bool:
        """Whether a trained turn says and calls nothing, so that only its end would be learnt."""
        return any(_says_nothing(self.messages[n]) for n in self.trained_turns())


@dataclass(frozen=True, kw_only=True)
class Plain:
    """A row without a chat template: `completion` and the end-of-sequence token are trained."""

    prompt: str
    completion: str

    def prompt_key(self) -> bytes:
        """The prompt, or the text where there is none."""
        return canonical({"prompt": self.prompt} if self.prompt else {"text": self.completion})

    def has_empty_answer(self) -> bool:
        """Whether only the end of the text would be learnt."""
        return not self.completion.strip()


def is_heldout(example: Conversation | Plain, fraction: float, seed: int) -> bool:
    """Whether a hash of `seed` and of what precedes the first answer holds the row out.

    Rows with equal beginnings share a side, and no row moves when others are added.
    """
    digest = hashlib.blake2b(example.prompt_key(), digest_size=8, key=seed.to_bytes(8, "little")).digest()
    return int.from_bytes(digest, "little") < fraction * 2**64


def canonical(value: Any) -> bytes:
    """A JSON value as bytes that depend on no order of keys."""
    try:
        return orjson.dumps(value, option=orjson.OPT_SORT_KEYS)
    except orjson.JSONEncodeError:
        # Lone surrogates and integers past 64 bits take the slow way, and so do the values of column formats that JSON
        # has no like for (bytes, decimals, durations): as text they are told apart as well.
        return json.dumps(value, sort_keys=True, separators=(",", ":"), default=str).encode()


def _says_nothing(message: Message) -> bool:
    """Whether a message has neither text nor tool calls nor another value, which the template may show or not."""
    content = message["content"]
    if content and not content.isspace():
        return False
    return not any(value for key, value in message.items() if key not in ("role", "name", "content"))
