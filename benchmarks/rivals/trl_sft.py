"""TRL's own preparation of a chat data set with assistant masks: what SFTTrainer does before its first step.

Run as `python trl_sft.py CHAT MODEL OUT WORKERS` in a virtual environment with TRL. Timed: loading the file and making
the trainer, whose model has one layer of 16 features; imports are not.
"""

import json
import sys
import time

from datasets import load_dataset
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from trl import SFTConfig, SFTTrainer


def main() -> None:
    """Make the trainer, count what it prepared."""
    chat, model, out, workers = sys.argv[1:]
    network = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model))
    tokenizer = AutoTokenizer.from_pretrained(model)
    arguments = SFTConfig(
        output_dir=f"{out}/trainer",
        assistant_only_loss=True,
        dataset_num_proc=int(workers),
        max_length=None,
        report_to="none",
        use_cpu=True,
    )
    start = time.perf_counter()
    data = load_dataset("json", data_files=chat, split="train", cache_dir=out)
    trainer = SFTTrainer(model=network, args=arguments, train_dataset=data, processing_class=tokenizer)
    seconds = time.perf_counter() - start
    prepared = trainer.train_dataset
    tokens = sum(len(chunk.values) for chunk in prepared.data.column("input_ids").chunks)
    print(json.dumps({"work_s": seconds, "rows": len(prepared), "tokens": tokens}))


if __name__ == "__main__":
    main()
