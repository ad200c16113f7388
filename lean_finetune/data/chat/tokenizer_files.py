"""What the files of a tokenizer say about chats: its template and its special tokens."""

from pathlib import Path
from typing import Any

from lean_finetune.core.atomic_files import read_json
from lean_finetune.core.errors import UserError
from lean_finetune.data.chat.compiled_template import CompiledTemplate


def compile_own_template(directory: Path, date: str) -> CompiledTemplate:
    """A tokenizer's chat template; `date` is today's for it, YYYY-MM-DD. Raises UserError if it has none."""
    source, file = read_template(directory)
    return CompiledTemplate(source, read_special_tokens(directory), file, date)


def read_template(directory: Path) -> tuple[str, str]:
    """A tokenizer's chat template, and the path of its file. Raises UserError if it has none."""
    file = directory / "chat_template.jinja"
    if file.exists():
        return file.read_text(encoding="utf-8"), str(file)
    file = directory / "tokenizer_config.json"
    template = read_json(file).get("chat_template") if file.exists() else None
    if isinstance(template, list):
        named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
        template = named.get("default")
    if not isinstance(template, str):
        raise UserError(
            f"model.name: the tokenizer in {directory} has no chat template; set data.chat_template to chatml or to "
            "the path of one, or use data.format prompt_completion or text"
        )
    return template, str(file)


def read_special_tokens(directory: Path) -> dict[str, str]:
    """bos_token, eos_token, pad_token, … as text; older tokenizers have them in special_tokens_map.json."""
    named: dict[str, Any] = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        path = directory / name
        if path.exists():
            values = read_json(path)
            named |= {key: value for key, value in values.items() if value is not None}
    found = {}
    for key, value in named.items():
        text = value.get("content") if isinstance(value, dict) else value
        if key.endswith("_token") and isinstance(text, str):
            found[key] = text
    return found
