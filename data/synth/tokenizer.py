"""Train the tiny model's byte-level BPE tokenizer: `python -m data.synth.tokenizer --seed 7 --rows 20000`.

Each digit and each punctuation mark is one token: arithmetic has one token a digit, and a list's words have the same
ids with any separator. The training text is rows of seen families only. Every byte has an id, so any text round-trips.
"""

import argparse
import itertools
from collections.abc import Iterable, Sequence
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from data.synth.rows import SEEN, stream_rows

TINY = Path("lean_finetune/tiny")
VOCABULARY_SIZE = 1280
SPECIAL_TOKENS = ("<|pad|>", "<|im_start|>", "<|im_end|>")
# A digit, a word, one other mark with the space after it, line ends, other white space: a word has one id everywhere.
PIECES = r"\p{N}|\p{L}+|[^\s\p{L}\p{N}] ?|[\r\n]+|\s+"
MAX_LENGTH_TOKENS = 2048


def train_bpe(texts: Iterable[str], pieces: str, vocabulary_size: int, special_tokens: Sequence[str]) -> Tokenizer:
    """Train a byte-level BPE that merges inside `pieces`, a regular expression. First ids: the special tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pieces), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary_size,
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in special_tokens],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def train_tiny(seed: int, rows: int) -> Tokenizer:
    """Train on the messages of `rows` rows of seen families."""
    stream = itertools.islice(stream_rows(seed, SEEN, set()), rows)
    texts = (f"{message['role']}\n{message['content']}" for row in stream for message in row["messages"])
    return train_bpe(texts, PIECES, VOCABULARY_SIZE, SPECIAL_TOKENS)


def save(tokenizer: Tokenizer, directory: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json next to the chat template in `directory`."""
    pad, _, end = SPECIAL_TOKENS
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=pad,
        eos_token=end,
        model_max_length=MAX_LENGTH_TOKENS,
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = (directory / "chat_template.jinja").read_text(encoding="utf-8")
    fast.save_pretrained(directory)


def main() -> None:
    """Parse the command line, train, save."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--rows", type=int, required=True)
    parser.add_argument("--out", type=Path, default=TINY)
    arguments = parser.parse_args()
    save(train_tiny(arguments.seed, arguments.rows), arguments.out)


if __name__ == "__main__":
    main()
