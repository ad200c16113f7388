"""Chat rows from task families: languages, system messages, further turns, and no prompt twice."""

import random
from collections.abc import Iterator

from data.synth import numeric, textual, unseen
from data.synth.words import LANGUAGES, Family

SEEN: dict[str, Family] = numeric.FAMILIES | textual.FAMILIES
UNSEEN: dict[str, Family] = unseen.FAMILIES

CHINESE_SHARE = 0.3
SYSTEM_SHARE = 0.2
NEXT_TURN_SHARE = 0.12
MOST_TURNS = 4
SYSTEM_MESSAGES = {
    "en": (
        "You are a careful assistant.",
        "Answer in the form asked for, nothing else.",
        "Work step by step where it helps.",
    ),
    "zh": ("你是一个细心的助手。", "只按要求的格式回答。", "需要时一步一步地算。"),
}


def make_row(rng: random.Random, name: str, family: Family) -> dict:
    """Make one row `{"messages": [...], "family": name}` of one turn or a few of the same family and language."""
    language = LANGUAGES[rng.random() < CHINESE_SHARE]
    messages = []
    if rng.random() < SYSTEM_SHARE:
        messages.append({"role": "system", "content": rng.choice(SYSTEM_MESSAGES[language])})
    turns = 1
    while turns < MOST_TURNS and rng.random() < NEXT_TURN_SHARE:
        turns += 1
    for _ in range(turns):
        turn = family(rng, language)
        messages.append({"role": "user", "content": turn.prompt})
        messages.append({"role": "assistant", "content": turn.reply})
    return {"messages": messages, "family": name}


def prompts_of(row: dict) -> list[str]:
    """List the user's messages of a row."""
    return [message["content"] for message in row["messages"] if message["role"] == "user"]


def stream_rows(seed: int, families: dict[str, Family], used_prompts: set[str]) -> Iterator[dict]:
    """Yield rows without end, families in random order, skipping a row whose prompt is in `used_prompts`.

    Every prompt that is yielded is added to `used_prompts`, so none is repeated.
    """
    rng = random.Random(seed)
    names = list(families)
    while True:
        name = rng.choice(names)
        row = make_row(rng, name, families[name])
        prompts = prompts_of(row)
        if len(set(prompts)) < len(prompts) or not used_prompts.isdisjoint(prompts):
            continue
        used_prompts.update(prompts)
        yield row
