"""Unseen families: excluded from pretraining, so only the fine-tune can learn them.

Each recombines what the seen families teach (copying, picking, marks between words) under an instruction that the base
model has never met.
"""

import random

from data.synth.words import Family, Turn, draw_separator, draw_size, draw_words, pick_phrase


def draw_list(rng: random.Random, language: str, *, median: float, most: int) -> tuple[list[str], str]:
    """Draw the words of a list and its text."""
    words = draw_words(rng, language, draw_size(rng, median, least=2, most=most))
    return words, draw_separator(rng, language).join(words)


def kebab_join(rng: random.Random, language: str) -> Turn:
    """Write words as one slug: `red-dog-tree`."""
    words, text = draw_list(rng, language, median=7, most=300)
    phrase = pick_phrase(
        rng,
        language,
        en=("Make a slug:", "Kebab case:"),
        zh=("写成短横线形式：", "变成网址名："),
    )
    return Turn(prompt=f"{phrase}\n{text}", reply="-".join(words))


def bracket_each(rng: random.Random, language: str) -> Turn:
    """Wrap each word in square brackets: `[red] [dog]`."""
    words, text = draw_list(rng, language, median=7, most=200)
    phrase = pick_phrase(
        rng,
        language,
        en=("Wrap in brackets:", "Bracket every word:"),
        zh=("加上方括号：", "每个词套上括号："),
    )
    return Turn(prompt=f"{phrase}\n{text}", reply=" ".join(f"[{word}]" for word in words))


def last_item(rng: random.Random, language: str) -> Turn:
    """Give the last word of a list."""
    words, text = draw_list(rng, language, median=7, most=400)
    phrase = pick_phrase(
        rng,
        language,
        en=("How does it end?", "Tail of the list:"),
        zh=("结尾是哪个？", "取末尾："),
    )
    return Turn(prompt=f"{phrase}\n{text}", reply=words[-1])


def swap_ends(rng: random.Random, language: str) -> Turn:
    """Swap the two sides of an equation of words: `red = dog` gives `dog = red`."""
    left, right = draw_words(rng, language, 2)
    phrase = pick_phrase(
        rng,
        language,
        en=("Swap the sides:", "Mirror it:"),
        zh=("左右互换：", "交换两边："),
    )
    return Turn(prompt=f"{phrase}\n{left} = {right}", reply=f"{right} = {left}")


def arrow_lookup(rng: random.Random, language: str) -> Turn:
    """Follow one arrow of a map written on one line: `red -> dog; blue -> cat`."""
    count = draw_size(rng, 5, least=2, most=35)
    words = draw_words(rng, language, 2 * count)
    pairs = dict(zip(words[:count], words[count:], strict=True))
    key = rng.choice(words[:count])
    phrase = pick_phrase(
        rng,
        language,
        en=("Follow the arrow from {}", "Where does {} lead?"),
        zh=("从{}出发到哪里？", "{}指向谁？"),
    )
    text = "; ".join(f"{name} -> {value}" for name, value in pairs.items())
    return Turn(prompt=f"{phrase.format(key)}\n{text}", reply=pairs[key])


def double_each(rng: random.Random, language: str) -> Turn:
    """Repeat every word: `red red dog dog`."""
    words, text = draw_list(rng, language, median=6, most=80)
    phrase = pick_phrase(
        rng,
        language,
        en=("Stutter:", "Say every word twice:"),
        zh=("每个词说两遍：", "口吃："),
    )
    return Turn(prompt=f"{phrase}\n{text}", reply=" ".join(f"{word} {word}" for word in words))


def tag_each(rng: random.Random, language: str) -> Turn:
    """Mark each word as a hashtag on one line: `#red #dog`."""
    words, text = draw_list(rng, language, median=7, most=200)
    phrase = pick_phrase(
        rng,
        language,
        en=("Turn into hashtags:", "Tag them:"),
        zh=("变成话题标签：", "打上标签："),
    )
    return Turn(prompt=f"{phrase}\n{text}", reply=" ".join(f"#{word}" for word in words))


def initials(rng: random.Random, language: str) -> Turn:
    """Give the first letter of each word."""
    words, text = draw_list(rng, language, median=6, most=60)
    phrase = pick_phrase(
        rng,
        language,
        en=("Acronym letters:", "Take the initials:"),
        zh=("取每个词的首字：", "首字缩写："),
    )
    return Turn(prompt=f"{phrase}\n{text}", reply=" ".join(word[0] for word in words))


FAMILIES: dict[str, Family] = {
    "kebab_join": kebab_join,
    "bracket_each": bracket_each,
    "last_item": last_item,
    "swap_ends": swap_ends,
    "arrow_lookup": arrow_lookup,
    "double_each": double_each,
    "tag_each": tag_each,
    "initials": initials,
}
