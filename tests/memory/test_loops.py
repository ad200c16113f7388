"""Loops found by comparing three sequences, or refused."""

import pytest

from lean_finetune.memory.allocator.cut import NotAffine
from lean_finetune.memory.allocator.loops import find_loops


def unrolled(places, fewest, turns):
    """The sequence with every block so often."""
    for place, block in reversed(places):
        fewest = fewest[:place] + block * turns + fewest[place:]
    return fewest


@pytest.mark.parametrize(
    "form", ["a{xyz}b", "a{xyz}b{zyx}c", "{x}", "a{xx}x", "p{abab}q{ba}r", "xyxy{xy}", "a{bc}b{dd}e"]
)
def test_what_one_more_turn_inserts_is_found_whatever_the_loops_hold(form):
    """A block cut short where it begins like what follows it."""
    sequences = []
    for turns in range(2, 8):
        text = form
        while "{" in text:
            before, _, rest = text.partition("{")
            block, _, after = rest.partition("}")
            text = before + block * turns + after
        sequences.append(text)
    found = [(insertion.place, "".join(insertion.block)) for insertion in find_loops(*sequences[:3])]
    assert [unrolled(found, sequences[0], turns) for turns in range(6)] == sequences


@pytest.mark.parametrize(
    "sequences",
    [("ab", "axb", "axyb"), ("ab", "axb", "ab"), ("axb", "ab", "a"), ("ab", "ac", "ad"), ("a", "ab", "abb!")],
)
def test_what_does_not_repeat_is_refused(sequences):
    """A first layer unlike the others stretched to all of them."""
    with pytest.raises(NotAffine, match="loops do not repeat"):
        find_loops(*sequences)
