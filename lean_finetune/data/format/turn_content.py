"""The content of a turn: text, typed parts, and the results of tools."""

import json
from typing import Any

from lean_finetune.data.format.example import Message, RowFault
from lean_finetune.data.format.row_values import parse_json, show
from lean_finetune.data.format.turn_marks import TRAINED_KEYS, looks_like_mark

TEXT_PARTS, TEXT_KEYS = ("text", "input_text", "output_text"), ("text", "value", "content")
# Parts of an answer, as LLaMA-Factory and gpt-oss write them.
REASONING_PARTS, REASONING_PART_KEYS = ("reasoning", "thinking"), ("value", "text", "thinking", "reasoning")
CALL_PARTS, CALL_PART_KEYS = ("tool_call",), ("value", "tool_call")
_PARTS = (*TEXT_PARTS, *(start + kind for start in ("", "input_") for kind in ("image", "audio", "video", "file")))
_PARTS += ("image_url", "audio_url", "video_url")
REASONING = "reasoning_content"
"""The message key that reasoning parts become."""


def read_content(message: Message, role: str, where: str, text_key: str) -> list[Any]:
    """Replace a message's content by its text and its reasoning; return the tool calls among its parts.

    `text_key` is the row's name of the content. Raises RowFault if the content has something else than text.
    """
    content = message.get("content")
    if isinstance(content, str):
        return []
    if role == "tool" and not _is_parts(content):
        message["content"] = "" if content is None else json.dumps(content, ensure_ascii=False, default=str)
        return []
    if not isinstance(content, list):
        raise RowFault(f"{where} needs text in {text_key!r}, got {show(content)}; change it")
    texts: list[str] = []
    reasoning: list[str] = []
    calls: list[Any] = []
    for part in content:
        _refuse_marks(part, where)
        if (text := _value(part, TEXT_PARTS, TEXT_KEYS)) is not None:
            texts.append(text)
        elif role == "assistant" and (text := _value(part, REASONING_PARTS, REASONING_PART_KEYS)) is not None:
            reasoning.append(text)
        elif role == "assistant" and (text := _value(part, CALL_PARTS, CALL_PART_KEYS)) is not None:
            found = parse_json(text, f"{where} (tool_call)")
            calls += found if isinstance(found, list) else [found]
        else:
            raise RowFault(f"{where} has a content part that is not text: {show(part)}; only text can be trained")
    if reasoning and message.get(REASONING):
        raise RowFault(f"{where} has reasoning in 'content' and in {REASONING!r}; keep one of them")
    if reasoning:
        message[REASONING] = "".join(reasoning)
    message["content"] = "".join(texts)
    return calls


def _value(part: Any, kinds: tuple[str, ...], keys: tuple[str, ...]) -> str | None:
    """The text of a part of one of these kinds; None for another part.

    It is in one of `keys`, by data set. Column formats fill the others with null.
    """
    if not isinstance(part, dict) or part.get("type") not in kinds:
        return None
    found = [part[key] for key in keys if part.get(key) is not None]
    return found[0] if len(found) == 1 and isinstance(found[0], str) else None


def _is_parts(content: Any) -> bool:
    """Whether content is a list of typed parts, or an empty one; another list is the result of a tool."""
    return isinstance(content, list) and all(isinstance(part, dict) and part.get("type") in _PARTS for part in content)


def _refuse_marks(part: Any, where: str) -> None:
    """Refuse a part that is marked as trained or not (Axolotl), since its turn is trained completely or not at all."""
    if isinstance(part, dict) and len(part) > 2:
        for key, value in part.items():
            if looks_like_mark(key, value) and not (key in TRAINED_KEYS and value == 1):
                raise RowFault(
                    f"{where}: {key} of a content part selects parts of a turn, but only complete turns can be "
                    "trained; remove it, or the row"
                )
