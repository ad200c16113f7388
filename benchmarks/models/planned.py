"""What `lean-finetune plan` writes for usual models and cards, for rows of one length."""

import json
import shlex

from click.testing import CliRunner

from benchmarks.harness import Row
from lean_finetune.commands.choose.plan import plan
from lean_finetune.config.load import COMMON_PARAMS
from lean_finetune.core.errors import UserError
from lean_finetune.pinning.locate import EXAMPLE_CONFIGS

LLAMA_8B = "meta-llama/Llama-3.1-8B"
CONFIGS = {
    "Qwen/Qwen2.5-0.5B": "qwen2.5-0.5b",
    "Qwen/Qwen2.5-1.5B": "qwen2.5-1.5b",
    LLAMA_8B: "llama-3.1-8b",
    "Qwen/Qwen2.5-14B": "qwen2.5-14b",
    "Qwen/Qwen2.5-32B": "qwen2.5-32b",
    "meta-llama/Llama-3.1-70B": "llama-3.1-70b",
}
"""Model → directory of its config.json in example_configs."""
IN_BACKWARD = "-S train.optimizer_in_backward=true -S train.max_grad_norm=null"
CASES = (
    "--model Qwen/Qwen2.5-0.5B --length 2048 --gpu 4GiB --method lora --precision fp16",
    "--model Qwen/Qwen2.5-1.5B --length 2048 --gpu RTX-4090 --method full",
    f"--model {LLAMA_8B} --length 2048 --gpu T4 --method qlora",
    f"--model {LLAMA_8B} --length 4096 --gpu RTX-4090 --method qlora",
    f"--model {LLAMA_8B} --length 2048 --gpu RTX-4090 --method qlora -S train.objective=dpo",
    f"--model {LLAMA_8B} --length 2048 --gpu RTX-4090 --method full --host-ram 119 {IN_BACKWARD}",
    f"--model {LLAMA_8B} --length 8192 --gpu A100-80GB --gpus 8 --method full",
    f"--model {LLAMA_8B} --length 131072 --gpu A100-80GB --method qlora",
    f"--model {LLAMA_8B} --length 1024 --gpu P4 --gpus 8 --method qlora",
    "--model Qwen/Qwen2.5-14B --length 4096 --gpu RTX-4090 --method qlora",
    "--model Qwen/Qwen2.5-32B --length 4096 --gpu A6000 --method qlora",
    "--model meta-llama/Llama-3.1-70B --length 2048 --gpu A6000 --method qlora",
)
"""Options of `plan`: model, rows, card and method."""


def planned_cases() -> tuple[str, ...]:
    """The options of each row."""
    return CASES


def planned(options: str) -> Row:
    """The answer to `lean-finetune plan` with these options: the best set in words, its peak, and what it may use.

    Raises:
        UserError: it ended with an error, or nothing fits.
    """
    words = [str(EXAMPLE_CONFIGS / CONFIGS[word]) if word in CONFIGS else word for word in shlex.split(options)]
    done = CliRunner().invoke(plan, [*words, "--params", str(COMMON_PARAMS), "--dry-run", "--json"])
    if done.exit_code:
        raise UserError(f"{options}: {done.stderr.strip()}")
    answer = json.loads(done.stdout)
    best = answer["sets"][0]
    return {
        "options": options,
        "set": best["words"],
        "peak_bytes": best["peak_bytes"],
        "usable_bytes": answer["usable_bytes"],
        "outside_bytes": {one["where"]: one["bytes"] for one in best["outside_of_the_device"]},
    }
