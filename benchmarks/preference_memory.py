"""Predicted peaks of DPO: of this pipeline's step, and of the steps of TRL and LLaMA-Factory by the same tracer.

Every step trains full rows of 2 x 2,048 tokens on an A100 of 80 GB, with checkpointing. TRL up to 1.10 holds the logits
of the model and of the reference; 1.16 computes them in tiles.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from transformers import PretrainedConfig, Qwen3Config

from benchmarks.harness import Measured, at_most, benchmark
from lean_finetune.config.field_types import Method
from lean_finetune.config.load import COMMON_PARAMS, load_params, with_flags
from lean_finetune.memory.advice.full_rows import full_rows_run
from lean_finetune.memory.advice.run import Run
from lean_finetune.memory.devices import resolve_gpu
from lean_finetune.memory.tool_step.tool_step import Loss, ToolStep
from lean_finetune.memory.tool_step.tools import step_of
from lean_finetune.memory.tool_step.trace_tool import ToolRun, predict_tool
from lean_finetune.model.model_config import read_config
from lean_finetune.pinning.locate import EXAMPLE_CONFIGS

GPU = "A100-80GB"
LENGTH = 2048
PAIRS = (1, 2)
SHARE = 1.05
"""Most of our peak divided by that of TRL 1.16's step: our adapters are fp32 in QLoRA, and TRL's are bf16."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model and how it is trained."""

    name: str
    config: PretrainedConfig
    method: Method


def qwen3_4b() -> PretrainedConfig:
    """The sizes of Qwen3-4B."""
    return Qwen3Config(
        hidden_size=2560,
        intermediate_size=9728,
        num_hidden_layers=36,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        vocab_size=151_936,
        tie_word_embeddings=True,
    )


def cases() -> Iterator[Case]:
    """A small model with a large vocabulary, and the models of reports that ran out of memory."""
    small, large = (read_config(EXAMPLE_CONFIGS / name) for name in ("qwen2.5-0.5b", "llama-3.1-8b"))
    yield Case(name="Qwen2.5-0.5B", config=small, method="full")
    yield Case(name="Qwen3-4B", config=qwen3_4b(), method="lora")
    yield Case(name="Llama-3.1-8B", config=large, method="lora")
    yield Case(name="Llama-3.1-8B", config=large, method="qlora")


def run_of(case: Case, pairs: int) -> Run:
    """Our run."""
    tokens = 2 * pairs * LENGTH
    flags = [f"train.method={case.method}", "train.objective=dpo", "train.precision=bf16", "train.grad_ckpt=true"]
    flags += [f"data.max_length={LENGTH}", f"bucket.max_tokens={tokens}", f"train.tokens_per_step={4 * tokens}"]
    flags += ["train.lora.rank=8", "run.progress=false"]
    return full_rows_run(with_flags(load_params(COMMON_PARAMS), flags), case.config, resolve_gpu(GPU)[0])


def steps(run: Run) -> Iterator[tuple[str, ToolStep]]:
    """The steps of other tools, in 16 bits with mixed precision as their examples have it."""
    keys = {"bf16": True, "dtype": "bfloat16"}
    trl, factory = (step_of(tool, keys, run.setting.train) for tool in ("TRL", "LLaMA-Factory"))
    assert trl is not None and factory is not None
    by_rows: Loss = "pairs_by_rows"
    yield "TRL 1.16", trl
    yield "TRL 1.10", replace(trl, loss=by_rows)
    yield "LLaMA-Factory", factory


def measure(quick: bool) -> Measured:
    """Trace every step."""
    rows: list[dict[str, Any]] = []
    for case in [*cases()][:1] if quick else cases():
        for pairs in PAIRS[:1] if quick else PAIRS:
            run = run_of(case, pairs)
            found: dict[str, Any] = {"model": case.name, "method": case.method, "pairs": pairs}
            found["ours_bytes"] = run.predict().peak.bytes
            for name, step in steps(run):
                traced = ToolRun(
                    step=step,
                    config=case.config,
                    train=run.setting.train,
                    target=run.target,
                    rows=2 * pairs,
                    length=LENGTH,
                    micro_batches=2,
                )
                peaks = {phase: peak.bytes for phase, peak in predict_tool(traced).items() if phase != "inputs"}
                found[f"{name}_bytes"] = max(peaks.values())
            rows.append(found)
    shares = [row["ours_bytes"] / row["TRL 1.16_bytes"] for row in rows]
    return Measured(rows=rows, bars=[at_most("our peak / that of TRL 1.16's step, at most", max(shares), SHARE)])


main = benchmark("preference_memory", measure)

if __name__ == "__main__":
    main()
