"""Hooks of mkdocs: files outside docs/ that pages link to become part of the site, and links follow them."""

import os
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
OUTSIDE = {
    "README.md": "index.md",
    "README.zh.md": "zh/index.md",
    "cuda_memory/README.md": "cuda-memory.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    ".github/ISSUE_TEMPLATE/prediction.md": "report-a-measurement.md",
    "LICENSE": "LICENSE.txt",
    "params.yaml": "params.yaml",
    "constraints.txt": "constraints.txt",
}
"""Path in the repository → path in the site."""
LINK = re.compile(r"\[([^\]]*)\]\((?![a-z]+:|#)([^)#\s]+)(#[^)\s]*)?\)")
"""Text, path and anchor of a relative link in Markdown."""


def on_files(files: Files, config: Any) -> Files:
    """Add the files of `OUTSIDE`."""
    for source, name in OUTSIDE.items():
        if (ROOT / source).exists():
            files.append(File.generated(config, name, content=(ROOT / source).read_text(encoding="utf-8")))
    return files


def on_page_markdown(markdown: str, page: Page, config: Any, files: Files) -> str:
    """Make relative links, which are those of the repository, lead to the same files of the site.

    A link to what is in the repository alone, such as a directory of code, becomes text. A broken link stays one.
    """
    by_name = {name: source for source, name in OUTSIDE.items()}
    own = page.file.src_uri
    directory = (ROOT / by_name.get(own, f"docs/{own}")).parent

    def site_link(found: re.Match[str]) -> str:
        text, path, anchor = found.groups()
        target = os.path.relpath(directory / path, ROOT)
        if target not in OUTSIDE and not target.startswith("docs/") and (ROOT / target).exists():
            return f"{text} (`{target}`)"
        name = OUTSIDE.get(target, target.removeprefix("docs/"))
        return f"[{text}]({os.path.relpath(name, os.path.dirname(own) or '.')}{anchor or ''})"

    return LINK.sub(site_link, markdown)
