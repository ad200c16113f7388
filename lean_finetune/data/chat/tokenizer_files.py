"""What the files of a tokenizer say about chats: its template and its special tokens."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lean_finetune.core.errors import UserError
from lean_finetune.data.chat.assistant_turns import in_its_form
from lean_finetune.data.chat.compiled_template import LIMITS_MET, CompiledTemplate, limit_met, work_limits
from lean_finetune.pinning.config_file import json_object
from lean_finetune.pinning.locate import CHAT_TEMPLATE
from lean_finetune.pinning.template_files import TemplateText, find_template


def compile_template(text: TemplateText, special_tokens: Mapping[str, str], name: str, date: str) -> CompiledTemplate:
    """Compile a template in the form of messages that it renders. Messages call it `name`.

    Raises UserError if it is no template, and one of LIMITS_MET at a limit of `work_limits`.
    """
    template = in_its_form(CompiledTemplate(text.source, special_tokens, name, date))
    if text.tool_source == text.source:
        return template
    return template.with_tool_template(in_its_form(template.with_source(text.tool_source, f"{name} (tool_use)")))


def compile_own_template(directory: Path, date: str) -> CompiledTemplate:
    """A tokenizer's chat template; `date` is today's for it, YYYY-MM-DD.

    Raises UserError if it has none, or that meets a limit of `work_limits`.
    """
    own = read_template(directory)
    try:
        with work_limits():
            return compile_template(own, read_special_tokens(directory), str(own.file), date)
    except LIMITS_MET as error:
        raise UserError(f"{own.file} {limit_met(error)} a conversation of two messages; correct it") from None


def read_template(directory: Path) -> TemplateText:
    """A tokenizer's chat template. Raises UserError if it has none."""
    if (own := find_template(directory)) is None:
        raise UserError(
            f"model.name: the tokenizer in {directory} has no chat template; set data.chat_template to chatml or to "
            "the path of one, or use data.format prompt_completion or text"
        )
    return own


def has_template(directory: Path) -> bool:
    """Whether a tokenizer has a chat template."""
    return (directory / CHAT_TEMPLATE).exists() or find_template(directory) is not None


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
