"""Exact match looks at final answers only where there are worked steps."""

import pytest

from lean_finetune.evaluate.base_and_tuned import is_exact_match


@pytest.mark.parametrize(
    ("expected", "generated", "right"),
    [
        ("2 + 2 = 4\nAnswer: 4", "two and two\nAnswer: 4", True),
        ("2 + 2 = 4\nAnswer: 4", "2 + 2 = 4\nAnswer: 44", False),
        ("2 + 2 = 4\nAnswer: 4", "4", False),
        ("2 + 2 = 4\nAnswer: 4", "Answer: 4\nAnswer: 5", False),
        ("24 + 2 = 26\n答案：2019-04-26", "24 + 2 = 26\n答案：2019-04-26\n", True),
        ("24 + 2 = 26\n答案：2019-04-26", "Answer: 2019-04-26", True),
        ("Answer: a\nb", "Answer: a\nb", True),
        ("Answer: a\nb", "Answer: a", False),
        ("[a] [b]", " [a] [b]\n", True),
        ("[a] [b]", "[a] [b] [c]", False),
        ("The Answer: 4", "Answer: 4", False),
        ("4", "Answer: 4", False),
        ("Answer: 4", "steps only", False),
    ],
)
def test_exact_match(expected, generated, right):
    assert is_exact_match(expected, generated) is right
