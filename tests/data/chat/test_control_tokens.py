"""A row's own text never acts as a control token, and finding that out is done the same way by the fast look."""

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lean_finetune.data.chat.control_tokens import REPLACEMENT, TRAINED_START, Guard, any_of

TOKENS = ("<s>", "</s>", "<|a|>", "<|ab|>", "<|a", "[INST]", '"q\\"', "\n\n#", "é¥", "<")
PARTS = st.one_of(
    st.sampled_from((*TOKENS, TRAINED_START, "\ud800", "<|", "[", "|>", "\\", '"', "\n")), st.text(max_size=3)
)
TEXTS = st.lists(PARTS, max_size=5).map("".join)
VALUES = st.recursive(TEXTS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3))


@given(value=VALUES)
@settings(max_examples=100, deadline=None)
def test_a_row_called_clean_is_one_that_protection_leaves_as_it_is(value):
    """A control token that the fast search missed, such as one that JSON escapes, would end the user's turn."""
    guard = Guard(TOKENS)
    protected = guard.protect(value)
    assert guard.is_clean(value) == (guard.control_tokens == guard.surrogates == 0)
    if guard.is_clean(value):
        assert protected == value


@pytest.mark.parametrize("value", [{1: "a"}, 2**70, {"a": object()}])
def test_what_the_fast_look_cannot_read_goes_the_slow_way(value):
    assert not Guard(TOKENS).is_clean(value)


@given(
    texts=st.sets(st.text("ab<|[", min_size=1, max_size=4), min_size=1, max_size=8), text=st.text("ab<|[", max_size=20)
)
@settings(max_examples=100, deadline=None)
def test_the_longest_of_the_texts_at_a_place_is_found(texts, text):
    """A shorter token found inside a longer one would leave the rest of it to act."""
    longest_first = "|".join(map(re.escape, sorted(texts, key=lambda one: (-len(one), one))))
    assert re.findall(f"(?:{any_of(texts)})", text) == re.findall(longest_first, text)


def test_split_separates_control_tokens_from_text():
    guard = Guard(TOKENS)
    text = f"a<s>b[INST]{TRAINED_START}é¥\ud800"
    pieces = guard.split(guard.protect(text))
    assert pieces == [
        ("a", False),
        ("<s>", True),
        ("b", False),
        ("[INST]", True),
        (TRAINED_START, True),
        ("é¥", True),
        (REPLACEMENT, False),
    ]
    assert (guard.control_tokens, guard.surrogates) == (4, 1)
