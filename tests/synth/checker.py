"""Recompute a generated task's answer from its prompt alone; shares no code with the generator."""

import json
import re
from collections.abc import Callable
from datetime import date, timedelta

FACTORS = {
    ("km", "m"): 1000, ("kg", "g"): 1000, ("m", "cm"): 100, ("hours", "minutes"): 60, ("minutes", "seconds"): 60,
    ("days", "hours"): 24, ("weeks", "days"): 7, ("years", "months"): 12, ("公里", "米"): 1000, ("公斤", "克"): 1000,
    ("米", "厘米"): 100,
    ("小时", "分钟"): 60, ("分钟", "秒"): 60, ("天", "小时"): 24, ("周", "天"): 7, ("年", "个月"): 12,
}  # fmt: skip


def integers(text: str) -> list[int]:
    return [int(digits) for digits in re.findall(r"\d+", text)]


def split_list(text: str) -> tuple[list[str], str]:
    separator = next(mark for mark in (", ", "、", " ") if mark in text)
    return text.split(separator), separator


def check_subtract(head: str, _body: str) -> str:
    left, right = sorted(integers(head), reverse=True)
    return str(left - right)


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
    falling = any(word in head for word in ("high to low", "descending", "从大到小", "降序"))
    return ", ".join(map(str, sorted(integers(body), key=lambda number: -number if falling else number)))


def check_next_item(head: str, body: str) -> str:
    words, _ = split_list(body)
    return next(after for before, after in zip(words, words[1:], strict=False) if before in re.split(r"[ ?的之]", head))


def check_replace_word(head: str, body: str) -> str:
    words, separator = split_list(body)
    old, new = re.findall(r"(?:Replace|Change|把|将) ?(\w+?)(?: with | to |换成|改为)(\w+)", head)[0]
    return separator.join([{old: new}.get(word, word) for word in words])


def check_remove_word(head: str, body: str) -> str:
    words, separator = split_list(body)
    gone = re.findall(r"(\w+)[:：]$", head)[0].removeprefix("删去").removeprefix("去掉")
    assert gone in words
    return separator.join([word for word in words if word != gone])


def check_join_with(head: str, body: str) -> str:
    mark = re.findall(r"(?<!\S)(?:[^\w\s]|_)(?!\S)", head)[0]
    return mark.join(split_list(body)[0])


def check_prefix_each(head: str, body: str) -> str:
    mark = re.findall(r"[^\w\s:：]", head)[0]
    return " ".join(mark + word for word in split_list(body)[0])


def check_wrap_each(head: str, body: str) -> str:
    left, right = re.findall(r"(?<!\S)(?:[^\w\s]|_)(?!\S)", head)
    return " ".join(left + word + right for word in split_list(body)[0])


def check_json_extract(head: str, body: str) -> str:
    return next(str(value) for key, value in json.loads(body).items() if key in head)


def check_json_build(_head: str, body: str) -> str:
    fields = dict(line.split(": ") for line in body.split("\n"))
    typed = {key: int(value) if value.isdigit() else value for key, value in fields.items()}
    return json.dumps(typed, ensure_ascii=False)


def check_table_lookup(head: str, body: str) -> str:
    header, *lines = [line.split(" | ") for line in body.split("\n")]
    column = next(number for number, name in enumerate(header) if number and name in head)
    return next(cells[column] for cells in lines if cells[0] in head)


def check_table_filter(head: str, body: str) -> str:
    found = [name for name, home in (line.split(" | ") for line in body.split("\n")) if home in head]
    return (", " if head.isascii() else "、").join(found)


def check_key_value(head: str, body: str) -> str:
    key = re.sub(r"Value of |Look up |查找|的值？|[?:：]", "", head)
    return dict(line.split("=") for line in body.split("\n"))[key]


def check_arrow_lookup(head: str, body: str) -> str:
    key = re.sub(r"Follow the arrow from |Where does | lead\?|出发到哪里？|指向谁？|^从", "", head)
    return dict(pair.split(" -> ") for pair in body.split("; "))[key]


def check_swap_ends(_head: str, body: str) -> str:
    left, right = body.split(" = ")
    return f"{right} = {left}"


def over_words(build: Callable[[list[str], str], str]) -> Callable[[str, str], str]:
    """Make a checker of a family whose answer depends on the list alone."""
    return lambda _head, body: build(*split_list(body))


ANSWERS: dict[str, Callable[[str, str], str]] = {
    "add": lambda head, _: str(sum(integers(head))),
    "subtract": check_subtract,
    "multiply": lambda head, _: str(integers(head)[0] * integers(head)[1]),
    "date_add": check_date_add,
    "unit_convert": check_unit_convert,
    "sort_numbers": check_sort_numbers,
    "largest": lambda _, body: str(max(integers(body))),
    "count_items": over_words(lambda words, _: str(len(words))),
    "repeat": lambda _, body: body,
    "first_item": over_words(lambda words, _: words[0]),
    "next_item": check_next_item,
    "reverse_list": over_words(lambda words, separator: separator.join(words[::-1])),
    "bullet_list": over_words(lambda words, _: "\n".join("* " + word for word in words)),
    "join_with": check_join_with,
    "prefix_each": check_prefix_each,
    "wrap_each": check_wrap_each,
    "json_list": over_words(lambda words, _: json.dumps(words, ensure_ascii=False)),
    "replace_word": check_replace_word,
    "remove_word": check_remove_word,
    "spell": over_words(lambda words, _: "\n".join(" ".join(word) for word in words)),
    "json_extract": check_json_extract,
    "json_build": check_json_build,
    "table_lookup": check_table_lookup,
    "table_filter": check_table_filter,
    "key_value": check_key_value,
    "kebab_join": over_words(lambda words, _: "-".join(words)),
    "bracket_each": over_words(lambda words, _: " ".join("[" + word + "]" for word in words)),
    "last_item": over_words(lambda words, _: words[-1]),
    "swap_ends": check_swap_ends,
    "arrow_lookup": check_arrow_lookup,
    "double_each": over_words(lambda words, _: " ".join(word for word in words for _ in range(2))),
    "tag_each": over_words(lambda words, _: " ".join("#" + word for word in words)),
    "initials": over_words(lambda words, _: " ".join(word[0] for word in words)),
}


def true_answer(family: str, prompt: str) -> str:
    """Work out what a prompt of `family` asks for."""
    head, _, body = prompt.partition("\n")
    return ANSWERS[family](head, body)


def stated_answer(reply: str) -> str:
    """Read the answer a reply states: its `Answer: ` / `答案：` line, else the whole."""
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
