"""Seen families about text: lists, string edits, JSON, small tables. The base model is pretrained on them."""

import json
import random

from data.synth.words import CITIES, NAMES, WORDS, Family, Turn, draw_separator, draw_size, draw_words, pick_phrase

JOINING_MARKS = ("+", "|", "/", ";", ":", "~", "&", "=", "_", "-", "#", "^", "%", "<", ">", "!")
PREFIXES = ("@", "$", "%", "~", "+", "&", ">", "!")
WRAPS = (("(", ")"), ("<", ">"), ("{", "}"), ("*", "*"), ("_", "_"), ("'", "'"), ('"', '"'))
COLUMNS = {"en": ("name", "city", "age", "item", "count"), "zh": ("姓名", "城市", "年龄", "物品", "数量")}


def draw_record(rng: random.Random, language: str) -> dict[str, str | int]:
    """Draw one record with all of COLUMNS, in that order."""
    values: tuple[str | int, ...] = (
        rng.choice(NAMES[language]),
        rng.choice(CITIES[language]),
        rng.randrange(10, 90),
        rng.choice(WORDS[language]),
        rng.randrange(2, 100),
    )
    return dict(zip(COLUMNS[language], values, strict=True))


def repeat(rng: random.Random, language: str) -> Turn:
    """Copy a list of words unchanged."""
    text = draw_separator(rng, language).join(draw_words(rng, language, draw_size(rng, 8, least=2, most=300)))
    phrase = pick_phrase(
        rng,
        language,
        en=("Repeat this:", "Copy the text:"),
        zh=("重复这段：", "照抄："),
    )
    return Turn(prompt=f"{phrase}\n{text}", reply=text)


def first_item(rng: random.Random, language: str) -> Turn:
    """Give the first word of a list."""
    words = draw_words(rng, language, draw_size(rng, 6, least=2, most=400))
    phrase = pick_phrase(
        rng,
        language,
        en=("Give the first word:", "What comes first?"),
        zh=("给出第一个词：", "最前面的是什么？"),
    )
    return Turn(prompt=f"{phrase}\n{draw_separator(rng, language).join(words)}", reply=words[0])


def next_item(rng: random.Random, language: str) -> Turn:
    """Give the word that follows a named word."""
    words = draw_words(rng, language, draw_size(rng, 6, least=3, most=len(WORDS[language])))
    position = rng.randrange(len(words) - 1)
    phrase = pick_phrase(
        rng,
        language,
        en=("Which word follows {}?", "What comes after {}?"),
        zh=("{}的后面是哪个词？", "{}之后是什么？"),
    )
    text = draw_separator(rng, language).join(words)
    return Turn(prompt=f"{phrase.format(words[position])}\n{text}", reply=words[position + 1])


def reverse_list(rng: random.Random, language: str) -> Turn:
    """Reverse the order of a list's words."""
    words = draw_words(rng, language, draw_size(rng, 5, least=2, most=60))
    separator = draw_separator(rng, language)
    phrase = pick_phrase(
        rng,
        language,
        en=("Reverse the order:", "Write it backwards, word by word:"),
        zh=("倒过来写：", "颠倒顺序："),
    )
    return Turn(prompt=f"{phrase}\n{separator.join(words)}", reply=separator.join(reversed(words)))


def bullet_list(rng: random.Random, language: str) -> Turn:
    """Put each item of a list on its own line after a bullet."""
    words = draw_words(rng, language, draw_size(rng, 6, least=2, most=120))
    phrase = pick_phrase(
        rng,
        language,
        en=("Make a bullet list:", "One item per line:"),
        zh=("列成清单：", "每行写一个："),
    )
    return Turn(
        prompt=f"{phrase}\n{draw_separator(rng, language).join(words)}", reply="\n".join(f"* {word}" for word in words)
    )


