"""docs/parameter-names.md has all keys of the tables: `python -m tests.commands.test_names_page` prints the page."""

from collections.abc import Mapping

from lean_finetune.config.other_tools import shared, tables
from tests.conftest import ROOT

INTRODUCTION = """# Names of parameters in other tools

```sh
lean-finetune import config.yaml
```

This page lists what LLaMA-Factory, Axolotl, TRL, torchtune, LitGPT, ms-swift and Unsloth call the parameters of
lean-finetune. `import` converts a configuration of one of these tools into params.yaml, and
`lean-finetune fit --from config.yaml` [predicts its run](command.md#configurations-of-other-tools). Both convert values
too, because these can differ.

If you use another tool's name in `--set`, in `lean-finetune exp run -S` or in params.yaml, the error message shows the
name here. If you use one in `-S learning_rate=1e-4` of `dvc exp run`, DVC stops before lean-finetune starts, with exit
code 255. Its message means that params.yaml has no such parameter:

    ERROR: Invalid `--set-param` value: Could not override 'learning_rate'.
    To append to your config use +learning_rate=1e-4: Key 'learning_rate' is not in struct

Run it by [`lean-finetune exp run`](command.md#exp), or look the name up in the table. Don't add the `+`: the first
stage refuses the added key, which `git restore params.yaml` removes.

"""


def ours_of(rule: str | Mapping[str, str]) -> str | None:
    """The parameter that a key decides; None for a key that is only refused or only helps to read others."""
    if isinstance(rule, str):
        return rule
    if "source" in rule:
        return f"data.{rule['source']}" if rule["source"] != "weight" else "data.source"
    fact = "adapted_layers" if "adapts" in rule else rule.get("fact")
    name = rule.get("to") or shared()["facts"].get(fact)
    return name and name.partition(" (")[0]


def page() -> str:
    """The page: a row for each of our parameters, a column for each tool."""
    found: dict[str, dict[str, list[str]]] = {}
    for table in tables():
        for key, rule in table["keys"].items():
            if ours := ours_of(rule):
                found.setdefault(ours, {}).setdefault(table["tool"], []).append(f"`{key}`")
    names = list(dict.fromkeys(table["tool"] for table in tables()))
    lines = ["| here | " + " | ".join(names) + " |", "|---" * (1 + len(names)) + "|"]
    for ours in sorted(found):
        lines.append(f"| `{ours}` | " + " | ".join(", ".join(found[ours].get(name, [])) for name in names) + " |")
    return INTRODUCTION + "\n".join(lines) + "\n"


def test_the_page_has_every_key():
    assert (ROOT / "docs/parameter-names.md").read_text(encoding="utf-8") == page()


if __name__ == "__main__":
    print(page(), end="")
