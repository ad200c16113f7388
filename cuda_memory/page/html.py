"""HTML without a template engine: escaped text, tables, and a page that needs no other file."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from cuda_memory.terminal import visible

STYLE_SHEET = Path(__file__).with_name("style.css")
DOCUMENT = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'; img-src data:">
<meta name="color-scheme" content="light dark">
<link rel="icon" href="data:,">
<title>{}</title>
<style>
{}{}
</style>
</head>
<body>
{}</body>
</html>"""
"""Title, style sheet, more style, body."""
ENTITIES = str.maketrans({"&": "&amp;", "<": "&lt;", ">": "&gt;", "'": "&#39;", '"': "&#34;"})


class Table(NamedTuple):
    """A table; every column but the first holds figures or short texts."""

    header: tuple[str, ...]
    rows: list[tuple[Any, ...]]


class Html(str):
    """Text that is HTML. Jinja2 does not escape it."""

    def __html__(self) -> "Html":
        """The text, for libraries that ask whether to escape it."""
        return self


def html(template: str, *values: Any) -> Html:
    """`str.format` that escapes each text that is not HTML."""
    return Html(template.format(*(_escaped(value) if isinstance(value, str) else value for value in values)))


def _escaped(text: str) -> str:
    return text if isinstance(text, Html) else visible(text).translate(ENTITIES)


def joined(parts: Iterable[Html], between: str = "") -> Html:
    """Parts of a page in order."""
    return Html(between.join(parts))


def table(found: Table, kind: str = "") -> Html:
    """A table that scrolls if it is too wide; `kind` is its class in style.css."""
    head = joined(html("<th>{}</th>", name) for name in found.header) if any(found.header[:2]) else None
    rows = (html("<tr>{}</tr>\n", joined(html("<td>{}</td>", value) for value in row)) for row in found.rows)
    return html(
        '<div class="scroll"><table class="{}">\n{}<tbody>\n{}</tbody></table></div>\n',
        kind,
        "" if head is None else html("<thead><tr>{}</tr></thead>\n", head),
        joined(rows),
    )


def document(title: str, body: Html, style: str = "") -> Html:
    """A complete page. It has no scripts and asks for no other file."""
    return html(DOCUMENT, title, Html(STYLE_SHEET.read_text(encoding="utf-8").rstrip("\n")), Html(style), body)
