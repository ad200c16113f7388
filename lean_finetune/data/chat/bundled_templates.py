"""Bundled chat templates with generation marks, for model families whose published templates have none."""

from collections.abc import Set
from pathlib import Path

from lean_finetune.data.chat.compiled_template import CompiledTemplate, rendering
from lean_finetune.data.chat.template_probes import PROBES, parts_of

DIRECTORY = Path(__file__).parent / "templates"
FAMILIES = {
    "chatml": "im_start",
    "qwen2.5": "im_start",
    "qwen3": "im_start",
    "llama-3": "start_header_id",
    "llama-3.1": "start_header_id",
    "mistral": "INST",
    "mistral-tools": "INST",
    "gemma": "start_of_turn",
    "zephyr": "<|assistant|>",
}
"""A text that every template of the family contains, so that others need not be compiled."""


def read_bundled(family: str) -> str:
    """The text of a bundled template."""
    return (DIRECTORY / f"{family}.jinja").read_text(encoding="utf-8")


def find_bundled(own: CompiledTemplate, omitted: Set[str]) -> CompiledTemplate | None:
    """The bundled template that renders every test conversation like `own`; None if there is none.

    Conversations that `own` refuses or does not show completely (`omitted`) are not compared: such rows are refused
    anyway. A template that refuses the basic conversation has no match, because too little would be compared.
    """
    if rendering(own, PROBES[0]) is None:
        return None
    probes = [(probe, rendering(own, probe)) for probe in PROBES if not parts_of(probe) & omitted]
    for family, needed in FAMILIES.items():
        if needed in own.source:
            bundled = own.with_source(read_bundled(family), f"the bundled {family} template")
            if all(text is None or text == rendering(bundled, probe) for probe, text in probes):
                return bundled
    return None
