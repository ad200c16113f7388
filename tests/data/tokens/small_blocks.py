"""`python -m tests.data.tokens.small_blocks`: the tokenize stage with 32 KiB blocks and 4 of them a shard.

So that a small source has several shards; nothing else differs from `python -m stages.tokenize`.
"""

from functools import partial

from lean_finetune.data.shards import shard_files, tokenize_run
from stages import tokenize as entry

BLOCK_BYTES = 1 << 15
BLOCKS_PER_SHARD = 4


def make_blocks_small() -> None:
    """From now on the stage runs so in this process."""
    tokenize_run.BLOCK_BYTES = BLOCK_BYTES
    tokenize_run.read_blocks = partial(tokenize_run.read_blocks, block_bytes=BLOCK_BYTES)
    shard_files.BLOCKS_PER_SHARD = BLOCKS_PER_SHARD


if __name__ == "__main__":
    make_blocks_small()
    entry.main()
