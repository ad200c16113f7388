"""The measured and published figures of benchmarks/facts, each as a run to trace, with its assumptions."""

import csv
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from transformers import LlamaConfig, PretrainedConfig

from benchmarks.gptq_step import trace_gptq
from benchmarks.variants import Traced, Variant, replayed, trace_variant
from cuda_memory.units import GIB
from lean_finetune.config.schema import Train
from lean_finetune.memory.devices import resolve_gpu
from lean_finetune.memory.predict.state_formulas import model_shapes
from lean_finetune.memory.trace.cuda_kernels import target_of
from tests.kit.specs import llama, train_of

FACTS = Path(__file__).parent / "facts"
GB = 10**9
ALL_OF_LLAMA = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
NORMS = ("norm",)

LLAMA_3_2_3B = llama(3072, 8192, layers=28, heads=24, kv_heads=8, head_dim=128, tied=True)

PEFT_ROWS, PEFT_SHORT_LENGTH = 4, 225
"""Rows of a batch; a common length of the questions, for the steps before and after the longest batch."""
PEFT_STATISTICS = {
    "reserved_avg": "accelerator_memory_reserved_avg",
    "reserved_99th": "accelerator_memory_reserved_99th",
    "reserved_max": "accelerator_memory_max",
}
PEFT_REFERENCE = "lora / llama-3.2-3B-rank32"
"""The run to which the unpublished batch length of each statistic is fitted."""
PEFT_WHY_OFF = (
    "the length of the step before is not published and decides where free blocks lie: between 100 and 330 tokens it "
    "moves reserved_max of the full run by 2.8 points and of the reference by 3.9; their ten sorted steps between two "
    "emptied caches, played with lengths made up for them, move rows by up to 5 points either way"
)
OWN_CODE = "Qwen's own modelling code is not traced; the source does not say what it counted"
ROUNDED = "rounded to whole GB by the source; the source does not say what it counted"
PEFT_VARIANT = Variant(padding_mask=True, kv_cache=True, kept_outputs="next_step", foreach_update=True)


T4Source = Literal["fitcheck on T4, step", "fitcheck on T4, allocated", "fitcheck on T4, reserved"]


@dataclass(frozen=True, kw_only=True)
class Fact:
    """A figure and its run."""

    source: Literal["PEFT on L40S", "PEFT on L40S, DoRA", "Qwen README", "LLaMA-Factory wiki", "OpenRLHF"] | T4Source
    run: str
    figure_bytes: int | None
    """None: it ran out of memory, according to the source."""
    assumed: str
    why_off: str = ""
    """The known reason for a difference."""


@dataclass(frozen=True, kw_only=True)
class TracedFact(Fact):
    """A figure that a trace can predict."""

    config: PretrainedConfig
    spec: Train
    variant: Variant
    gpu: str
    shapes: Sequence[tuple[int, int]]
    counts: Literal["reserved", "process"]
    emptied_after: tuple[int, ...] = ()

    def predicted_bytes(self) -> int:
        """Trace the run and return the predicted figure."""
        reserved = replayed(self.trace(), emptied_after=self.emptied_after).reserved_bytes
        return reserved + (resolve_gpu(self.gpu)[0].context.max_bytes if self.counts == "process" else 0)

    def trace(self) -> Traced:
        """Trace the run as the source's code does it."""
        return trace_variant(self.config, self.spec, self.variant, self.shapes, target_of(resolve_gpu(self.gpu)[0]))


def spec_of(method: str, rank: int, targets: tuple[str, ...], *, grad_ckpt: bool, dora: bool = False) -> Train:
    """A bf16 model, whose sizes fp16 shares."""
    more = {"lora_alpha": rank, "lora_targets": targets, "lora_dora": dora}
    return train_of(method, rank=rank, grad_ckpt=grad_ckpt, **more)  # type: ignore[arg-type]


def peft_runs() -> dict[str, Mapping[str, str]]:
    """The rows of the PEFT file by name of the run."""
    return {row["run"]: row for row in read_facts("peft_l40s_measured.csv")}


def peft_fact(row: Mapping[str, str], statistic: str, length: int) -> TracedFact:
    """A statistic of a PEFT run as the reserved memory after a batch of this length."""
    trained = NORMS if row["peft_type"] == "LN_TUNING" else None
    lora = row["peft_type"] == "LORA"
    targets = tuple(row["target_modules"].split("+")) if lora else ("none",)
    rank, dora = (int(row["r"]), row["use_dora"] == "True") if lora else (1, False)
    return TracedFact(
        source="PEFT on L40S, DoRA" if dora else "PEFT on L40S",
        run=f"{row['run']}: {statistic}",
        figure_bytes=int(row[PEFT_STATISTICS[statistic]]),
        assumed=f"longest batch 4 × {length} tokens, fitted on {PEFT_REFERENCE}; one step of 4 × {PEFT_SHORT_LENGTH} "
        "before and after it",
        why_off=PEFT_WHY_OFF,
        config=LLAMA_3_2_3B,
        spec=spec_of("lora" if lora else "full", rank, targets, grad_ckpt=False, dora=dora),
        variant=replace(PEFT_VARIANT, trained=trained),
        gpu="L40S",
        shapes=tuple((PEFT_ROWS, tokens) for tokens in (PEFT_SHORT_LENGTH, length, PEFT_SHORT_LENGTH)),
        counts="reserved",
        emptied_after=(0,),
    )


