"""`python -m tests.data.small_blocks`: stage tokenize with 32 KiB blocks, four in a shard.

So a small source has several shards.
"""

from collections.abc import Callable
from functools import partial

from lean_finetune.data.read import source_blocks
from lean_finetune.data.shards import shard_files, tokenize_run
from lean_finetune.stages import tokenize as entry

BLOCK_BYTES = 1 << 15
BLOCKS_PER_SHARD = 4


def make_blocks_small(set_attribute: Callable[[object, str, object], None] = setattr) -> None:
    """Change the sizes in this process."""
    set_attribute(tokenize_run, "BLOCK_BYTES", BLOCK_BYTES)
    set_attribute(tokenize_run, "read_blocks", partial(source_blocks.read_blocks, block_bytes=BLOCK_BYTES))
    set_attribute(shard_files, "BLOCKS_PER_SHARD", BLOCKS_PER_SHARD)


if __name__ == "__main__":
    make_blocks_small()
    entry.main()
