"""Kernels of Liger-Kernel and fla (train.fused_kernels) against a model's own code, in Triton's interpreter on a CPU.

Rows: a step's loss and gradients with and without them, and the peaks of steps predicted and counted. 16-bit gradients
are compared with those of fp32. It computes what the kernels compute, but no GPU runs them, and their speed is unknown.
"""

import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.harness import Measured, Row, at_most, benchmark, in_new_processes
from lean_finetune.config.field_types import FusedKernels, Method, Precision
from lean_finetune.config.model_families import families_that
from lean_finetune.config.schema import Train
from lean_finetune.memory.predict.peak import predict
from lean_finetune.memory.predict.traced_step import TracedModel, TracedSteps
from lean_finetune.memory.trace.setting import Setting
from lean_finetune.model.model_config import read_config
from lean_finetune.model.precision import autocast
from lean_finetune.step.batches import BatchShape
from lean_finetune.step.loss import summed_loss
from lean_finetune.step.step_loss import TokenLoss
from tests.kit.estimate_cpu import CPU, CPU_TARGET, ROPE, SMALL, VOCABULARY, count, make_code_books, without_onednn
from tests.kit.interpreted_triton import interpreted_kernels
from tests.kit.loaded import load_model
from tests.kit.specs import changed, joined, padded, random_batch, train_of
from tests.kit.tiny_config import tiny_config