def join_with(rng: random.Random, language: str) -> Turn:
    """Join words with a named mark."""
    words = draw_words(rng, language, draw_size(rng, 5, least=2, most=100))
    mark = rng.choice(JOINING_MARKS)
    phrase = pick_phrase(
        rng,
        language,
        en=("Join with {}", "Put {} between the words:"),
        zh=("用 {} 连接：", "中间加上 {}"),
    )
    text = draw_separator(rng, language).join(words)
    return Turn(prompt=f"{phrase.format(mark)}\n{text}", reply=mark.join(words))


def prefix_each(rng: random.Random, language: str) -> Turn:
    """Put a named mark before each word."""
    words = draw_words(rng, language, draw_size(rng, 5, least=2, most=100))
    mark = rng.choice(PREFIXES)
    phrase = pick_phrase(
        rng,
        language,
        en=("Put {} before each word:", "Start each word with {}"),
        zh=("每个词前面加 {}", "用 {} 开头："),
    )
    text = draw_separator(rng, language).join(words)
    return Turn(prompt=f"{phrase.format(mark)}\n{text}", reply=" ".join(mark + word for word in words))


def wrap_each(rng: random.Random, language: str) -> Turn:
    """Put each word between two named marks."""
    words = draw_words(rng, language, draw_size(rng, 5, least=2, most=100))
    left, right = rng.choice(WRAPS)
    phrase = pick_phrase(
        rng,
        language,
        en=("Put each word between {} and {}", "Open with {} and close with {}"),
        zh=("每个词放在 {} 和 {} 之间", "左边加 {} 右边加 {}"),
    )
    text = draw_separator(rng, language).join(words)
    return Turn(
        prompt=f"{phrase.format(left, right)}\n{text}", reply=" ".join(f"{left}{word}{right}" for word in words)
    )


def json_list(rng: random.Random, language: str) -> Turn:
    """Write words as a JSON array."""
    words = draw_words(rng, language, draw_size(rng, 5, least=2, most=100))
    phrase = pick_phrase(
        rng, language, en=("Write as a JSON array:", "Make a JSON list:"), zh=("写成 JSON 数组：", "转成 JSON 列表：")
    )
    text = draw_separator(rng, language).join(words)
    return Turn(prompt=f"{phrase}\n{text}", reply=json.dumps(words, ensure_ascii=False))


def replace_word(rng: random.Random, language: str) -> Turn:
    """Replace one word of a text by another."""
    *words, new = draw_words(rng, language, draw_size(rng, 6, least=4, most=len(WORDS[language])))
    old = rng.choice(words)
    separator = draw_separator(rng, language)
    phrase = pick_phrase(
        rng,
        language,
        en=("Replace {} with {}:", "Change {} to {}:"),
        zh=("把{}换成{}：", "将{}改为{}："),
    )
    edited = [new if word == old else word for word in words]
    return Turn(prompt=f"{phrase.format(old, new)}\n{separator.join(words)}", reply=separator.join(edited))


def remove_word(rng: random.Random, language: str) -> Turn:
    """Delete one word of a text."""
    words = draw_words(rng, language, draw_size(rng, 6, least=3, most=len(WORDS[language])))
    gone = rng.choice(words)
    separator = draw_separator(rng, language)
    phrase = pick_phrase(
        rng,
        language,
        en=("Remove {}:", "Delete the word {}:"),
        zh=("删去{}：", "去掉{}："),
    )
    kept = [word for word in words if word != gone]
    return Turn(prompt=f"{phrase.format(gone)}\n{separator.join(words)}", reply=separator.join(kept))


def spell(rng: random.Random, language: str) -> Turn:
    """Spell words letter by letter, one word a line."""
    words = draw_words(rng, language, draw_size(rng, 2, least=2, most=40))
    phrase = pick_phrase(
        rng,
        language,
        en=("Spell these words:", "Write the letters:"),
        zh=("逐字写出：", "把字分开写："),
    )
    return Turn(prompt=f"{phrase}\n{' '.join(words)}", reply="\n".join(" ".join(word) for word in words))


