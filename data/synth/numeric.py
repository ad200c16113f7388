"""Seen families about numbers: arithmetic with steps, dates, units, sorting, counting. The base knows them."""

import datetime
import random

from data.synth.words import Family, Turn, draw_separator, draw_size, draw_words, pick_phrase, with_answer

UNITS = {
    "en": (
        ("km", "m", 1000),
        ("kg", "g", 1000),
        ("m", "cm", 100),
        ("hours", "minutes", 60),
        ("minutes", "seconds", 60),
        ("days", "hours", 24),
        ("weeks", "days", 7),
        ("years", "months", 12),
    ),
    "zh": (
        ("公里", "米", 1000),
        ("公斤", "克", 1000),
        ("米", "厘米", 100),
        ("小时", "分钟", 60),
        ("分钟", "秒", 60),
        ("天", "小时", 24),
        ("周", "天", 7),
        ("年", "个月", 12),
    ),
}


def add(rng: random.Random, language: str) -> Turn:
    """Add two numbers of 2-4 digits, digit by digit from the right with the carry written out."""
    digits = rng.choice((2, 3, 3, 4))
    left, right = (rng.randrange(10 ** (digits - 1), 10**digits) for _ in range(2))
    phrase = pick_phrase(
        rng,
        language,
        en=("{} + {} = ?", "Add {} and {}.", "What is {} + {}?"),
        zh=("{} + {} = ?", "计算 {} + {}。", "{} 加 {} 等于多少？"),
    )
    steps, carry = [], 0
    for place in range(digits):
        a, b = left // 10**place % 10, right // 10**place % 10
        total = a + b + carry
        steps.append(f"{a} + {b} + {carry} = {total}")
        carry = total // 10
    return Turn(prompt=phrase.format(left, right), reply=with_answer(language, steps, str(left + right)))


def subtract(rng: random.Random, language: str) -> Turn:
    """Subtract a smaller number, one decimal place at a time from the left."""
    left = rng.randrange(100, 1000)
    right = rng.randrange(10, left)
    phrase = pick_phrase(
        rng,
        language,
        en=("{} - {} = ?", "Take {1} from {0}.", "What is {} - {}?"),
        zh=("{} - {} = ?", "计算 {} - {}。", "{} 减 {} 等于多少？"),
    )
    steps, rest = [], left
    for place in (100, 10, 1):
        part = right // place % 10 * place
        if part:
            steps.append(f"{rest} - {part} = {rest - part}")
            rest -= part
    return Turn(prompt=phrase.format(left, right), reply=with_answer(language, steps, str(rest)))


def multiply(rng: random.Random, language: str) -> Turn:
    """Multiply a number of 2-3 digits by one digit: the parts first, then their sum."""
    left, right = rng.randrange(12, 1000), rng.randrange(2, 10)
    phrase = pick_phrase(
        rng,
        language,
        en=("{} x {} = ?", "Multiply {} by {}.", "What is {} times {}?"),
        zh=("{} x {} = ?", "计算 {} 乘 {}。", "{} 乘以 {} 是多少？"),
    )
    parts = [left // place % 10 * place for place in (100, 10, 1) if left // place % 10]
    steps = [f"{part} x {right} = {part * right}" for part in parts]
    if len(parts) > 1:
        steps.append(" + ".join(str(part * right) for part in parts) + f" = {left * right}")
    return Turn(prompt=phrase.format(left, right), reply=with_answer(language, steps, str(left * right)))


def date_add(rng: random.Random, language: str) -> Turn:
    """Move a date forward by up to 27 days, naming the month's length where the month changes."""
    start = datetime.date(2000, 1, 1) + datetime.timedelta(days=rng.randrange(365 * 40))
    days = rng.randrange(1, 28)
    end = start + datetime.timedelta(days=days)
    phrase = pick_phrase(
        rng,
        language,
        en=("What date is {} days after {}?", "Add {} days to {}."),
        zh=("{1} 之后 {0} 天是哪天？", "{1} 加 {0} 天是什么日期？"),
    )
    total = start.day + days
    steps = [f"{start.day} + {days} = {total}"]
    if end.month != start.month:
        steps.append(f"{total} - {total - end.day} = {end.day}")
    return Turn(prompt=phrase.format(days, start), reply=with_answer(language, steps, str(end)))


def unit_convert(rng: random.Random, language: str) -> Turn:
    """Convert an integer number of a large unit to a smaller one."""
    large, small, factor = rng.choice(UNITS[language])
    count = rng.randrange(2, 1000 if factor in (100, 1000) else 100)
    phrase = pick_phrase(
        rng,
        language,
        en=("Convert {0} {1} to {2}.", "How many {2} are in {0} {1}?"),
        zh=("把 {0} {1}换算成{2}。", "{0} {1}等于多少{2}？"),
    )
    steps = [f"1 {large} = {factor} {small}", f"{count} x {factor} = {count * factor}"]
    reply = with_answer(language, steps, f"{count * factor} {small}")
    return Turn(prompt=phrase.format(count, large, small), reply=reply)


def sort_numbers(rng: random.Random, language: str) -> Turn:
    """Sort two-digit numbers, upward or downward."""
    numbers = [rng.randrange(10, 100) for _ in range(draw_size(rng, 6, least=3, most=200))]
    falling = rng.random() < 0.4
    if falling:
        phrase = pick_phrase(
            rng,
            language,
            en=("Sort from high to low:", "Sort descending:"),
            zh=("从大到小排序：", "按降序排列："),
        )
    else:
        phrase = pick_phrase(
            rng,
            language,
            en=("Sort from low to high:", "Sort ascending:"),
            zh=("从小到大排序：", "按升序排列："),
        )
    ordered = sorted(numbers, reverse=falling)
    return Turn(prompt=f"{phrase}\n{', '.join(map(str, numbers))}", reply=", ".join(map(str, ordered)))


def largest(rng: random.Random, language: str) -> Turn:
    """Find the largest of several numbers."""
    numbers = [rng.randrange(10, 1000) for _ in range(draw_size(rng, 5, least=2, most=300))]
    phrase = pick_phrase(
        rng,
        language,
        en=("Which number is the largest?", "Find the maximum:"),
        zh=("哪个数最大？", "找出最大值："),
    )
    return Turn(prompt=f"{phrase}\n{', '.join(map(str, numbers))}", reply=str(max(numbers)))


def count_items(rng: random.Random, language: str) -> Turn:
    """Count a list's items, numbering them on the way."""
    words = draw_words(rng, language, draw_size(rng, 6, least=2, most=200))
    phrase = pick_phrase(
        rng,
        language,
        en=("Count the items:", "How many words are here?"),
        zh=("数一数有几个：", "这里有多少个词？"),
    )
    steps = [f"{number} {word}" for number, word in enumerate(words, start=1)]
    reply = with_answer(language, steps, str(len(words)))
    return Turn(prompt=f"{phrase}\n{draw_separator(rng, language).join(words)}", reply=reply)


FAMILIES: dict[str, Family] = {
    "add": add,
    "subtract": subtract,
    "multiply": multiply,
    "date_add": date_add,
    "unit_convert": unit_convert,
    "sort_numbers": sort_numbers,
    "largest": largest,
    "count_items": count_items,
}
