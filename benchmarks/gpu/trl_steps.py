"""Time TRL's SFTTrainer step by step over micro-batches of the same shape as ours.

Run as `python -m benchmarks.gpu.trl_steps CASE DEVICE`, where TRL is installed. The last line printed is JSON: tokens
per second, the seconds of each step and the peaks.
"""

import json
import sys
import tempfile
import time
from statistics import median
from typing import Any

import torch
import trl
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast, TrainerCallback
from trl import SFTConfig, SFTTrainer

from benchmarks.gpu.cases import SMALL_SPEED_CASES, SPEED_CASES, SpeedCase
from benchmarks.gpu.speed import TIMED_STEPS, WARM_UP_STEPS
from lean_finetune.config.field_types import OptimizerName
from tests.kit.random_model import base_model

OPTIMIZERS: dict[OptimizerName, str] = {
    "adamw": "adamw_torch_fused",
    "adamw_8bit": "adamw_bnb_8bit",
    "paged_adamw_8bit": "paged_adamw_8bit",
}
"""transformers' names of our optimizers."""


class StepClock(TrainerCallback):
    """Records when training began and when each step ended."""

    def __init__(self, device: torch.device) -> None:
        self._device, self.times = device, list[float]()

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Start the clock; loading does not count."""
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
        self._note()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Close a step."""
        self._note()

    def _note(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self.times.append(time.perf_counter())


def arguments(case: SpeedCase, device: torch.device, steps: int, out: str) -> SFTConfig:
    """The settings of a case as TRL's arguments."""
    return SFTConfig(
        output_dir=out,
        max_steps=steps,
        per_device_train_batch_size=case.rows,
        gradient_accumulation_steps=1,
        max_length=case.length,
        gradient_checkpointing=case.grad_ckpt,
        activation_offloading=case.offload and device.type == "cuda",
        optim=OPTIMIZERS[case.optimizer],
        learning_rate=1e-5,
        lr_scheduler_type="constant",
        max_grad_norm=1.0,
        bf16=True,
        use_cpu=device.type == "cpu",
        logging_strategy="no",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )


def main() -> None:
    """Train and print."""
    name, device_name = sys.argv[1:]
    steps = WARM_UP_STEPS + TIMED_STEPS
    device = torch.device(device_name)
    case = next(case for case in (*SPEED_CASES, *SMALL_SPEED_CASES) if case.name == name)
    model: Any = base_model(case.config, case.setting.train, device)
    model.config.use_cache = False
    vocabulary = case.config.get_text_config().vocab_size
    ids = torch.randint(vocabulary, (case.rows * steps, case.length)).tolist()
    # TRL needs a tokenizer even for rows of token ids.
    words = WordLevel({"<pad>": 0, "<eos>": 1}, unk_token="<pad>")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(words), pad_token="<pad>", eos_token="<eos>")
    spec = case.setting.train
    adapters = LoraConfig(
        r=spec.lora.rank, lora_alpha=spec.lora.alpha, target_modules="all-linear", task_type="CAUSAL_LM"
    )
    clock = StepClock(device)
    with tempfile.TemporaryDirectory() as out:
        trainer = SFTTrainer(
            model=model,
            args=arguments(case, device, steps, out),
            train_dataset=Dataset.from_dict({"input_ids": ids}),
            processing_class=tokenizer,
            peft_config=adapters if spec.adapted else None,
            callbacks=[clock],
        )
        trainer.train()
    seconds = [end - start for start, end in zip(clock.times, clock.times[1:], strict=False)][WARM_UP_STEPS:]
    cuda = device.type == "cuda"
    peaks = {
        "allocated_bytes": torch.cuda.max_memory_allocated(device) if cuda else None,
        "reserved_bytes": torch.cuda.max_memory_reserved(device) if cuda else None,
    }
    tokens_per_s = round(case.rows * case.length / median(seconds), 1)
    print(json.dumps({"trl": trl.__version__, "tokens_per_s": tokens_per_s, "seconds": seconds, **peaks}))


if __name__ == "__main__":
    main()
