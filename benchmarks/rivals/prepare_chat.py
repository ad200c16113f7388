"""How other tools prepare a chat file: `python prepare_chat.py TOOL CHAT MODEL OUT WORKERS`.

The last line printed is JSON: seconds without imports, rows and tokens. LLaMA-Factory and TRL need their virtual
environments.
"""

import json
import sys
import time
from pathlib import Path
from typing import Any

BATCH_ROWS = 1000
LLAMA_FACTORY_FORMAT = {
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


def raw_limit(chat: str, model: str, out: str, workers: int) -> tuple[float, int, int]:
    """Tokenizers' `encode_batch_fast` on all cores, of rendered text in memory. Only the encoding is timed."""
    from tokenizers import Tokenizer
    from transformers import AutoTokenizer

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
    return seconds, len(texts), tokens


def datasets_map(chat: str, model: str, out: str, workers: int) -> tuple[float, int, int]:
    """What most scripts do: `datasets.map` over transformers' `apply_chat_template` with assistant masks, batched."""
    from datasets import load_dataset
    from transformers import AutoTokenizer

    start = time.perf_counter()
    tokenizer = AutoTokenizer.from_pretrained(model)

    def tokenize(rows: dict[str, list[Any]]) -> dict[str, Any]:
        encoded: Any = tokenizer.apply_chat_template(
            rows["messages"], return_dict=True, return_assistant_tokens_mask=True, return_attention_mask=False
        )
        return {"input_ids": encoded["input_ids"], "assistant_masks": encoded["assistant_masks"]}

    data = load_dataset("json", data_files=chat, split="train", cache_dir=out)
    data = data.map(tokenize, batched=True, remove_columns=data.column_names, num_proc=workers)
    return time.perf_counter() - start, len(data), token_count(data)


def llama_factory(chat: str, model: str, out: str, workers: int) -> tuple[float, int, int]:
    """LLaMA-Factory's get_dataset with its ChatML template. Its reader of messages leaves out tool calls."""
    from llamafactory.data import get_dataset, get_template_and_fix_tokenizer
    from llamafactory.hparams import get_train_args
    from llamafactory.model import load_tokenizer

    description = {"chat": {"file_name": str(Path(chat).resolve()), **LLAMA_FACTORY_FORMAT}}
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
        "preprocessing_num_workers": workers,
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
    return seconds, len(prepared["train_dataset"]), token_count(prepared["train_dataset"])


def trl(chat: str, model: str, out: str, workers: int) -> tuple[float, int, int]:
    """What TRL's SFTTrainer does before its first step, with assistant masks and a model of one small layer."""
    from datasets import load_dataset
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
    from trl import SFTConfig, SFTTrainer

    network = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model))
    tokenizer = AutoTokenizer.from_pretrained(model)
    arguments = SFTConfig(
        output_dir=f"{out}/trainer",
        assistant_only_loss=True,
        dataset_num_proc=workers,
        max_length=None,
        report_to="none",
        use_cpu=True,
    )
    start = time.perf_counter()
    data = load_dataset("json", data_files=chat, split="train", cache_dir=out)
    trainer = SFTTrainer(model=network, args=arguments, train_dataset=data, processing_class=tokenizer)
    seconds = time.perf_counter() - start
    return seconds, len(trainer.train_dataset), token_count(trainer.train_dataset)


def token_count(data: Any) -> int:
    """Tokens of a Dataset."""
    return sum(len(chunk.values) for chunk in data.data.column("input_ids").chunks)


if __name__ == "__main__":
    tool, chat_path, model_path, out_path, worker_count = sys.argv[1:]
    work_s, row_count, tokens = globals()[tool](chat_path, model_path, out_path, int(worker_count))
    print(json.dumps({"work_s": work_s, "rows": row_count, "tokens": tokens}))