STEPS: TracedSteps = ((padded(2, 12, 16), padded(1, 16, 10)), (padded(3, 8, 16),))
JOINED: TracedSteps = ((joined((70, 1, 64, 9), 90), joined((30, 66), 20)),)
"""Packed rows of one and two chunks of the delta rule."""
SCALARS_BYTES = 128
"""What the trace does not count: a few scalars."""
Gradients = Mapping[str, torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model and how it is trained."""

    family: str
    method: Method
    precision: Precision = "fp32"
    grad_ckpt: bool = False
    kernels: FusedKernels = "liger"
    packed: bool = False

    @property
    def steps(self) -> TracedSteps:
        """The steps whose peaks are compared."""
        return JOINED if self.packed else STEPS

    def spec(self, **changes: Any) -> Train:
        """The model with fused kernels, but for the changes."""
        spec = train_of(self.method, self.precision, rank=4, grad_ckpt=self.grad_ckpt, fused_kernels=self.kernels)
        return changed(spec, **changes)


CASES = (
    Case(family="llama", method="lora"),
    Case(family="llama", method="full", grad_ckpt=True),
    Case(family="llama", method="qlora", grad_ckpt=True),
    Case(family="llama", method="int8_lora"),
    *(
        Case(family="llama", method=method, precision=precision)
        for method in ("lora", "full")
        for precision in ("bf16", "fp16")
    ),
    *(Case(family=family, method="full") for family in families_that("code_of_llama")),
    Case(family="qwen3_next", method="full", kernels="fla", packed=True),
    Case(family="qwen3_next", method="full", kernels="fla"),
    *(Case(family="qwen3_next", method="lora", precision=precision, kernels="fla") for precision in ("bf16", "fp16")),
    Case(family="olmo_hybrid", method="lora", kernels="fla", grad_ckpt=True, packed=True),
    Case(family="qwen3_5_text", method="qlora", kernels="fla", grad_ckpt=True, packed=True),
)
INSTALLED = {"liger": "liger_kernel", "fla": "fla"}


def measure(quick: bool) -> Measured:
    """Compare every case, or the first two of each installed package."""
    os.environ["TRITON_INTERPRET"] = "1"  # Read when a new process imports Triton.
    cases = CASES
    if quick:
        of_each = ([case for case in CASES if case.kernels == kernels] for kernels in INSTALLED)
        cases = tuple(case for some in of_each for case in some[:2] if find_spec(INSTALLED[case.kernels]))
    rows = in_new_processes(compare, cases)
    exact = [row for row in rows if row["precision"] == "fp32"]
    bars = [
        at_most("fp32: worst difference of a loss", max(row["loss_difference"] for row in exact), 1e-6),
        at_most("fp32: worst difference of all gradients", max(row["gradient_difference"] for row in exact), 1e-5),
        at_most("worst error of a phase's peak", max(row["worst_phase_error"] for row in rows), 1e-3),
        *(
            at_most(
                f"16 bits: error of all gradients, {row['method']} in {row['precision']}, with / without", ratio, 1.25
            )
            for row in rows
            if (ratio := row["gradient_error_ratio"]) is not None
        ),
    ]
    return Measured(rows=rows, bars=bars)


def compare(case: Case) -> Row:
    """One row."""
    torch.set_num_threads(1)
    make_code_books()
    with interpreted_kernels(case.kernels), without_onednn(), tempfile.TemporaryDirectory() as name:
        directory, shape = Path(name), case.steps[0][0]
        torch.manual_seed(0)
        if case.kernels == "fla":
            config = tiny_config(case.family)
        else:
            config = AutoConfig.for_model(case.family, **SMALL, head_dim=16, rope_parameters={**ROPE})
        AutoModelForCausalLM.from_config(config).save_pretrained(directory)
        loss, gradients = differentiate(directory, case.spec(), shape)
        plain_loss, plain = differentiate(directory, case.spec(fused_kernels="none"), shape)
        ratio = None
        if case.precision != "fp32":
            _, exact = differentiate(directory, case.spec(fused_kernels="none", precision="fp32"), shape)
            ratio = difference(gradients, exact) / difference(plain, exact)
        return {
            **vars(case),
            "loss_difference": abs(loss - plain_loss) / plain_loss,
            "gradient_difference": difference(gradients, plain),
            "gradient_error_ratio": ratio,
            **peaks(directory, case.spec(), case.steps),
        }


def differentiate(directory: Path, spec: Train, shape: BatchShape) -> tuple[float, Gradients]:
    """Loss and gradients of one micro-batch."""
    model = load_model(directory, spec, CPU)
    torch.manual_seed(1)
    batch = random_batch(shape, VOCABULARY)
    trained = {name: tensor for name, tensor in model.named_parameters() if tensor.requires_grad}
    for name, tensor in trained.items():
        if "lora_B" in name:  # Adapters start at zero, which would hide their inputs' gradients.
            torch.nn.init.normal_(tensor, std=0.05)
    with autocast(spec, "cpu"):
        loss = summed_loss(model, batch, TokenLoss(8))
    loss.backward()
    return loss.item(), {name: tensor.grad.float() for name, tensor in trained.items() if tensor.grad is not None}


def difference(found: Gradients, expected: Gradients) -> float:
    """Norm of the difference of all gradients, relative to that of the expected ones."""
    squares = ((found[name] - value).square().sum() for name, value in expected.items())
    return float((sum(squares) / sum(value.square().sum() for value in expected.values())) ** 0.5)


def peaks(directory: Path, spec: Train, steps: TracedSteps) -> Row:
    """Peaks of a few steps, predicted and counted by PyTorch's allocator."""
    setting = Setting(train=changed(spec, optimizer="adamw", loss_chunk=8, max_grad_norm=1.0))
    predicted = predict(TracedModel(read_config(directory), setting, CPU_TARGET), steps)
    counted = count(directory, setting, steps).peak_bytes_by_phase
    errors = {phase: abs(peak.bytes - counted[phase]) for phase, peak in predicted.by_phase.items()}
    return {
        "peak_predicted_kib": predicted.peak.bytes / 1024,
        "peak_counted_kib": max(counted[phase] for phase in errors) / 1024,
        "worst_phase_error": max(max(0, error - SCALARS_BYTES) / counted[phase] for phase, error in errors.items()),
    }


if __name__ == "__main__":
    benchmark("fused_kernels", measure)()
