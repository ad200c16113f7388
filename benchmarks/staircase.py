"""The staircase: memory reserved step by step, by the order of the batches: `python -m benchmarks.staircase`.

A run of batches of two rows whose lengths vary is traced in a few shapes, stretched to every shape and replayed through
the allocator, in four orders and with either kind of segments. Nothing is measured: the figures follow from the rules.
"""

import random
from pathlib import Path

import click
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from transformers import LlamaConfig

from lean_finetune.core.units import GIB
from lean_finetune.memory.allocator.replay import Replay, replay
from lean_finetune.memory.allocator.step_units import step_units
from lean_finetune.memory.allocator.templates import RunModel
from lean_finetune.memory.allocator.traced_runs import fit_run, kind_of
from lean_finetune.memory.devices import resolve_gpu
from lean_finetune.memory.predict.peak import Setting
from lean_finetune.memory.trace.cuda_kernels import target_of
from lean_finetune.model.model_spec import ModelSpec
from lean_finetune.step.batches import BatchShape

GPU = "A100-80GB"
CONFIG = LlamaConfig(
    hidden_size=2048,
    intermediate_size=8192,
    num_hidden_layers=4,
    num_attention_heads=32,
    num_key_value_heads=8,
    vocab_size=128256,
    tie_word_embeddings=True,
)
"""Llama-3.2-1B with 4 of its 16 layers."""
SETTING = Setting(
    model=ModelSpec(
        method="qlora",
        precision="bf16",
        grad_ckpt=True,
        lora_rank=16,
        lora_alpha=32,
        lora_dropout=0.0,
        lora_targets=("all-linear",),
        seed=1,
    ),
    optimizer="adamw_8bit",
    loss_chunk=None,
    max_grad_norm=1.0,
)
STEPS, SHORTEST, LONGEST, ROWS, MULTIPLE, SEED = 60, 64, 1024, 2, 8, 5


def fitted() -> RunModel:
    """The events of any run of the setting."""
    return fit_run(CONFIG, SETTING, target_of(resolve_gpu(GPU)[0]), (), [_batch(ROWS, LONGEST)])


def _batch(rows: int, length: int) -> BatchShape:
    """A micro-batch whose tokens are all trained."""
    return BatchShape(rows=rows, length=length, supervised=rows * length, joined_lengths=None)


def orders() -> dict[str, list[BatchShape]]:
    """One micro-batch a step, in every order, and the same rows within a budget of tokens, largest first."""
    chance = random.Random(SEED)
    lengths = [chance.randrange(SHORTEST, LONGEST + 1, MULTIPLE) for _ in range(STEPS - 1)] + [LONGEST]
    batches = [_batch(ROWS, length) for length in sorted(lengths)]
    shuffled = chance.sample(batches, len(batches))
    planned = [_batch(ROWS * LONGEST // batch.length, batch.length) for batch in shuffled]
    planned.sort(key=lambda batch: batch.length != LONGEST)
    return {"ascending": batches, "random": shuffled, "descending": batches[::-1], "planned": planned}


def staircase(model: RunModel) -> dict[tuple[str, str], Replay]:
    """The replay of each order with each kind of segments."""
    return {
        (order, kind): replay(
            model,
            [step_units([batch], kind_of(SETTING)) for batch in batches],
            expandable=kind == "expandable",
            capacity_bytes=None,
        )
        for order, batches in orders().items()
        for kind in ("native", "expandable")
    }


def draw(found: dict[tuple[str, str], Replay], path: Path) -> None:
    """Reserved bytes by step, a panel for each kind of segments; dots are what tensors held at most."""
    figure = Figure(figsize=(9.0, 3.8), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, 2, sharey=True)
    for axes, kind in zip(panels, ("native", "expandable"), strict=True):
        for number, order in enumerate(orders()):
            steps = found[order, kind].steps
            reserved = [step.reserved_peak_bytes / GIB for step in steps]
            axes.plot(reserved, label=order, color=f"C{number}", drawstyle="steps-post", lw=1.8)
        steps = found["ascending", kind].steps
        held = [step.allocated_peak_bytes / GIB for step in steps]
        axes.plot(held, ":", color="black", lw=1.0, label="tensors, ascending")
        axes.set(title=f"{kind} segments", xlabel="optimizer step", ylim=(0, None))
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("reserved, GiB")
    panels[1].legend(frameon=False, fontsize="small")
    figure.savefig(path, metadata={"Software": None})


@click.command()
@click.option("--out", type=click.Path(path_type=Path), default="docs/images/staircase.png", show_default=True)
def main(out: Path) -> None:
    """Replay every order, print what each reserves in the end, and draw it."""
    found = staircase(fitted())
    click.echo(f"{'order':<12}{'segments':<12}{'tensors':>9}{'reserved':>10}  GiB")
    for (order, kind), run in found.items():
        tensors = max(step.allocated_peak_bytes for step in run.steps) / GIB
        reserved = max(step.reserved_peak_bytes for step in run.steps) / GIB
        click.echo(f"{order:<12}{kind:<12}{tensors:>9.2f}{reserved:>10.2f}")
    draw(found, out)


if __name__ == "__main__":
    main()
