"""Templates of our own writing with generation marks, for families whose published templates have none."""

from collections.abc import Set
from pathlib import Path

from lean_finetune.data.chat.compiled_template import CompiledTemplate
from lean_finetune.data.chat.template_probes import PROBES, parts_of, rendering

DIRECTORY = Path(__file__).parent / "templates"
# A text without which a template cannot be of the family, so that few are compiled.
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


def read_bundled(family: str) -> str:
    """The text of a bundled template."""
    return (DIRECTORY / f"{family}.jinja").read_text(encoding="utf-8")


def find_twin(own: CompiledTemplate, hidden: Set[str]) -> CompiledTemplate | None:
    """The bundled template that renders every test conversation as `own` does.

    Those that `own` refuses or shows in part (`hidden`) do not count: such rows are faults under any template. There is
    no twin of a template that refuses the plainest one, since too little would be compared.
    """
    if rendering(own, PROBES[0]) is None:
        return None
    probes = [(probe, rendering(own, probe)) for probe in PROBES if not parts_of(probe) & hidden]
    for family, needed in FAMILIES.items():
        if needed in own.source:
            twin = own.like(read_bundled(family), f"the bundled {family} template")
            if all(text is None or text == rendering(twin, probe) for probe, text in probes):
                return twin
    return None
