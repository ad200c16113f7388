"""The tables of docs/models.md, each between `<!-- table: NAME -->` and `<!-- end -->`, from benchmarks/results.

The number of families that work stands at the top of the page.
"""

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from benchmarks.harness import RESULTS, Row
from benchmarks.models.depth import LAYERS, METHODS, PATTERNS
from cuda_memory.units import GIB
from lean_finetune.core.atomic_files import read_json, write_text

PAGE = Path("docs/models.md")
CHECKS: Mapping[str, str] = {
    **{method: f"`{method}`" for method in ("full", "lora", "qlora", "int8_lora")},
    **{"grad_ckpt": "`train.grad_ckpt`", "packed": "packed rows", "zero3": "`zero3`"},
    **{"merge_lora": "merging", "merge_qlora": "merging after `qlora`"},
}
"""What each check of a family is, in words."""
DEFAULT_SIZES = "†"
CUT = "‡"
TEXT_TOKENS = 4096
"""Beside the image, if the model has enough positions."""
Line = Sequence[str]


def write_page() -> None:
    """Make the page's tables anew from the results."""
    write_text(PAGE, page_text(PAGE.read_text(encoding="utf-8")))


def page_text(text: str) -> str:
    """A page with its tables and its number of families made anew."""
    working = sum(bool(row["works"]) for row in _rows("families"))
    text = re.sub(r"\[\d+ families\]", f"[{working} families]", text)
    return re.sub(
        r"(<!-- table: (\w+) -->\n).*?(?=<!-- end -->)",
        lambda match: f"{match[1]}{_table(TABLES[match[2]]())}",
        text,
        flags=re.DOTALL,
    )


def _rows(name: str) -> list[Row]:
    rows: list[Row] = read_json(RESULTS / f"{name}.json")["rows"]
    return rows


def _published() -> Iterator[Line]:
    """Peaks and smallest GPUs of published models."""
    yield "model", "family", "parameters", "QLoRA", "LoRA"
    for row in _rows("published_models"):
        name = f"{row['model']} {DEFAULT_SIZES}" if row["default_sizes"] else row["model"]
        size = f"{row['parameters'] / 1e9:.2f} B" if "parameters" in row else ""
        yield name, f"`{row['family']}`", size, _peak(row["qlora"]), _peak(row["lora"])


def _images() -> Iterator[Line]:
    """Peaks and smallest GPUs with an image in every row."""
    yield "model", "family", "parameters", "tokens of the image", "QLoRA", "LoRA"
    for row in _rows("published_images"):
        size, tokens = f"{row['parameters'] / 1e9:.2f} B", f"{row['image_tokens']:,}"
        cut = row["row_tokens"] < TEXT_TOKENS + row["image_tokens"]
        yield (
            f"{row['model']} {CUT}" if cut else row["model"],
            f"`{row['family']}`",
            size,
            tokens,
            _peak(row["qlora"]),
            _peak(row["lora"]),
        )


def _peak(found: Row) -> str:
    """A peak and its GPU in a cell."""
    if "refused" in found:
        return "refused"
    return f"{found['peak_bytes'] / GIB:.2f} GiB, {found['gpu'] or 'none known'}"


def _missing(row: Row) -> str:
    """The checks that a family does not pass, in words."""
    return ", ".join(words for name, words in CHECKS.items() if name not in row["works"])


def _families() -> Iterator[Line]:
    """The families that work, by what does not."""
    members: dict[str, list[str]] = defaultdict(list)
    for row in _rows("families"):
        if row["works"]:
            members[_missing(row)].append(row["family"])
    yield "families", "does not work"
    for missing in sorted(members, key=len):
        yield _names(members[missing]), missing


def _refused() -> Iterator[Line]:
    """The families and switches that are refused, by reason."""
    members: dict[str, list[str]] = defaultdict(list)
    for row in _rows("families"):
        for reason in row["refused"]:
            names = rf"\b{re.escape(row['family'])}(_text)?(_model)?\b|(?<=modeling_)\w+(?=\.py)|(?<=\.py:)\d+"
            without_name = re.sub(names, "…", reason)
            members[without_name.replace("|", "\\|").replace("<", "&lt;")].append(row["family"])
    yield "families", "refusal"
    for reason in sorted(members):
        yield _names(members[reason]), reason


def _depth() -> Iterator[Line]:
    """Largest differences of deep models, by family and method."""
    percent = {row["case"]: f"{row['worst_phase_percent']:.4f} %" for row in _rows("depth")}
    yield "family", "method", *(f"{layers} layers" for layers in LAYERS)
    for family in PATTERNS:
        for method in METHODS:
            cells = (percent.get(f"{family}, {method}, {layers} layers", "not counted") for layers in LAYERS)
            yield f"`{family}`", method, *cells


def _planned() -> Iterator[Line]:
    """What `plan` writes, by its options."""
    yield "`lean-finetune plan`", "writes", "peak, GiB", "usable, GiB"
    for row in _rows("planned"):
        outside = "".join(f", {size / GIB:.1f} GiB {where}" for where, size in row["outside_bytes"].items())
        peak, usable = (f"{row[name] / GIB:.2f}" for name in ("peak_bytes", "usable_bytes"))
        yield f"`{row['options']}`", f"{row['set']}{outside}", peak, usable


TABLES: Mapping[str, Callable[[], Iterator[Line]]] = {
    "published": _published,
    "images": _images,
    "families": _families,
    "refused": _refused,
    "depth": _depth,
    "planned": _planned,
}


def _names(families: Iterable[str]) -> str:
    return ", ".join(f"`{family}`" for family in families)


def _table(lines: Iterable[Line]) -> str:
    """Lines of cells, the first of them heads, as a table in Markdown."""
    heads, *rest = lines
    return "".join(f"| {' | '.join(cells)} |\n" for cells in (heads, ["---"] * len(heads), *rest))
