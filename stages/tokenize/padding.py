"""Which id fills the rest of a padded row: one that is never trained, so that nobody can take padding for an answer."""

from collections.abc import Callable, Mapping

# Words by which tokenizers name control tokens that stand for nothing.
UNUSED_WORDS = ("pad", "reserved", "unused", "extra_id")
TRAINED_ROLES = ("bos_token", "eos_token")


def choose_pad(
    control: Mapping[int, str], special_tokens: Mapping[str, str], id_of: Callable[[str], int | None]
) -> tuple[int, str]:
    """(id, why that one).

    Args:
        control: the tokenizer's control tokens by id.
        special_tokens: its bos_token, eos_token, pad_token, … as text.
        id_of: the id of a token, None when it is unknown.
    """
    taken = {special_tokens[role] for role in TRAINED_ROLES if role in special_tokens}
    for role in ("pad_token", "unk_token"):
        token = special_tokens.get(role)
        number = None if token is None or token in taken else id_of(token)
        if number is not None:
            return number, f"it is the tokenizer's {role} {token!r}"
        if role == "pad_token":
            for word in UNUSED_WORDS:
                for number, token in sorted(control.items()):
                    if word in token.lower() and token not in taken:
                        return number, f"the tokenizer has no pad_token of its own, but a control token {token!r}"
    number = id_of(special_tokens["eos_token"]) if "eos_token" in special_tokens else None
    return number or 0, (
        "the tokenizer has no token to spare for padding; this one is trained too, which changes nothing here, since "
        "what is trained is told by spans, never by id"
    )
