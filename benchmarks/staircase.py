"""Reserved memory step by step, by the order of the batches: `python -m benchmarks.staircase`.

Fifteen batches of two rows each are traced in three orders, and the same rows as a plan by tokens with the largest
batch first. The traces are played to the caching allocator with either kind of segments. Nothing is measured: the
figures follow from the allocator's rules. The model is small (two layers of Llama 3.1 8B) so that this takes a minute.
"""

import random
from pathlib import Path

import click
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from cuda_memory.units import GIB
from lean_finetune.memory.advice.plan_memory import ALLOCATORS, Replay, replay
from lean_finetune.memory.devices import resolve_gpu
from lean_finetune.memory.predict.deep_events import step_events
from lean_finetune.memory.predict.traced_step import TracedModel
from lean_finetune.memory.trace.cuda_kernels import target_of
from lean_finetune.memory.trace.setting import Setting
from lean_finetune.step.batches import BatchShape
from tests.kit.specs import changed, llama, padded, train_of

GPU = "A100-80GB"
CONFIG = llama(4096, 14336, layers=2, heads=32, kv_heads=8)
SETTING = Setting(
    train=changed(train_of("lora", grad_ckpt=False), optimizer="adamw", loss_chunk=None, max_grad_norm=1.0)
)
LENGTHS = tuple(range(192, 1537, 96))
"""Padded lengths in tokens of the batches."""
ROWS = 2
TOKEN_BUDGET = 3072
Step = tuple[BatchShape]


def _step(rows: int, length: int) -> Step:
    """Return an optimizer step of one micro-batch, half of whose tokens are trained."""
    return (padded(rows, length, rows * length // 2),)


def orders() -> dict[str, tuple[Step, ...]]:
    """Return the steps in every order."""
    ascending = [_step(ROWS, length) for length in LENGTHS]
    planned = [_step(TOKEN_BUDGET // length, length) for length in LENGTHS]
    return {
        "ascending": tuple(ascending),
        "random": tuple(random.Random(0).sample(ascending, len(ascending))),
        "descending": tuple(ascending[::-1]),
        "planned": (planned[-1], *random.Random(1).sample(planned[:-1], len(planned) - 1)),
    }


def staircase() -> dict[tuple[str, str], Replay]:
    """Trace every order, and replay it with either kind of segments."""
    target = target_of(resolve_gpu(GPU)[0])
    found = {}
    for order, steps in orders().items():
        events, _ = step_events(TracedModel(CONFIG, SETTING, target), steps)
        for kind, expandable in ALLOCATORS.items():
            found[order, kind] = replay(events, steps, expandable=expandable, capacity_bytes=None)
    return found


def draw(found: dict[tuple[str, str], Replay], path: Path) -> None:
    """Draw reserved bytes by step, a panel for each kind of segments; the dotted line is the peak of tensors."""
    figure = Figure(figsize=(9.0, 3.8), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, 2, sharey=True)
    for axes, kind in zip(panels, ALLOCATORS, strict=True):
        for number, order in enumerate(orders()):
            reserved = [step.reserved_peak_bytes / GIB for step in found[order, kind].steps]
            axes.plot(reserved, label=order, color=f"C{number}", drawstyle="steps-post", lw=1.8)
        tensors = [step.allocated_peak_bytes / GIB for step in found["ascending", kind].steps]
        axes.plot(tensors, ":", color="black", lw=1.0, label="tensors, ascending")
        axes.set(title=f"{kind} segments", xlabel="optimizer step", ylim=(0, None))
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("reserved, GiB")
    panels[1].legend(frameon=False, fontsize="small")
    figure.savefig(path, metadata={"Software": None})


@click.command()
@click.option("--out", type=click.Path(path_type=Path), default="docs/images/staircase.png", show_default=True)
def main(out: Path) -> None:
    """Replay every order, print the peak of what each reserves, and draw it."""
    found = staircase()
    click.echo(f"{'order':<12}{'segments':<12}{'tensors':>9}{'reserved':>10}  GiB")
    for (order, kind), run in found.items():
        tensors = max(step.allocated_peak_bytes for step in run.steps) / GIB
        click.echo(f"{order:<12}{kind:<12}{tensors:>9.2f}{run.reserved_peak_bytes / GIB:>10.2f}")
    draw(found, out)


if __name__ == "__main__":
    main()