def json_extract(rng: random.Random, language: str) -> Turn:
    """Read one field of a JSON object."""
    record = draw_record(rng, language)
    fields = list(record)
    rng.shuffle(fields)
    key = rng.choice(fields)
    phrase = pick_phrase(
        rng,
        language,
        en=("What is {}?", "Read the field {}:"),
        zh=("{}是什么？", "读取{}："),
    )
    text = json.dumps({field: record[field] for field in fields}, ensure_ascii=False)
    return Turn(prompt=f"{phrase.format(key)}\n{text}", reply=str(record[key]))


def json_build(rng: random.Random, language: str) -> Turn:
    """Write named fields as a JSON object."""
    record = draw_record(rng, language)
    fields = rng.sample(list(record), rng.randrange(2, 5))
    phrase = pick_phrase(
        rng,
        language,
        en=("Write as JSON:", "Make a JSON object:"),
        zh=("写成 JSON：", "转成 JSON："),
    )
    text = "\n".join(f"{field}: {record[field]}" for field in fields)
    return Turn(
        prompt=f"{phrase}\n{text}", reply=json.dumps({field: record[field] for field in fields}, ensure_ascii=False)
    )


def table_lookup(rng: random.Random, language: str) -> Turn:
    """Read one cell of a table whose first column is a distinct name."""
    names = rng.sample(NAMES[language], draw_size(rng, 3, least=2, most=len(NAMES[language])))
    records = [draw_record(rng, language) | {COLUMNS[language][0]: name} for name in names]
    fields = [COLUMNS[language][0], *rng.sample(COLUMNS[language][1:], 2)]
    wanted, column = rng.choice(records), rng.choice(fields[1:])
    phrase = pick_phrase(
        rng,
        language,
        en=("What is the {1} of {0}?", "Find {0}: {1}"),
        zh=("{0}的{1}是什么？", "查{0}的{1}："),
    )
    lines = [" | ".join(fields), *(" | ".join(str(record[field]) for field in fields) for record in records)]
    prompt = "\n".join([phrase.format(wanted[fields[0]], column), *lines])
    return Turn(prompt=prompt, reply=str(wanted[column]))


def table_filter(rng: random.Random, language: str) -> Turn:
    """List the names in a two-column table with the requested city, in the table's order."""
    names = rng.sample(NAMES[language], draw_size(rng, 5, least=3, most=len(NAMES[language])))
    cities = rng.sample(CITIES[language], 2)
    homes = [rng.choice(cities) for _ in names]
    wanted = rng.choice(homes)
    phrase = pick_phrase(
        rng,
        language,
        en=("Who lives in {}?", "List the people in {}:"),
        zh=("谁住在{}？", "列出{}的人："),
    )
    lines = [f"{name} | {home}" for name, home in zip(names, homes, strict=True)]
    found = [name for name, home in zip(names, homes, strict=True) if home == wanted]
    reply = (", " if language == "en" else "、").join(found)
    return Turn(prompt="\n".join([phrase.format(wanted), *lines]), reply=reply)


def key_value(rng: random.Random, language: str) -> Turn:
    """Read one setting of a list of key=value lines."""
    count = draw_size(rng, 5, least=2, most=35)
    words = draw_words(rng, language, 2 * count)
    pairs = dict(zip(words[:count], words[count:], strict=True))
    key = rng.choice(words[:count])
    phrase = pick_phrase(
        rng,
        language,
        en=("Value of {}?", "Look up {}:"),
        zh=("{}的值？", "查找{}："),
    )
    text = "\n".join(f"{name}={value}" for name, value in pairs.items())
    return Turn(prompt=f"{phrase.format(key)}\n{text}", reply=pairs[key])


FAMILIES: dict[str, Family] = {
    "repeat": repeat,
    "first_item": first_item,
    "next_item": next_item,
    "reverse_list": reverse_list,
    "bullet_list": bullet_list,
    "join_with": join_with,
    "prefix_each": prefix_each,
    "wrap_each": wrap_each,
    "json_list": json_list,
    "replace_word": replace_word,
    "remove_word": remove_word,
    "spell": spell,
    "json_extract": json_extract,
    "json_build": json_build,
    "table_lookup": table_lookup,
    "table_filter": table_filter,
    "key_value": key_value,
}
