"""Whether a generated answer is right: exact match of final answers."""

ANSWER_MARKERS = ("Answer: ", "答案：")
"""How a line starts that gives the final answer after worked steps."""


def final_answer(text: str) -> str | None:
    """What follows the last line that starts with an answer marker, stripped; None where no line does."""
    lines = text.strip().split("\n")
    for number in reversed(range(len(lines))):
        for marker in ANSWER_MARKERS:
            if lines[number].startswith(marker):
                return "\n".join(lines[number:]).removeprefix(marker).strip()
    return None


def is_exact_match(expected: str, generated: str) -> bool:
    """True when the final answers are equal or, where none is expected, when the whole stripped texts are."""
    wanted = final_answer(expected)
    if wanted is None:
        return generated.strip() == expected.strip()
    return final_answer(generated) == wanted
