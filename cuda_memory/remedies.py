"""What would need less memory, with the bytes that it saves: our parameter, and its name in other tools."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from cuda_memory.recorded_state import expands
from cuda_memory.recording import Recording
from cuda_memory.timeline import Category

TRAINER_AND_TRL, TRAINER, TRL = "Trainer and TRL", "Trainer", "TRL"
"""TRL's configurations derive from Hugging Face's TrainingArguments, and add adapters and quantised weights."""
AXOLOTL, LLAMA_FACTORY = "Axolotl", "LLaMA-Factory"


@dataclass(frozen=True, kw_only=True)
class CategoryRemedy:
    """A change that makes a category smaller."""

    ours: str
    effect: str
    elsewhere: Mapping[str, str]
    """The same in other tools; those that are missing have no such switch."""
    share: float = 1.0
    """Of its category: the most that it saves."""


GRAD_CKPT = CategoryRemedy(
    ours="train.grad_ckpt=true",
    effect="keeps one tensor a layer and computes the rest again in backward: about a third more time",
    elsewhere={
        TRAINER_AND_TRL: "gradient_checkpointing: true",
        AXOLOTL: "gradient_checkpointing: true",
        LLAMA_FACTORY: "disable_gradient_checkpointing: false",
    },
)
SMALLER_BATCH = CategoryRemedy(
    share=0.5,
    ours="half of bucket.max_tokens",
    effect="halves the micro-batch; with as many more of them, the step learns the same",
    elsewhere={
        TRAINER_AND_TRL: "halve per_device_train_batch_size, double gradient_accumulation_steps",
        AXOLOTL: "halve micro_batch_size, double gradient_accumulation_steps",
        LLAMA_FACTORY: "halve per_device_train_batch_size, double gradient_accumulation_steps",
    },
)
QLORA = CategoryRemedy(
    share=0.7,  # Of weights in 16 bits, to 4 bits with their scales; embeddings stay.
    ours="train.method=qlora",
    effect="stores frozen weights in 4 bits and trains adapters",
    elsewhere={
        TRAINER: "BitsAndBytesConfig(load_in_4bit=True) for from_pretrained, and peft's get_peft_model",
        TRL: "load_in_4bit: true, use_peft: true",
        AXOLOTL: "load_in_4bit: true, adapter: qlora",
        LLAMA_FACTORY: "quantization_bit: 4, finetuning_type: lora",
    },
)
REMEDIES: Mapping[Category, tuple[CategoryRemedy, ...]] = {
    "logits": (
        CategoryRemedy(
            ours="train.loss_chunk=512",
            effect="computes the loss in chunks, so that not all logits exist at once",
            elsewhere={
                TRAINER_AND_TRL: "use_liger_kernel: true",
                AXOLOTL: "cut_cross_entropy: true",
                LLAMA_FACTORY: "enable_liger_kernel: true",
            },
        ),
    ),
    "activations": (GRAD_CKPT, SMALLER_BATCH),
    "backward": (SMALLER_BATCH,),
    "optimizer": (
        CategoryRemedy(
            share=0.75,
            ours="train.optimizer=adamw_8bit",
            effect="stores the state in 8 bits, a quarter of fp32; train.offload=optimizer moves it to the host",
            elsewhere={
                TRAINER_AND_TRL: "optim: adamw_bnb_8bit",
                AXOLOTL: "optimizer: adamw_bnb_8bit",
                LLAMA_FACTORY: "optim: adamw_bnb_8bit",
            },
        ),
    ),
    "gradients": (
        CategoryRemedy(
            ours="train.method=lora",
            effect="only adapters have gradients and optimizer state",
            elsewhere={
                TRAINER: "peft's get_peft_model",
                TRL: "use_peft: true",
                AXOLOTL: "adapter: lora",
                LLAMA_FACTORY: "finetuning_type: lora",
            },
        ),
    ),
    "scores": (
        CategoryRemedy(
            ours="train.attention=sdpa",
            effect="computes attention in a fused kernel, without scores of length x length",
            elsewhere={
                TRAINER: 'from_pretrained(..., attn_implementation="sdpa")',
                TRL: "attn_implementation: sdpa",
                AXOLOTL: "attn_implementation: sdpa",
                LLAMA_FACTORY: "flash_attn: sdpa",
                "PyTorch": "torch.nn.functional.scaled_dot_product_attention",
            },
        ),
    ),
    "autocast": (
        CategoryRemedy(
            ours="train.precision=bf16 (all weights: with train.master_weights=true)",
            effect="stores the weights in 16 bits, so that autocast has none to copy; they themselves halve too",
            elsewhere={
                TRAINER: "from_pretrained(..., dtype=torch.bfloat16)",
                TRL: "dtype: bfloat16",
                AXOLOTL: "bf16: full",
                LLAMA_FACTORY: "pure_bf16: true",
                "PyTorch": "model.to(torch.bfloat16), with fp32 master weights in the optimizer",
            },
        ),
    ),
    "weights": (QLORA,),
    "earlier": (QLORA,),
}
EXPANDABLE = CategoryRemedy(
    ours="train.expandable_segments=true",
    effect="lets segments grow instead of reserving new ones; costs nothing",
    elsewhere={"any tool": "PYTORCH_ALLOC_CONF=expandable_segments:True in the environment"},
)
"""For reserved memory that no tensor uses."""


REMEDY_SHARE = 0.05
"""Categories below this share of the peak get no remedy."""
FRAGMENTED_SHARE = 0.1
"""Of reserved memory: unused memory above this share is worth a remedy where no replay tells."""
REPLAYED_SHARE = 0.01
"""Of reserved memory: what a replay saves above this share is worth telling, since it costs nothing."""
UNUSED = "reserved but unused"
CHECKPOINTED, QUANTIZED = "utils/checkpoint.py", "bitsandbytes/functional.py"
"""Files in stacks of runs with checkpointing, and with quantised weights."""


@dataclass(frozen=True, kw_only=True)
class Advice:
    """A remedy and what it saves."""

    parts: tuple[Category | str, ...]
    """Categories that it makes smaller."""
    remedy: CategoryRemedy
    saved_bytes: int
    basis: Literal["at most", "replayed"]
    """The remedy's share of these categories at the instant of interest | the difference of two replays."""


