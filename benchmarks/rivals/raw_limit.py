"""The raw limit: tokenizers' `encode_batch_fast` on all cores, of rendered text that is in memory already.

Run as `python raw_limit.py CHAT MODEL OUT WORKERS`, like every script here; the last line it prints is its figures as
JSON. Only the calls that encode are timed: no reading, no template, no masks, nothing done with the ids.
"""

import json
import sys
import time

from tokenizers import Tokenizer
from transformers import AutoTokenizer

BATCH_ROWS = 1000


def main() -> None:
    """Render everything, then time the encoding."""
    chat, model, _, _ = sys.argv[1:]
    template = AutoTokenizer.from_pretrained(model)
    with open(chat, "rb") as file:
        texts = [template.apply_chat_template(json.loads(line)["messages"], tokenize=False) for line in file]
    tokenizer = Tokenizer.from_file(f"{model}/tokenizer.json")
    seconds, tokens = 0.0, 0
    for first in range(0, len(texts), BATCH_ROWS):
        batch = texts[first : first + BATCH_ROWS]
        start = time.perf_counter()
        encoded = tokenizer.encode_batch_fast(batch, add_special_tokens=False)
        seconds += time.perf_counter() - start
        tokens += sum(map(len, encoded))
    print(json.dumps({"work_s": seconds, "rows": len(texts), "tokens": tokens}))


if __name__ == "__main__":
    main()
