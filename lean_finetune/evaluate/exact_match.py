"""Compare generated with expected answers: exact match of final answers."""

ANSWER_MARKERS = ("Answer: ", "答案：")
"""Start of the line with the final answer after worked steps."""


def final_answer(text: str) -> str | None:
    """Return the text after the last answer marker at the start of a line; None without one."""
    lines = text.strip().split("\n")
    for number in reversed(range(len(lines))):
        for marker in ANSWER_MARKERS:
            if lines[number].startswith(marker):
                return "\n".join(lines[number:]).removeprefix(marker).strip()
    return None


def is_exact_match(expected: str, generated: str) -> bool:
    """Whether the final answers are equal or, if none is expected, the stripped texts are."""
    answer = final_answer(expected)
    if answer is None:
        return generated.strip() == expected.strip()
    return final_answer(generated) == answer