def advice_of(
    recording: Recording, by_category: Mapping[Category, int], allocated_bytes: int, reserved_bytes: int
) -> list[Advice]:
    """What would make the largest categories smaller, without what the stacks show to be in use."""
    in_use = _in_use(recording)
    saved, parts = Counter[str](), dict[str, list[Category]]()
    remedies: dict[str, CategoryRemedy] = {}
    for category, size in by_category.items():
        new = [each for each in REMEDIES.get(category, ()) if each.ours not in in_use]
        if new and size >= REMEDY_SHARE * allocated_bytes:
            remedy = new[0]
            remedies[remedy.ours] = remedy
            saved[remedy.ours] += int(remedy.share * size)
            parts.setdefault(remedy.ours, []).append(category)
    found = [
        Advice(parts=tuple(parts[ours]), remedy=remedies[ours], saved_bytes=size, basis="at most")
        for ours, size in saved.items()
    ]
    unused = reserved_bytes - allocated_bytes
    if unused > FRAGMENTED_SHARE * reserved_bytes and not expands(recording):
        found.append(Advice(parts=(UNUSED,), remedy=EXPANDABLE, saved_bytes=unused, basis="at most"))
    return ranked(found)


def replayed(advice: list[Advice], recording: Recording, baseline_bytes: int, expanding_bytes: int) -> list[Advice]:
    """The same, with what segments that expand save by replay: `baseline_bytes` are reserved without them."""
    others = [each for each in advice if each.remedy != EXPANDABLE]
    saved = baseline_bytes - expanding_bytes
    if expands(recording) or saved <= REPLAYED_SHARE * baseline_bytes:
        return others
    return ranked([*others, Advice(parts=(UNUSED,), remedy=EXPANDABLE, saved_bytes=saved, basis="replayed")])


def ranked(advice: list[Advice]) -> list[Advice]:
    """What saves most first."""
    return sorted(advice, key=lambda each: -each.saved_bytes)


def _in_use(recording: Recording) -> set[str]:
    """Remedies that the stacks show to be in use."""
    files = {frame.file for stack in recording.stacks for frame in stack}
    in_use = set()
    if any(file.endswith(CHECKPOINTED) for file in files):
        in_use.add(GRAD_CKPT.ours)
    if any(QUANTIZED in file for file in files):
        in_use.add(QLORA.ours)
    return in_use
