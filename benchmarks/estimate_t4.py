"""LoRA and QLoRA steps that the package fitcheck-llm measured on a Tesla T4, each as a run to trace.

Its `scripts/measure.py` is the step: warm-up, then the peak of one step with batch and outputs alive until its end, no
clipping, PyTorch's default AdamW. A figure has three readings: what the step adds to the loaded model, allocated and
reserved memory. PyTorch counts blocks as allocated, which may be up to 1 MiB larger than their tensors.
"""

from collections.abc import Iterator, Mapping

from transformers import LlamaConfig, MistralConfig, PretrainedConfig, Qwen2Config

from benchmarks.estimate_facts import ALL_OF_LLAMA, Fact, T4Source, read_facts
from benchmarks.variants import Traced, Variant, replayed, trace_variant
from cuda_memory.units import MIB
from lean_finetune.memory.devices import resolve_gpu
from lean_finetune.memory.trace.cuda_kernels import target_of
from tests.kit.specs import train_of

ASSUMED = "the model loaded tensor by tensor without temporary copies"
WHY_OFF = (
    "blocks after loading in 4 bits depend on the order in which four threads load weights: the same model took 1070.1 "
    "to 1078.1 MiB in their runs, of which 1054.6 are tensors"
)


def t4_runs() -> list[dict[str, str]]:
    """The rows of the file."""
    return read_facts("t4_measured.csv")


def t4_figures(row: Mapping[str, str]) -> Iterator[tuple[Fact, int]]:
    """The readings of a run, each with its prediction."""
    found = replayed(trace_of(row))
    loaded, allocated, reserved = (
        round(float(row[key]) * MIB) for key in ("loaded_mib", "allocated_mib", "reserved_mib")
    )
    name = f"{row['model']} {row['quantization']} {row['batch']} × {row['seq_len']} {row['attention']}"
    run = f"{name}, {row['measured_on']}"
    readings: tuple[tuple[T4Source, int, int], ...] = (
        ("fitcheck on T4, step", allocated - loaded, found.allocated_bytes - found.loaded_bytes),
        ("fitcheck on T4, allocated", allocated, found.allocated_bytes),
        ("fitcheck on T4, reserved", reserved, found.reserved_bytes),
    )
    for source, measured, predicted in readings:
        yield Fact(source=source, run=run, figure_bytes=measured, assumed=ASSUMED, why_off=WHY_OFF), predicted


def trace_of(row: Mapping[str, str]) -> Traced:
    """Trace two steps of a run."""
    quantized = row["quantization"] == "nf4"
    rank, shape = int(row["lora_rank"]), (int(row["batch"]), int(row["seq_len"]))
    spec = train_of(
        "qlora" if quantized else "lora",
        "fp16",
        rank=rank,
        lora_alpha=2 * rank,
        lora_targets=ALL_OF_LLAMA[:4],
        quant_double=False,
    )
    variant = Variant(
        upcast=quantized,
        kept_outputs="step",
        clipped=False,
        foreach_update=True,
        eager_attention=row["attention"] == "eager",
    )
    return trace_variant(config_of(row), spec, variant, (shape, shape), target_of(resolve_gpu("T4")[0]))


def config_of(row: Mapping[str, str]) -> PretrainedConfig:
    """The model of a run, from its sizes."""
    family = {"Qwen": Qwen2Config, "mistralai": MistralConfig}.get(row["model"].split("/")[0], LlamaConfig)
    more = {"sliding_window": None} if family is MistralConfig else {}
    return family(
        hidden_size=int(row["hidden"]),
        intermediate_size=int(row["ffn"]),
        num_hidden_layers=int(row["layers"]),
        num_attention_heads=int(row["heads"]),
        num_key_value_heads=int(row["kv_heads"]),
        vocab_size=int(row["vocab"]),
        tie_word_embeddings=row["tied"] == "1",
        max_position_embeddings=32768,
        **more,
    )