def fit_length(statistic: str, shortest: int = 128, longest: int = 768, close: float = 1e-3) -> int:
    """Find the batch length at which the reference run has a statistic, the one unknown of the PEFT figures."""
    reference = peft_runs()[PEFT_REFERENCE]
    wanted = int(reference[PEFT_STATISTICS[statistic]])
    low, high = ((tokens, peft_fact(reference, statistic, tokens).predicted_bytes()) for tokens in (shortest, longest))
    while high[0] - low[0] > 1:
        share = (wanted - low[1]) / (high[1] - low[1])
        length = min(max(round(low[0] + share * (high[0] - low[0])), low[0] + 1), high[0] - 1)
        found = peft_fact(reference, statistic, length).predicted_bytes()
        if abs(found - wanted) <= close * wanted:
            return length
        low, high = ((length, found), high) if found < wanted else (low, (length, found))
    return min(low, high, key=lambda pair: abs(pair[1] - wanted))[0]


@dataclass(frozen=True, kw_only=True)
class GptqFact(TracedFact):
    """A figure of a step on GPTQ weights."""

    def trace(self) -> Traced:
        """Trace the run as the source's code does it."""
        return trace_gptq(self.config, self.spec, self.shapes, target_of(resolve_gpu(self.gpu)[0]))


def published_facts() -> Iterator[TracedFact]:
    """The tables of READMEs and wikis, which give neither units nor what was counted."""
    for row in read_facts("published_memory.csv"):
        if row["id"].startswith("openrlhf"):
            continue
        qwen = row["model"].startswith("Qwen")
        gptq = "gptq" in row["method"]
        method = "qlora" if row["method"].startswith("qlora") else row["method"]
        shape = (int(row["micro_batch"]), int(row["seq_len"]))
        step = "finetune.py, AutoGPTQ, DeepSpeed's ZeRO 2; " if gptq else "AdamW fused; autocast; fp32 adapters; "
        yield (GptqFact if gptq else TracedFact)(
            source="Qwen README" if qwen else "LLaMA-Factory wiki",
            run=row["id"],
            figure_bytes=round(float(row["published"]) * GB),
            assumed="GB of 1e9; what nvidia-smi shows (reserved and a context of 525 MiB), the nearest of three "
            f"readings: tensors and reserved were tried too; {step}{row['note']}",
            why_off=OWN_CODE if qwen else ROUNDED,
            config=_published_config(row),
            spec=spec_of(method, int(row["lora_rank"]), ALL_OF_LLAMA, grad_ckpt=row["grad_ckpt"] == "yes"),
            variant=Variant(autocast=True),
            gpu="A100-80GB" if "80" in row["gpu"] else "A100-40GB",
            shapes=(shape, shape),
            counts="process",
        )


def openrlhf_facts() -> Iterator[tuple[Fact, int]]:
    """The phases of the OpenRLHF case, each with the result of the closed form."""
    rows = {row["id"]: row for row in read_facts("published_memory.csv") if row["id"].startswith("openrlhf")}
    values = model_shapes(_published_config(rows["openrlhf-step"])).values
    # bf16 weights and fp32 copies (6 bytes), bf16 gradients (2), fp32 moments (8): Rajbhandari 2020, arXiv 1910.02054.
    closed = (("openrlhf-prepared", 6), ("openrlhf-after-backward", 8), ("openrlhf-step", 16))
    for name, value_bytes in closed:
        published = rows[name]["published"]
        fact = Fact(
            source="OpenRLHF",
            run=name,
            figure_bytes=None if published == "OOM" else int(published) * GIB,
            assumed=f"GiB; closed form: {value_bytes} bytes per parameter; no activations, workspaces or context",
            why_off="the closed form has no activations and no unused blocks of the allocator",
        )
        yield fact, values * value_bytes


def _published_config(row: Mapping[str, str]) -> LlamaConfig:
    """A model of the row's sizes; Qwen's first generation is a Llama with biases at queries, keys and values."""
    return llama(
        int(row["hidden"]),
        int(row["ffn"]),
        layers=int(row["layers"]),
        heads=int(row["heads"]),
        kv_heads=int(row["kv_heads"]),
        vocabulary=int(row["vocab"]),
        tied=row["tied"] == "1",
        max_position_embeddings=32768,
        attention_bias=row["model"].startswith("Qwen"),
    )


def read_facts(name: str) -> list[dict[str, str]]:
    """The rows of a file of facts."""
    with (FACTS / name).open(newline="") as file:
        return list(csv.DictReader(file))
