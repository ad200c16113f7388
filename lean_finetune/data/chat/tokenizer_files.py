"""What the files of a tokenizer say about chats: its template and its special tokens."""

from pathlib import Path
from typing import Any

from lean_finetune.core.errors import UserError
from lean_finetune.data.chat.assistant_turns import in_its_form
from lean_finetune.data.chat.compiled_template import LIMITS_MET, CompiledTemplate, limit_met, work_limits
from lean_finetune.pinning.config_file import json_object, reason_of, refuse_other_text


def compile_own_template(directory: Path, date: str) -> CompiledTemplate:
    """A tokenizer's chat template; `date` is today's for it, YYYY-MM-DD.

    Raises UserError if it has none, or that meets a limit of `work_limits`.
    """
    source, file = read_template(directory)
    template = CompiledTemplate(source, read_special_tokens(directory), file, date)
    try:
        with work_limits():
            return in_its_form(template)
    except LIMITS_MET as error:
        raise UserError(f"{file} {limit_met(error)} a conversation of two messages; correct it") from None


def read_template(directory: Path) -> tuple[str, str]:
    """A tokenizer's chat template, and the path of its file. Raises UserError if it has none."""
    file = directory / "chat_template.jinja"
    if file.exists():
        try:
            text = file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            reason = reason_of(file, error)
            raise UserError(f"model.name: {file} is not UTF-8 text ({reason}); save it as UTF-8") from None
        refuse_other_text("model.name", file)
        return text, str(file)
    file = directory / "tokenizer_config.json"
    template = _template_of_config(file)
    if template is None:
        raise UserError(
            f"model.name: the tokenizer in {directory} has no chat template; set data.chat_template to chatml or to "
            "the path of one, or use data.format prompt_completion or text"
        )
    return template, str(file)


def has_template(directory: Path) -> bool:
    """Whether a tokenizer has a chat template."""
    return (directory / "chat_template.jinja").exists() or (
        _template_of_config(directory / "tokenizer_config.json") is not None
    )


def _template_of_config(file: Path) -> str | None:
    """The default chat template in tokenizer_config.json."""
    template = json_object(file).get("chat_template") if file.exists() else None
    if isinstance(template, list):
        named = {str(entry.get("name")): entry.get("template") for entry in template if isinstance(entry, dict)}
        template = named.get("default")
    return template if isinstance(template, str) else None


def read_special_tokens(directory: Path) -> dict[str, str]:
    """bos_token, eos_token, pad_token, … as text; older tokenizers have them in special_tokens_map.json."""
    named: dict[str, Any] = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        path = directory / name
        if path.exists():
            values = json_object(path)
            named |= {key: value for key, value in values.items() if value is not None}
    found = {}
    for key, value in named.items():
        text = value.get("content") if isinstance(value, dict) else value
        if key.endswith("_token") and isinstance(text, str):
            found[key] = text
    return found
