"""What a prediction says about a run besides its figures: what is left out, and what is not traced."""

from lean_finetune.memory.advice.run import Run
from lean_finetune.model import fused_kernels
from lean_finetune.model.adapters import layers_without_adapters
from lean_finetune.model.allocator_settings import environment_notes
from lean_finetune.model.empty_model import left_out_text, meta_model
from lean_finetune.model.joined_adapters.join import apart_note

CPU_KERNELS = (
    "on a CPU in 16 bits the process takes up to 1 GiB for kernels of new batch shapes, beside the predicted tensors "
    "(docs/out-of-memory.md)"
)


def not_loaded(run: Run) -> str | None:
    """Parts of a multimodal model that are neither loaded nor counted; None without any."""
    return left_out_text(meta_model(run.config))


def notes_of(run: Run) -> list[str]:
    """Settings of the environment that differ from those predicted, kernels that are not traced, code of peft."""
    train = run.params.train
    kernels = CPU_KERNELS if run.device.kind == "cpu" and run.setting.train.precision != "fp32" else None
    notes = environment_notes(train.expandable_segments) if run.device.kind == "cuda" else ()
    return [*notes, *filter(None, [kernels, fused_kernels.memory_note(train.fused_kernels), apart_note(train)])]


def layers_note(run: Run) -> str | None:
    """Layers that `all-linear` leaves out; None without any."""
    names = layers_without_adapters(meta_model(run.config), run.setting.train)
    left_out = f"all-linear leaves out {', '.join(names)}: no effect, or named like experts (docs/models.md)"
    return left_out if names else None
