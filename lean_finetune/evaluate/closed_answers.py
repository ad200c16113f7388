"""Which answers are right or wrong: short, closed ones. Free text can be good in many words."""

import re
from collections import Counter
from collections.abc import Sequence

ANSWER_MARKER = re.compile(r"^(?:Answer: |答案：)", re.MULTILINE)
"""Start of the line with the final answer after worked steps."""
SENTENCE = re.compile(r"[.!?。！？…][\"'”’»)）\]]*$")
"""The end of free text."""
SHORT_WORD = 6
"""Characters with which one word and a full stop are no sentence."""
MOST_WORDS, MOST_CHARACTERS = 5, 40
"""Of a closed answer in rows that name no task family: a label, a name, a number, a choice."""


def final_answer(text: str) -> str | None:
    """Return the text after the last answer marker at the start of a line; None without one."""
    before, *answers = ANSWER_MARKER.split(text.strip())
    return answers[-1].strip() if answers else None


def is_exact_match(expected: str, generated: str) -> bool:
    """Whether the final answers are equal or, if none is expected, the stripped texts are."""
    answer = final_answer(expected)
    if answer is None:
        return generated.strip() == expected.strip()
    return final_answer(generated) == answer


def is_closed(expected: str, *, of_task: bool) -> bool:
    """Whether there is one way to write an answer: one line that is no sentence, or one marked as the final answer.

    `of_task`: the row names its task family, whose closed answers may be lists. Any other answer has few words.
    """
    if final_answer(expected) is not None:
        return True
    text = expected.strip()
    words = len(text.split())
    # "Yes." and "3." are no sentences; one in Chinese has no spaces.
    is_sentence = (words > 1 or len(text) > SHORT_WORD) and SENTENCE.search(text)
    if not text or "\n" in text or is_sentence:
        return False
    return of_task or (words <= MOST_WORDS and len(text) <= MOST_CHARACTERS)


def closed_answers(expected: Sequence[str], families: Sequence[str], no_family: str) -> list[bool]:
    """Whether each answer is closed, and most of its family: "Sure!" among free text is free text too.

    `families` are those of the answers; `no_family` is that of rows that name none.
    """
    closed = [is_closed(text, of_task=family != no_family) for text, family in zip(expected, families, strict=True)]
    counts = Counter(families)
    of_closed = Counter(family for family, one in zip(families, closed, strict=True) if one)
    return [one and 2 * of_closed[family] > counts[family] for family, one in zip(families, closed, strict=True)]
