"""What most scripts do: `datasets.map` over transformers' `apply_chat_template` with assistant masks, batched.

Run as `python datasets_map.py CHAT MODEL OUT WORKERS`. Timed from `load_dataset` on; imports are not.
"""

import json
import sys
import time
from typing import Any

from datasets import load_dataset
from transformers import AutoTokenizer


def main() -> None:
    """Load, map, count."""
    chat, model, out, workers = sys.argv[1:]
    start = time.perf_counter()
    tokenizer = AutoTokenizer.from_pretrained(model)

    def tokenize(rows: dict[str, list[Any]]) -> dict[str, Any]:
        encoded: Any = tokenizer.apply_chat_template(
            rows["messages"], return_dict=True, return_assistant_tokens_mask=True, return_attention_mask=False
        )
        return {"input_ids": encoded["input_ids"], "assistant_masks": encoded["assistant_masks"]}

    data = load_dataset("json", data_files=chat, split="train", cache_dir=out)
    data = data.map(tokenize, batched=True, remove_columns=data.column_names, num_proc=int(workers))
    seconds = time.perf_counter() - start
    tokens = sum(len(chunk.values) for chunk in data.data.column("input_ids").chunks)
    print(json.dumps({"work_s": seconds, "rows": len(data), "tokens": tokens}))


if __name__ == "__main__":
    main()
