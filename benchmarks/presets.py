"""Write lean_finetune/presets/ by `lean-finetune plan`: `python -m benchmarks.presets [NAME …]`.

Each preset is a model on a card, with full rows of one length, and one of them with an image in each row. `tiny` is
written by hand: it is params.yaml as it comes.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
from transformers import PretrainedConfig

from cuda_memory.units import GIB
from lean_finetune.config.declared_params import dotted_values
from lean_finetune.config.field_types import Method
from lean_finetune.config.load import COMMON_PARAMS, load_params, with_flags
from lean_finetune.config.rules import SWITCHED_OFF
from lean_finetune.core.atomic_files import write_text
from lean_finetune.core.errors import DoesNotFit
from lean_finetune.core.read_yaml import parse_yaml
from lean_finetune.data.images.families import Size
from lean_finetune.memory.choice.choose import Chosen, choose
from lean_finetune.memory.devices import resolve_gpu
from lean_finetune.memory.predict.assumed_images import AssumedImages
from lean_finetune.model.images.image_config import with_images
from lean_finetune.model.model_config import read_config
from lean_finetune.pinning.locate import EXAMPLE_CONFIGS

DIRECTORY = Path(__file__).parents[1] / "lean_finetune/presets"
IN_BACKWARD = ("train.optimizer_in_backward=true", "train.max_grad_norm=null")
KEYS = (
    *("model.name", "data.max_length", "bucket.mode", "bucket.max_tokens", "hardware.gpu", "hardware.num_gpus"),
    *(
        "train.objective",
        "train.method",
        "train.precision",
        "train.master_weights",
        "train.grad_ckpt",
        "train.grad_ckpt_policy",
    ),
    *("train.offload_activations", "train.compress_activations", "train.sequence_tiles", "train.optimizer"),
    *("train.offload", "train.offload_to", "train.optimizer_in_backward", "train.sharding"),
    *("train.context_parallel", "train.tensor_parallel", "train.pipeline_stages"),
    *("train.lr", "train.tokens_per_step", "train.max_grad_norm", "train.loss_chunk"),
)
"""Keys of a preset, in their order."""
OMITTED = ("train.grad_ckpt_policy", "train.context_parallel", "train.tensor_parallel", "train.pipeline_stages")
"""Keys that a preset leaves out where they are off."""


@dataclass(frozen=True, kw_only=True)
class Preset:
    """What a preset is for."""

    title: str
    """The start of its first line, which ends with the GPUs."""
    model: str
    """Hub id, of CONFIGS."""
    gpu: str
    method: Method
    length: int
    tokens_per_step: int = 16_384
    gpus: int = 1
    others: tuple[str, ...] = ()
    """Other GPUs that it fits."""
    image: Size | None = None
    """Pixels of an image in every row."""
    sets: tuple[str, ...] = ()
    """More parameters that it fixes."""

    @property
    def first_line(self) -> str:
        """What it is for."""
        gpus = f" ({', '.join((self.gpu, *self.others))})" if self.others else ""
        return f"# {self.title}{gpus}."

    def images(self) -> AssumedImages | None:
        """The image of every row, as `fit --image` assumes it."""
        if self.image is None:
            return None
        directory = EXAMPLE_CONFIGS / CONFIGS[self.model]
        return AssumedImages(size=self.image, count=1, directory=directory, beside_text=False)

    def config(self) -> PretrainedConfig:
        """The config of its model, with the parts for images if rows have any."""
        config = read_config(EXAMPLE_CONFIGS / CONFIGS[self.model])
        return config if self.image is None else with_images(config)


LLAMA_8B = "meta-llama/Llama-3.1-8B"
CONFIGS = {
    "Qwen/Qwen2.5-0.5B": "qwen2.5-0.5b",
    "Qwen/Qwen2.5-1.5B": "qwen2.5-1.5b",
    LLAMA_8B: "llama-3.1-8b",
    "Qwen/Qwen2.5-VL-7B-Instruct": "qwen2.5-vl-7b",
    "Qwen/Qwen2.5-14B": "qwen2.5-14b",
    "Qwen/Qwen2.5-32B": "qwen2.5-32b",
    "meta-llama/Llama-3.1-70B": "llama-3.1-70b",
}
"""Model → directory of its config.json in example_configs."""
PRESETS = {
    "0.5b-lora-4gb": Preset(
        title="0.5B, LoRA in fp16, rows of 2048 tokens, a GPU of 4 GB",
        model="Qwen/Qwen2.5-0.5B",
        gpu="4GiB",
        method="lora",
        length=2048,
        tokens_per_step=8192,
        sets=("train.precision=fp16",),
    ),
    "1.5b-full-24gb": Preset(
        title="1.5B, all weights with fp32 master weights, 2048 tokens, one GPU of 24 GB; optimizer on the host",
        model="Qwen/Qwen2.5-1.5B",
        gpu="RTX-4090",
        method="full",
        length=2048,
    ),
    "8b-qlora-t4": Preset(
        title="8B, QLoRA in fp16, rows of 2048 tokens, a T4 (it has no bf16)",
        model=LLAMA_8B,
        gpu="T4",
        method="qlora",
        length=2048,
    ),
    "8b-qlora-24gb": Preset(
        title="8B, QLoRA, rows of 4096 tokens, one GPU of 24 GB",
        model=LLAMA_8B,
        gpu="RTX-4090",
        others=("RTX-3090", "L4", "A10"),
        method="qlora",
        length=4096,
    ),
    "8b-dpo-qlora-24gb": Preset(
        title="8B, DPO of pairs with QLoRA, rows of 2048 tokens, one GPU of 24 GB",
        model=LLAMA_8B,
        gpu="RTX-4090",
        others=("RTX-3090", "L4", "A10"),
        method="qlora",
        length=2048,
        tokens_per_step=32_768,
        sets=("train.objective=dpo",),
    ),
    "8b-full-24gb": Preset(
        title="8B, all weights, rows of 2048 tokens, one GPU of 24 GB and 128 GB of RAM; updated in backward",
        model=LLAMA_8B,
        gpu="RTX-4090",
        method="full",
        length=2048,
        tokens_per_step=2048,
        sets=(*IN_BACKWARD, "hardware.host_ram_gib=119"),
    ),
    "8b-full-8x80gb": Preset(
        title="8B, all weights with fp32 master weights, rows of 8192 tokens, eight GPUs of 80 GB",
        model=LLAMA_8B,
        gpu="A100-80GB",
        others=("H100",),
        gpus=8,
        method="full",
        length=8192,
        tokens_per_step=131_072,
    ),
    "8b-long-context-80gb": Preset(
        title="8B, QLoRA, rows of 131072 tokens, one GPU of 80 GB",
        model=LLAMA_8B,
        gpu="A100-80GB",
        method="qlora",
        length=131_072,
        tokens_per_step=262_144,
    ),
    "8b-qlora-8xp4": Preset(
        title="8B, QLoRA in fp16, rows of 1024 tokens, eight P4 of 8 GB (no bf16); four share each row's matmuls",
        model=LLAMA_8B,
        gpu="P4",
        gpus=8,
        method="qlora",
        length=1024,
    ),
    "7b-vl-qlora-24gb": Preset(
        title="7B, QLoRA with the vision tower frozen, rows of 4096 tokens with an image of 1280 x 960, a GPU of 24 GB",
        model="Qwen/Qwen2.5-VL-7B-Instruct",
        gpu="RTX-4090",
        others=("RTX-3090", "L4", "A10"),
        method="qlora",
        length=4096,
        image=Size(height=960, width=1280),
    ),
    "14b-qlora-24gb": Preset(
        title="14B, QLoRA, rows of 4096 tokens, one GPU of 24 GB",
        model="Qwen/Qwen2.5-14B",
        gpu="RTX-4090",
        others=("RTX-3090",),
        method="qlora",
        length=4096,
    ),
    "32b-qlora-48gb": Preset(
        title="32B, QLoRA, rows of 4096 tokens, one GPU of 48 GB",
        model="Qwen/Qwen2.5-32B",
        gpu="A6000",
        others=("RTX-6000-Ada", "L40S"),
        method="qlora",
        length=4096,
    ),
    "70b-qlora-48gb": Preset(
        title="70B, QLoRA, rows of 2048 tokens, one GPU of 48 GB; activations between layers on the host",
        model="meta-llama/Llama-3.1-70B",
        gpu="A6000",
        others=("RTX-6000-Ada",),
        method="qlora",
        length=2048,
    ),
}


def plan_preset(name: str) -> Chosen:
    """What `lean-finetune plan` answers for a preset.

    Raises:
        DoesNotFit: nothing fits.
    """
    one = PRESETS[name]
    sharding = "none" if one.gpus == 1 else "ddp"
    flags = [
        f"model.name={EXAMPLE_CONFIGS / CONFIGS[one.model]}",
        f"hardware.gpu={one.gpu}",
        f"hardware.num_gpus={one.gpus}",
    ]
    flags += [f"train.sharding={sharding}", f"data.max_length={one.length}", f"bucket.max_tokens={one.length}"]
    flags += [f"train.tokens_per_step={one.tokens_per_step}", "run.progress=false", *one.sets]
    p = with_flags(load_params(COMMON_PARAMS), flags, check=False)
    fixed = {text.partition("=")[0] for text in one.sets}
    device, _ = resolve_gpu(one.gpu)
    chosen = choose(p, one.config(), device, (one.method,), fixed, None, most=1, images=one.images())
    if not chosen.choices:
        raise DoesNotFit(f"{name}: nothing fits {one.gpu}")
    return chosen


def preset_text(name: str, chosen: Chosen) -> str:
    """The file of a preset."""
    one, values = PRESETS[name], dotted_values(chosen.start.run.params)
    found: dict[str, Any] = {key: values[key] for key in KEYS}
    found |= {key: parse_yaml(text) for key, text in chosen.choices[0].flags.items() if key in KEYS}
    found = {key: value for key, value in found.items() if key not in OMITTED or value != SWITCHED_OFF[key]}
    found["model.name"] = one.model
    lines, last = [one.first_line], ""
    for key, value in found.items():
        section, _, name = key.partition(".")
        if section != last:
            lines.append(f"{section}:")
        last = section
        text = "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
        lines.append(f"  {name}: {text}")
    return "\n".join(lines) + "\n"


@click.command()
@click.argument("names", nargs=-1, type=click.Choice(list(PRESETS)))
def main(names: Sequence[str]) -> None:
    """Write the presets, and print peak, time and CPU seconds of each."""
    for name in names or PRESETS:
        start = time.process_time()
        chosen = plan_preset(name)
        best = chosen.choices[0]
        write_text(DIRECTORY / f"{name}.yaml", preset_text(name, chosen))
        seconds = time.process_time() - start
        peak, usable = best.prediction.peak.bytes / GIB, best.run.usable_bytes / GIB
        click.echo(f"{name:<22}{peak:8.2f} of {usable:6.2f} GiB  {seconds:5.1f} s of CPU  {best.candidate.effect_text}")


if __name__ == "__main__":
    main()
