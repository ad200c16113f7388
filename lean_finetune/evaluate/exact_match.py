"""Compare generated with expected answers: exact match of final answers."""

import re

ANSWER_MARKER = re.compile(r"^(?:Answer: |答案：)", re.MULTILINE)
"""Start of the line with the final answer after worked steps."""


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
