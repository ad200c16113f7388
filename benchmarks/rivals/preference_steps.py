"""TRL's trainers of preferences on the benchmark's token ids, step by step.

Run as `python preference_steps.py ROWS MODEL OUT CASE`. CASE is JSON: objective, the trainer's arguments, the steps,
and whether memory is measured. ROWS has one pair or labelled row in each line, in the order of training: prompt_ids,
chosen_ids and rejected_ids, or completion_ids, KL_completion_ids and label. The last line printed is JSON: for each
step its loss and seconds; the peak of PyTorch's allocator, where it was measured; and the versions of the libraries.
"""

import importlib.metadata
import json
import sys
import time
from contextlib import nullcontext
from typing import Any

import torch
from datasets import load_dataset
from torch.utils.data import SequentialSampler
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainerCallback

from lean_finetune.train.monitor.measured_peak import CpuMeter

LIBRARIES = ("trl", "transformers", "torch", "accelerate")


def trainer_of(objective):
    """The trainer, its arguments' class, and the arguments that choose the loss."""
    if objective in ("dpo", "ipo"):
        from trl import DPOConfig, DPOTrainer

        return DPOTrainer, DPOConfig, {"loss_type": ["ipo" if objective == "ipo" else "sigmoid"]}
    if objective == "kto":
        from trl import KTOConfig, KTOTrainer

        return KTOTrainer, KTOConfig, {}
    if objective == "orpo":
        from trl.experimental.orpo import ORPOConfig, ORPOTrainer

        return ORPOTrainer, ORPOConfig, {}
    from trl.experimental.cpo import CPOConfig, CPOTrainer

    loss = {"loss_type": "simpo", "simpo_gamma": 1.0, "cpo_alpha": 0.0} if objective == "simpo" else {}
    return CPOTrainer, CPOConfig, loss


class StepTimes(TrainerCallback):
    """Records when each step ended."""

    def __init__(self):
        self.ends = []

    def on_train_begin(self, args, state, control, **kwargs):
        """Start the clock."""
        self.ends.append(time.perf_counter())

    def on_step_end(self, args, state, control, **kwargs):
        """Record the end of the step."""
        self.ends.append(time.perf_counter())


def older_columns(row):
    """The columns of TRL's older trainers: whole rows with masks and labels."""
    found = {"prompt": "", "chosen": "", "rejected": "", "prompt_input_ids": row["prompt_ids"]}
    for side in ("chosen", "rejected"):
        ids = row["prompt_ids"] + row[f"{side}_ids"]
        found[f"{side}_input_ids"] = ids
        found[f"{side}_attention_mask"] = [1] * len(ids)
        found[f"{side}_labels"] = [-100] * len(row["prompt_ids"]) + row[f"{side}_ids"]
    return found


class GivenIds(Trainer):
    """A trainer without its tokenization and shuffling, which records its losses."""

    losses: list[float] = []

    def _prepare_dataset(self, dataset, *args, **kwargs):
        return dataset

    def tokenize_row(self, feature, model=None):
        """Columns to add to a row: none."""
        return {}

    def _get_train_sampler(self, *args, **kwargs):
        rows: Any = self.train_dataset
        return SequentialSampler(rows)

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        """The trainer's loss, recorded."""
        loss: Any = super().compute_loss(*args, **kwargs)
        self.losses.append(loss.item())
        return loss


def main() -> None:
    """Train and print."""
    rows, model_directory, out, case_text = sys.argv[1:]
    case = json.loads(case_text)
    torch.set_num_threads(case["threads"])
    trainer, config, chosen = trainer_of(case["objective"])
    times = StepTimes()
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
        "gradient_checkpointing": False,
        "seed": 17,
        **chosen,
        **case["arguments"],
    }
    data = load_dataset("json", data_files=rows, split="train", cache_dir=out)
    if case["objective"] in ("cpo", "simpo", "orpo"):
        data = data.map(older_columns, remove_columns=data.column_names)
    tokenizer = AutoTokenizer.from_pretrained(model_directory)
    meter = CpuMeter()
    with meter.window("the run") if case["measured"] else nullcontext():
        model = AutoModelForCausalLM.from_pretrained(model_directory, dtype=torch.float32)
        run = type("Recorded", (GivenIds, trainer), {})(
            model=model,
            args=config(**arguments),
            train_dataset=data,
            processing_class=tokenizer,
            callbacks=[times],
        )
        run.train()
    seconds = [end - start for start, end in zip(times.ends, times.ends[1:], strict=False)]
    peak = meter.result().peak_bytes if case["measured"] else None
    versions = {name: importlib.metadata.version(name) for name in LIBRARIES}
    print(json.dumps({"losses": GivenIds.losses, "seconds": seconds, "peak_bytes": peak, "versions": versions}))


if __name__ == "__main__":
    main()
