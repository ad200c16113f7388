"""The files that this repository's root shares with every project: `make project` writes them into the package."""

from lean_finetune.commands.project.template import TEMPLATE
from tests.conftest import ROOT

OURS = "# Only in the repository of lean-finetune.\n"
"""The rest of an ignore file is not for projects."""
SAMPLE_ROWS = 1000
"""Of our 5,000: a first run takes a minute."""


def shared_files() -> dict[str, bytes]:
    """What the template must have, by path in the template."""
    texts = {name: (ROOT / name).read_text(encoding="utf-8") for name in ("dvc.yaml", "params.yaml", "locks/README.md")}
    texts["data/gitignore"] = (ROOT / "data/.gitignore").read_text(encoding="utf-8")
    for name in ("gitignore", "dvcignore"):
        texts[name] = (ROOT / f".{name}").read_text(encoding="utf-8").partition(OURS)[0]
    for path in (ROOT / ".dvc/plots").glob("*.json"):
        texts[f"dvc/plots/{path.name}"] = path.read_text(encoding="utf-8")
    with open(ROOT / "data/raw/sample.jsonl", encoding="utf-8") as rows:
        texts["data/raw/sample.jsonl"] = "".join(next(rows) for _ in range(SAMPLE_ROWS))
    return {name: text.encode() for name, text in texts.items()}


if __name__ == "__main__":
    for name, content in shared_files().items():
        (TEMPLATE / name).parent.mkdir(parents=True, exist_ok=True)
        (TEMPLATE / name).write_bytes(content)
