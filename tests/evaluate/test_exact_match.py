"""Exact match looks at final answers only where there are worked steps, and at no free text."""

import pytest

from lean_finetune.evaluate.closed_answers import closed_answers, is_closed, is_exact_match


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


@pytest.mark.parametrize(
    ("expected", "alone", "of_task"),
    [
        ("42", True, True),
        ("positive", True, True),
        ("Yes.", True, True),
        ("Rio de Janeiro", True, True),
        ("北京", True, True),
        ("2 + 2 = 4\nAnswer: 4", True, True),
        ("[river] [wind] [teacher] [apple] [red] [bridge]", False, True),
        ("3, 5, 8, 13, 21, 34, 55, 89", False, True),
        ("The capital of France is Paris.", False, False),
        ("巴黎是法国的首都。", False, False),
        ("Of course!", False, False),
        ("def add(a, b):\n    return a + b", False, False),
        ("How to cook pasta in ten minutes", False, True),
        ("", False, False),
    ],
)
def test_short_answers_that_are_no_sentences_are_closed(expected: str, alone: bool, of_task: bool):
    """Free text was called wrong, because a good answer had other words than the row's."""
    assert (is_closed(expected, of_task=False), is_closed(expected, of_task=True)) == (alone, of_task)


def test_a_short_answer_among_free_text_is_free_text():
    """The only answer of a chat that is compared was "Sure", for which there are many other words."""
    chats = ["Sure", "That depends on the weather.", "Take two eggs.\nStir them.", "I would wait."]
    assert closed_answers([*chats, "4", "8"], ["all"] * 4 + ["sums"] * 2, "all") == [False] * 4 + [True] * 2
    assert closed_answers(["Sure", "4", "No idea, sorry."], ["all"] * 3, "all") == [True, True, False]
