"""The chat template in the files of a model."""

from dataclasses import dataclass
from pathlib import Path

from lean_finetune.core.errors import UserError
from lean_finetune.core.regular_files import read_regular
from lean_finetune.pinning.config_file import json_object, reason_of, refuse_other_text
from lean_finetune.pinning.locate import CHAT_TEMPLATE, TOOL_TEMPLATE

FILES_WITH_TEMPLATES = ("tokenizer_config.json", "chat_template.json", "processor_config.json")
"""Files with a template under `chat_template`: the tokenizer's, and the processor's in older and newer form."""


@dataclass(frozen=True, kw_only=True)
class TemplateText:
    """The text of a chat template, and of the one for conversations with tools, which is usually the same."""

    source: str
    tool_source: str
    file: Path | None = None
    """Where it is; None if it is no file of a model."""

    @classmethod
    def of(cls, source: str) -> "TemplateText":
        """One for all conversations."""
        return cls(source=source, tool_source=source)


def find_template(directory: Path) -> TemplateText | None:
    """The template as transformers finds it: in its own file, the tokenizer's, or the processor's; None without one.

    Of several templates with names, `tool_use` is for conversations with tools, and `default` for all others.

    Raises:
        UserError: a file is damaged, or is no text in UTF-8.
    """
    file = directory / CHAT_TEMPLATE
    if file.exists():
        source, named = _read(file), directory / TOOL_TEMPLATE
        return TemplateText(file=file, source=source, tool_source=_read(named) if named.exists() else source)
    for file in (directory / name for name in FILES_WITH_TEMPLATES):
        given = json_object(file).get("chat_template") if file.exists() else None
        if isinstance(given, list):
            given = {str(one.get("name")): one.get("template") for one in given if isinstance(one, dict)}
        sources = given if isinstance(given, dict) else {"default": given}
        if isinstance(default := sources.get("default"), str):
            for_tools = sources.get("tool_use")
            return TemplateText(
                file=file, source=default, tool_source=for_tools if isinstance(for_tools, str) else default
            )
    return None


def _read(file: Path) -> str:
    try:
        text = read_regular(file).decode()
    except (OSError, UnicodeDecodeError) as error:
        reason = reason_of(file, error)
        raise UserError(f"model.name: {file} is not UTF-8 text ({reason}); save it as UTF-8") from None
    refuse_other_text("model.name", file)
    return text
