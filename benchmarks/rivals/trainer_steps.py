"""Hugging Face's Trainer and TRL's SFTTrainer on the benchmark's rows, timed step by step.

Run as `python trainer_steps.py ROWS MODEL OUT CASE`. CASE is JSON: trainer (hf | trl), its arguments, the number of
steps, and the steps in which memory is measured (null for none). The last line printed is JSON with, for each step,
seconds, supervised and padded tokens and padded tokens of the largest batch; and the versions of the libraries.

Memory is measured as stage train does: from before loading to the end of the first step, then around single steps. A
run that measures memory has no meaningful times.

For hf, ROWS has token ids (JSON Lines of input_ids and labels); for trl it has text. Token counts are those of the
model's forward pass.
"""

import importlib.metadata
import json
import sys
import time
from contextlib import ExitStack

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

from lean_finetune.train.monitor.measured_peak import CpuMeter

LIBRARIES = ("trl", "transformers", "torch", "accelerate")


class StepRecorder(TrainerCallback):
    """Records when each optimizer step ended, and its tokens."""

    def __init__(self):
        self.ends = []
        self.supervised, self.padded, self.real, self.largest = [0], [0], [0], [0]

    def watch(self, model):
        """Count the tokens of every forward pass."""
        model.register_forward_pre_hook(self._count, with_kwargs=True)

    def _count(self, model, args, kwargs):
        labels, ids = kwargs["labels"], kwargs["input_ids"]
        self.supervised[-1] += int((labels != -100).sum())
        self.padded[-1] += ids.numel()
        self.largest[-1] = max(self.largest[-1], ids.numel())
        mask = kwargs.get("attention_mask")
        self.real[-1] += ids.numel() if mask is None else int(mask.sum())

    def on_step_end(self, args, state, control, **kwargs):
        """Record the end of the step."""
        self.ends.append(time.perf_counter())
        for counts in (self.supervised, self.padded, self.real, self.largest):
            counts.append(0)

    def on_train_begin(self, args, state, control, **kwargs):
        """Start the clock."""
        self.ends.append(time.perf_counter())

    def figures(self):
        """What was recorded, by step."""
        seconds = [end - start for start, end in zip(self.ends, self.ends[1:], strict=False)]
        steps = len(seconds)
        return {
            "seconds": seconds,
            "supervised": self.supervised[:steps],
            "padded": self.padded[:steps],
            "real": self.real[:steps],
            "largest": self.largest[:steps],
        }


class Windows(TrainerCallback):
    """Measures memory until the end of the first step, and in further steps."""

    def __init__(self, meter, steps):
        self._meter, self._steps = meter, steps
        self._open = ExitStack()
        self._open.enter_context(meter.window("loading and the first step"))

    def on_step_begin(self, args, state, control, **kwargs):
        """Open a window if this step is to be measured; that of the first step is open already."""
        if state.global_step and state.global_step in self._steps:
            self._open.enter_context(self._meter.window(f"step {state.global_step}"))

    def on_step_end(self, args, state, control, **kwargs):
        """Close the window."""
        self._open.close()


def main() -> None:
    """Train and print."""
    rows, model_directory, out, case_text = sys.argv[1:]
    case = json.loads(case_text)
    torch.set_num_threads(case["threads"])
    meter = CpuMeter()
    recorder = StepRecorder()
    callbacks: list[TrainerCallback] = [recorder]
    if case["measured"] is not None:
        callbacks.append(Windows(meter, case["measured"]))
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
    tokenizer = AutoTokenizer.from_pretrained(model_directory)
    model = AutoModelForCausalLM.from_pretrained(model_directory, dtype=torch.float32)
    recorder.watch(model)
    data = load_dataset("json", data_files=rows, split="train", cache_dir=out)
    if case["trainer"] == "trl":
        from trl import SFTConfig, SFTTrainer

        trainer = SFTTrainer(
            model=model,
            args=SFTConfig(**arguments),
            train_dataset=data,
            processing_class=tokenizer,
            callbacks=callbacks,
        )
    else:
        trainer = Trainer(
            model=model,
            args=TrainingArguments(**arguments),
            train_dataset=data,
            data_collator=DataCollatorForSeq2Seq(tokenizer, padding=True),
            callbacks=callbacks,
        )
    trainer.train()
    libraries = LIBRARIES if case["trainer"] == "trl" else LIBRARIES[1:]
    versions = {name: importlib.metadata.version(name) for name in libraries}
    print(json.dumps({**recorder.figures(), "peak_bytes": meter.result().peak_bytes, "versions": versions}))


if __name__ == "__main__":
    main()
