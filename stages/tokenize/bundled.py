"""Templates of our own writing with generation marks, for families whose published templates have none."""

from collections.abc import Mapping
from pathlib import Path

from stages.tokenize.template_probes import PROBES, rendering
from stages.tokenize.segments import without_marks
from stages.tokenize.template import CompiledTemplate

DIRECTORY = Path(__file__).parent / "templates"
# A text without which a template cannot be of the family, so that few are compiled.
FAMILIES = {
    "chatml": "im_start",
}


def read_bundled(family: str) -> str:
    """The text of a bundled template."""
    return (DIRECTORY / f"{family}.jinja").read_text(encoding="utf-8")


def find_twin(own: CompiledTemplate, special_tokens: Mapping[str, str]) -> CompiledTemplate | None:
    """The bundled template that renders, or refuses, every test conversation as `own` does.

    There is none for a template that refuses the plainest one: nothing would be compared.
    """
    if rendering(own, PROBES[0]) is None:
        return None
    for family, needed in FAMILIES.items():
        if needed in own.source:
            twin = CompiledTemplate(read_bundled(family), special_tokens, f"the bundled {family} template")
            if all(_alike(rendering(own, probe), rendering(twin, probe)) for probe in PROBES):
                return twin
    return None


def _alike(own: str | None, twin: str | None) -> bool:
    return own is twin or (own is not None and twin is not None and own == without_marks(twin))
