"""LLaMA-Factory's own preparation of a chat data set: its get_dataset, with its ChatML template.

Run as `python llama_factory.py CHAT MODEL OUT WORKERS` in a virtual environment with LLaMA-Factory. Timed: get_dataset;
imports are not. Its reader of messages leaves out tool calls, so those rows have fewer tokens.
"""

import json
import os
import sys
import time
from pathlib import Path

from llamafactory.data import get_dataset, get_template_and_fix_tokenizer
from llamafactory.hparams import get_train_args
from llamafactory.model import load_tokenizer

DATASET = {
    "formatting": "sharegpt",
    "columns": {"messages": "messages"},
    "tags": {
        "role_tag": "role",
        "content_tag": "content",
        "user_tag": "user",
        "assistant_tag": "assistant",
        "observation_tag": "tool",
        "system_tag": "system",
    },
}


def main() -> None:
    """Describe the file as LLaMA-Factory wants it, prepare it, count."""
    chat, model, out, workers = sys.argv[1:]
    description = {"chat": {"file_name": os.path.abspath(chat), **DATASET}}
    (Path(out) / "dataset_info.json").write_text(json.dumps(description))
    arguments = {
        "model_name_or_path": model,
        "stage": "sft",
        "do_train": True,
        "finetuning_type": "full",
        "template": "chatml",
        "dataset": "chat",
        "dataset_dir": out,
        "output_dir": f"{out}/trainer",
        "cutoff_len": 1 << 20,
        "preprocessing_num_workers": int(workers),
        "overwrite_cache": True,
        "report_to": "none",
        "use_cpu": True,
        "bf16": False,
    }
    model_args, data_args, training_args, _, _ = get_train_args(arguments)
    tokenizer_module = load_tokenizer(model_args)
    template = get_template_and_fix_tokenizer(tokenizer_module["tokenizer"], data_args)
    start = time.perf_counter()
    prepared = get_dataset(template, model_args, data_args, training_args, stage="sft", **tokenizer_module)
    seconds = time.perf_counter() - start
    data = prepared["train_dataset"]
    tokens = sum(len(chunk.values) for chunk in data.data.column("input_ids").chunks)
    print(json.dumps({"work_s": seconds, "rows": len(data), "tokens": tokens}))


if __name__ == "__main__":
    main()
