"""Write the default data set: `python -m data.synth.sample --seed 1 --rows 5000 --out data/raw/sample.jsonl`."""

import argparse
import itertools
import json
import random
from pathlib import Path

from data.synth.rows import SEEN, UNSEEN, stream_rows

UNSEEN_SHARE = 0.6
# A few seen families only, so that each family has enough held-out rows to be scored.
SEEN_NAMES = (
    "add",
    "multiply",
    "date_add",
    "unit_convert",
    "sort_numbers",
    "json_extract",
    "replace_word",
    "table_lookup",
)


def make_sample(seed: int, rows: int) -> list[dict]:
    """Make `rows` rows, 60% of them of unseen families, in random order; the same bytes for the same arguments."""
    used_prompts: set[str] = set()
    unseen_count = round(rows * UNSEEN_SHARE)
    sample = list(itertools.islice(stream_rows(seed, UNSEEN, used_prompts), unseen_count))
    seen = {name: SEEN[name] for name in SEEN_NAMES}
    sample += itertools.islice(stream_rows(seed, seen, used_prompts), rows - unseen_count)
    random.Random(seed).shuffle(sample)
    return sample


def to_jsonl(rows: list[dict]) -> str:
    """Write rows as JSON Lines, without escaping non-ASCII."""
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def main() -> None:
    """Parse the command line, make the rows, write the file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--rows", type=int, required=True)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    arguments.out.write_text(to_jsonl(make_sample(arguments.seed, arguments.rows)), encoding="utf-8", newline="\n")


if __name__ == "__main__":
    main()
