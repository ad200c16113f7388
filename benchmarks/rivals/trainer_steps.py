"""Hugging Face's Trainer and TRL's SFTTrainer on the benchmark's rows, timed step by step.

Run as `python trainer_steps.py ROWS MODEL OUT CASE`; CASE is JSON: trainer (hf | trl), its own arguments, steps, and
whether memory is counted instead of time. The last line printed holds, by step: seconds, supervised and padded tokens.

For hf the rows come as token ids, already cut, from ROWS (JSON Lines of input_ids and labels); for trl as text, and it
makes its own tokens. Both count what reaches the model's forward pass.
"""

import json
import sys
import time
from contextlib import nullcontext

import torch
from datasets import load_dataset
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DataCollatorForSeq2Seq,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from stages.train.measure import CpuMeter


class Seen(TrainerCallback):
    """When each optimizer step ended, and the tokens it was given."""

    def __init__(self):
        self.ends = []
        self.supervised, self.padded, self.real = [0], [0], [0]

    def watch(self, model):
        """Count the tokens of every forward pass."""
        model.register_forward_pre_hook(self._count, with_kwargs=True)

    def _count(self, model, args, kwargs):
        labels, ids = kwargs["labels"], kwargs["input_ids"]
        self.supervised[-1] += int((labels != -100).sum())
        self.padded[-1] += ids.numel()
        mask = kwargs.get("attention_mask")
        self.real[-1] += ids.numel() if mask is None else int(mask.sum())

    def on_step_end(self, args, state, control, **kwargs):
        """Close the step."""
        self.ends.append(time.perf_counter())
        for counts in (self.supervised, self.padded, self.real):
            counts.append(0)

    def on_train_begin(self, args, state, control, **kwargs):
        """Start the clock."""
        self.ends.append(time.perf_counter())

    def told(self):
        """By step, what was seen."""
        seconds = [end - start for start, end in zip(self.ends, self.ends[1:], strict=False)]
        steps = len(seconds)
        return {
            "seconds": seconds,
            "supervised": self.supervised[:steps],
            "padded": self.padded[:steps],
            "real": self.real[:steps],
        }


def main() -> None:
    """Train and print."""
    rows, model_directory, out, case_text = sys.argv[1:]
    case = json.loads(case_text)
    torch.set_num_threads(case["threads"])
    meter = CpuMeter()
    seen = Seen()
    arguments = {
        "output_dir": out,
        "max_steps": case["steps"],
        "learning_rate": case["lr"],
        "lr_scheduler_type": "constant",
        "optim": "adamw_torch_fused",
        "logging_strategy": "no",
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
        "bf16": False,
        "seed": 17,
        **case["arguments"],
    }
    with meter.window("all") if case["memory"] else nullcontext():
        tokenizer = AutoTokenizer.from_pretrained(model_directory)
        model = AutoModelForCausalLM.from_pretrained(model_directory, dtype=torch.float32)
        seen.watch(model)
        data = load_dataset("json", data_files=rows, split="train", cache_dir=out)
        if case["trainer"] == "trl":
            from trl import SFTConfig, SFTTrainer

            trainer = SFTTrainer(
                model=model,
                args=SFTConfig(**arguments),
                train_dataset=data,
                processing_class=tokenizer,
                callbacks=[seen],
            )
        else:
            trainer = Trainer(
                model=model,
                args=TrainingArguments(**arguments),
                train_dataset=data,
                data_collator=DataCollatorForSeq2Seq(tokenizer, padding=True),
                callbacks=[seen],
            )
        trainer.train()
    peak = meter.result().peak_bytes if case["memory"] else None
    print(json.dumps({**seen.told(), "peak_bytes": peak}))


if __name__ == "__main__":
    main()
