"""Write preferences: `python -m data.synth.preferences --kind pairs --seed 1 --rows 600 --out pairs.jsonl`.

Prompts are those of families that the model does not know. The better answer does what is asked. The worse one copies
the words as they are.
"""

import argparse
import itertools
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from data.synth.rows import UNSEEN, stream_rows
from data.synth.sample import to_jsonl

Kind = Literal["pairs", "labelled"]


def stream_pairs(seed: int) -> Iterator[dict]:
    """Yield rows without end: a prompt, and a chosen and a rejected answer."""
    for row in stream_rows(seed, UNSEEN, set()):
        *before, question, answer = row["messages"]
        _, _, words = question["content"].partition("\n")
        if not before and words not in ("", answer["content"]):
            copied = {"role": "assistant", "content": words}
            yield {"prompt": [question], "chosen": [answer], "rejected": [copied], "family": row["family"]}


def make_preferences(kind: Kind, seed: int, rows: int) -> list[dict]:
    """Make `rows` pairs, or answers with a label of which about half are desirable; the same for the same arguments."""
    pairs = itertools.islice(stream_pairs(seed), rows)
    if kind == "pairs":
        return list(pairs)
    rng = random.Random(seed)
    labelled = []
    for pair in pairs:
        label = rng.random() < 0.5
        answer = pair["chosen" if label else "rejected"]
        labelled.append({"prompt": pair["prompt"], "completion": answer, "label": label, "family": pair["family"]})
    return labelled


def main() -> None:
    """Parse the command line, make the rows, write the file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kind", choices=("pairs", "labelled"), required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--rows", type=int, required=True)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    rows = make_preferences(arguments.kind, arguments.seed, arguments.rows)
    arguments.out.write_text(to_jsonl(rows), encoding="utf-8", newline="\n")


if __name__ == "__main__":
    main()
