"""Recompute a generated task's answer from its prompt alone; shares no code with the generator."""

import json
import math
import re
from collections.abc import Callable
from datetime import date, timedelta

FACTORS = {
    ("km", "m"): 1000, ("kg", "g"): 1000, ("m", "cm"): 100, ("hours", "minutes"): 60, ("minutes", "seconds"): 60,
    ("days", "hours"): 24, ("weeks", "days"): 7, ("years", "months"): 12, ("公里", "米"): 1000, ("公斤", "克"): 1000,
    ("米", "厘米"): 100,
    ("小时", "分钟"): 60, ("分钟", "秒"): 60, ("天", "小时"): 24, ("周", "天"): 7, ("年", "个月"): 12,
}  # fmt: skip


Answer = Callable[[str, str], str]
"""From a prompt's first line and the lines after it."""
MARK = r"(?<!\S)(?:[^\w\s]|_)(?!\S)"


def integers(text: str) -> list[int]:
    return [int(digits) for digits in re.findall(r"\d+", text)]


def split_list(text: str) -> tuple[list[str], str]:
    separator = next(mark for mark in (", ", "、", " ") if mark in text)
    return text.split(separator), separator


def over_words(build: Callable[[list[str], str, str], str]) -> Answer:
    """The checker of a family with a list of words, by (words, separator, first line)."""
    return lambda head, body: build(*split_list(body), head)


def each(wrap: Callable[[str], str], separator: str = " ") -> Answer:
    """The checker of a family that changes each word."""
    return over_words(lambda words, _, head: separator.join(map(wrap, words)))


def fields(body: str, separator: str, between: str = "\n") -> dict[str, str]:
    return dict(pair.split(separator) for pair in body.split(between))


def check_date_add(head: str, _body: str) -> str:
    written = re.search(r"\d{4}-\d{2}-\d{2}", head)
    assert written
    (days,) = integers(head.replace(written[0], " "))
    return (date.fromisoformat(written[0]) + timedelta(days=days)).isoformat()


def check_unit_convert(head: str, _body: str) -> str:
    (count,) = integers(head)
    for pattern in (r"Convert \d+ (\w+) to (\w+)", r"把 \d+ (\w+)换算成(\w+)", r"\d+ (\w+)等于多少(\w+)"):
        if found := re.search(pattern, head):
            return f"{count * FACTORS[found[1], found[2]]} {found[2]}"
    small, large = re.findall(r"How many (\w+) are in \d+ (\w+)\?", head)[0]
    return f"{count * FACTORS[large, small]} {small}"


def check_sort_numbers(head: str, body: str) -> str:
    is_falling = any(word in head for word in ("high to low", "descending", "从大到小", "降序"))
    return ", ".join(map(str, sorted(integers(body), reverse=is_falling)))


def check_next_item(words: list[str], _separator: str, head: str) -> str:
    return next(after for before, after in zip(words, words[1:], strict=False) if before in re.split(r"[ ?的之]", head))


def check_replace_word(words: list[str], separator: str, head: str) -> str:
    old, new = re.findall(r"(?:Replace|Change|把|将) ?(\w+?)(?: with | to |换成|改为)(\w+)", head)[0]
    return separator.join([{old: new}.get(word, word) for word in words])


def check_remove_word(words: list[str], separator: str, head: str) -> str:
    gone = re.findall(r"(\w+)[:：]$", head)[0].removeprefix("删去").removeprefix("去掉")
    assert gone in words
    return separator.join([word for word in words if word != gone])


def check_wrap_each(words: list[str], _separator: str, head: str) -> str:
    left, right = re.findall(MARK, head)
    return " ".join(left + word + right for word in words)


def check_json_build(_head: str, body: str) -> str:
    typed = {key: int(value) if value.isdigit() else value for key, value in fields(body, ": ").items()}
    return json.dumps(typed, ensure_ascii=False)


