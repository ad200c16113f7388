"""Time Unsloth's step over micro-batches of the same shape as ours, on weights of the same sizes.

Run as `python -m benchmarks.gpu.unsloth_steps CASE DEVICE`, where Unsloth is installed. It loads models from files
alone, so a process writes random weights first. The last line printed is JSON: tokens per second, the seconds of each
step and the peaks.
"""

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

MEMORY = Path("/dev/shm")
"""Files here are in host memory: 16 GB are read in seconds."""
NAMES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def write(name: str, directory: Path) -> None:
    """Write the model of a case, with random weights, and a tokenizer of two words."""
    import torch
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    from benchmarks.gpu.cases import SPEED_CASES
    from tests.kit.random_model import base_model
    from tests.kit.specs import changed

    case = next(case for case in SPEED_CASES if case.name == name)
    spec = changed(case.setting.train, method="lora")  # Unsloth quantises while it loads.
    base_model(case.config, spec, torch.device("cuda")).save_pretrained(directory)
    words = Tokenizer(WordLevel({"<pad>": 0, "<eos>": 1}, unk_token="<pad>"))
    PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>").save_pretrained(directory)


def main() -> None:
    """Train and print."""
    name, _ = sys.argv[1:3]
    with tempfile.TemporaryDirectory(dir=MEMORY if MEMORY.is_dir() else None) as directory:
        subprocess.run([sys.executable, "-m", __spec__.name, name, "--write", directory], check=True)
        import unsloth  # Before transformers, whose code it replaces.

        print(json.dumps({"unsloth": unsloth.__version__, **timed(name, directory)}))


def timed(name: str, directory: str) -> dict[str, Any]:
    """Load the model, and time steps as TRL's trainer runs them: autocast, clipping, update."""
    import torch
    from unsloth import FastLanguageModel

    from benchmarks.gpu.cases import SPEED_CASES
    from benchmarks.gpu.speed import TIMED_STEPS, WARM_UP_STEPS
    from tests.kit.specs import LR

    case = next(case for case in SPEED_CASES if case.name == name)
    spec = case.setting.train
    model, _ = FastLanguageModel.from_pretrained(
        directory,
        max_seq_length=case.length,
        dtype=torch.bfloat16,
        load_in_4bit=spec.method == "qlora",
        local_files_only=True,
    )
    model = FastLanguageModel.get_peft_model(
        model,
        r=spec.lora.rank,
        lora_alpha=spec.lora.alpha,
        lora_dropout=0,
        bias="none",
        target_modules=list(NAMES),
        use_gradient_checkpointing="unsloth" if case.grad_ckpt else False,
        random_state=1,
    )
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer: Any
    if case.optimizer == "adamw":
        optimizer = torch.optim.AdamW(trained, lr=LR, weight_decay=0.0, fused=True)
    else:
        import bitsandbytes as bnb

        optimizer = bnb.optim.AdamW8bit(trained, lr=LR, weight_decay=0.0)
    model.train()
    ids = torch.randint(case.config.get_text_config().vocab_size, (case.rows, case.length), device="cuda")
    torch.cuda.reset_peak_memory_stats()
    seconds = []
    for _ in range(WARM_UP_STEPS + TIMED_STEPS):
        torch.cuda.synchronize()
        start = time.perf_counter()
        with torch.autocast("cuda", torch.bfloat16):
            loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        loss.item()
        torch.cuda.synchronize()
        seconds.append(round(time.perf_counter() - start, 4))
    return {
        "tokens_per_s": round(case.rows * case.length / median(seconds[WARM_UP_STEPS:]), 1),
        "seconds": seconds[WARM_UP_STEPS:],
        "allocated_bytes": torch.cuda.max_memory_allocated(),
        "reserved_bytes": torch.cuda.max_memory_reserved(),
    }


if __name__ == "__main__":
    if sys.argv[2:3] == ["--write"]:
        write(sys.argv[1], Path(sys.argv[3]))
    else:
        main()
