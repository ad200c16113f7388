"""Choice of the padding token: one that is never trained, so that padding cannot be mistaken for an answer."""

from collections.abc import Callable, Mapping
from typing import NamedTuple

# Words in the names of control tokens without a use.
UNUSED_WORDS = ("pad", "reserved", "unused", "extra_id")
TRAINED_ROLES = ("bos_token", "eos_token")


class Pad(NamedTuple):
    """The padding token."""

    number: int
    """Its id."""
    reason: str
    is_spare: bool
    """Whether the token has no other use, so that a trained one is an error."""


def choose_pad(
    control: Mapping[int, str], special_tokens: Mapping[str, str], id_of: Callable[[str], int | None]
) -> Pad:
    """The padding token, and the reason.

    Args:
        control: the tokenizer's control tokens by id.
        special_tokens: its bos_token, eos_token, pad_token, … as text.
        id_of: the id of a token, None when it is unknown.
    """
    taken = {special_tokens[role] for role in TRAINED_ROLES if role in special_tokens}

    def spare(role: str) -> int | None:
        token = special_tokens.get(role)
        return None if token is None or token in taken else id_of(token)

    if (number := spare("pad_token")) is not None:
        return Pad(number, f"it is the tokenizer's pad_token {special_tokens['pad_token']!r}", True)
    for word in UNUSED_WORDS:
        for number, token in sorted(control.items()):
            if word in token.lower() and token not in taken:
                return Pad(number, f"the tokenizer has no pad_token, but a control token {token!r}", True)
    if (number := spare("unk_token")) is not None:
        return Pad(number, f"it is the tokenizer's unk_token {special_tokens['unk_token']!r}", True)
    reason = (
        "the tokenizer has no unused token for padding; this one is trained too, which changes nothing here: "
        "trained tokens are stored as spans, never found by id"
    )
    eos = special_tokens.get("eos_token")
    return Pad((None if eos is None else id_of(eos)) or 0, reason, False)