def check_table_lookup(head: str, body: str) -> str:
    header, *lines = [line.split(" | ") for line in body.split("\n")]
    column = next(number for number, name in enumerate(header) if number and name in head)
    return next(cells[column] for cells in lines if cells[0] in head)


def check_table_filter(head: str, body: str) -> str:
    found = [name for name, home in (line.split(" | ") for line in body.split("\n")) if home in head]
    return (", " if head.isascii() else "、").join(found)


ANSWERS: dict[str, Answer] = {
    "add": lambda head, _: str(sum(integers(head))),
    "subtract": lambda head, _: str(max(integers(head)) - min(integers(head))),
    "multiply": lambda head, _: str(math.prod(integers(head))),
    "date_add": check_date_add,
    "unit_convert": check_unit_convert,
    "sort_numbers": check_sort_numbers,
    "largest": lambda _, body: str(max(integers(body))),
    "count_items": over_words(lambda words, *_: str(len(words))),
    "repeat": lambda _, body: body,
    "first_item": over_words(lambda words, *_: words[0]),
    "next_item": over_words(check_next_item),
    "reverse_list": over_words(lambda words, separator, _: separator.join(words[::-1])),
    "bullet_list": each(lambda word: "* " + word, "\n"),
    "join_with": over_words(lambda words, _, head: re.findall(MARK, head)[0].join(words)),
    "prefix_each": over_words(
        lambda words, _, head: " ".join(re.findall(r"[^\w\s:：]", head)[0] + word for word in words)
    ),
    "wrap_each": over_words(check_wrap_each),
    "json_list": over_words(lambda words, *_: json.dumps(words, ensure_ascii=False)),
    "replace_word": over_words(check_replace_word),
    "remove_word": over_words(check_remove_word),
    "spell": each(" ".join, "\n"),
    "json_extract": lambda head, body: next(str(value) for key, value in json.loads(body).items() if key in head),
    "json_build": check_json_build,
    "table_lookup": check_table_lookup,
    "table_filter": check_table_filter,
    "key_value": lambda head, body: fields(body, "=")[re.sub(r"Value of |Look up |查找|的值？|[?:：]", "", head)],
    "kebab_join": each(str, "-"),
    "bracket_each": each(lambda word: f"[{word}]"),
    "last_item": over_words(lambda words, *_: words[-1]),
    "swap_ends": lambda _, body: " = ".join(body.split(" = ")[::-1]),
    "arrow_lookup": lambda head, body: fields(body, " -> ", "; ")[
        re.sub(r"Follow the arrow from |Where does | lead\?|出发到哪里？|指向谁？|^从", "", head)
    ],
    "double_each": each(lambda word: f"{word} {word}"),
    "tag_each": each(lambda word: "#" + word),
    "initials": each(lambda word: word[0]),
}


def true_answer(family: str, prompt: str) -> str:
    """The answer to a prompt of `family`."""
    head, _, body = prompt.partition("\n")
    return ANSWERS[family](head, body)


def stated_answer(reply: str) -> str:
    """The answer that a reply states: its `Answer: ` / `答案：` line, else all of it."""
    found = re.findall(r"^(?:Answer: |答案：)(.*)$", reply, flags=re.MULTILINE)
    return found[-1] if found else reply


def wrong_steps(reply: str) -> list[str]:
    """List the worked lines `a + b = c` (or -, x) whose right side is not what the left makes."""
    wrong = []
    for line in reply.split("\n"):
        if found := re.fullmatch(r"(\d+(?: [+x-] \d+)+) = (\d+)", line):
            first, *rest = re.split(r" ([+x-]) ", found[1])
            value = int(first)
            for operator, number in zip(rest[::2], rest[1::2], strict=True):
                value = {"+": value + int(number), "-": value - int(number), "x": value * int(number)}[operator]
            if value != int(found[2]):
                wrong.append(line)
    return wrong
