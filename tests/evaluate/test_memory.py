"""Evaluating, saving and merging a model takes no more memory than training it, as PyTorch's allocator counts."""

import gc
from pathlib import Path
from typing import Any

import pytest
import torch

from lean_finetune.config.schema import Train
from lean_finetune.evaluate.base_and_tuned import evaluate_models
from lean_finetune.model.files.safetensors_files import stored_tensors
from lean_finetune.model.merge_adapters import MERGED, write_merged
from lean_finetune.run.assets import Assets
from lean_finetune.step.batches import collate
from lean_finetune.step.evaluation_limits import EvaluationLimits
from lean_finetune.step.offload.activation_offload import KEPT
from lean_finetune.step.parallel_model import ParallelModel
from lean_finetune.step.run_optimizer import build_optimizer
from lean_finetune.step.step_loss import StepGoal, TokenLoss
from lean_finetune.step.token_rows import TokenRows
from lean_finetune.step.training_step import training_step
from lean_finetune.step.update.loss_scaler import loss_scaler
from lean_finetune.train.heldout_loss import heldout_batches, heldout_loss
from lean_finetune.train.monitor.measured_peak import make_meter
from lean_finetune.train.save_model import save_full, save_tuned
from tests.evaluate.conftest import CPU, PAD, TOKENIZER_FILES, questions_of, save_random_adapter, spec_of
from tests.kit.loaded import load_base, load_model
from tests.kit.specs import changed
from tests.small_model import base_of
from tests.small_model import spec_of as model_spec_of

MAX_TOKENS = 192
"""Padded tokens of a micro-batch, and of every evaluation batch: enough for more activations than a merged weight."""
NUMBERS = model_spec_of(optimizer="adamw", lr=1e-3, weight_decay=0.0, schedule="constant", warmup_fraction=0.0)


def train_and_save(base: Path, spec: Train, chunk: int | None, rows: TokenRows, out: Path) -> dict[str, int]:
    """Peaks by phase of one step on the longest rows, of held-out losses after it, and of saving."""
    batches = list(heldout_batches(rows, len(rows), MAX_TOKENS, PAD))
    largest = sorted(rows.used.tolist(), key=lambda row: -rows.lengths[row])
    longest = int(rows.lengths[largest[0]])
    micro_batch = [(rows.ids(row), rows.spans(row)) for row in largest[: MAX_TOKENS // longest]]
    gc.collect()
    meter = make_meter(CPU)
    with meter.window("training"):
        model = load_model(base, spec, CPU)
        parallel, optimizer = ParallelModel(model), build_optimizer(model, NUMBERS)
        training_step(
            parallel,
            optimizer,
            iter([collate(micro_batch, longest, PAD)]),
            before=(),
            micro_batches=1,
            goal=StepGoal.of_any_rows(spec, 9),
            train=changed(spec, loss_chunk=chunk, max_grad_norm=1.0),
            foreach=False,
            phase=meter.phase,
            guard=lambda losses, norm: None,
            scaler=loss_scaler(spec),
            offload=KEPT,
        )
        with meter.phase("heldout"):
            heldout_loss(parallel, iter(batches), iter(()), TokenLoss(chunk or MAX_TOKENS), PAD, spec, CPU)
        with meter.phase("save"):
            files = [path.name for path in base.iterdir() if path.name not in TOKENIZER_FILES]
            save_tuned(parallel, base_of(base), out, spec, files if spec.adapted else None)
    return dict(meter.result().peak_bytes_by_phase)


CASES: list[tuple[dict[str, Any], int | None]] = [
    ({"method": "full", "grad_ckpt": True}, 16),
    ({"method": "lora", "grad_ckpt": True}, 16),
    ({"method": "qlora", "grad_ckpt": True}, None),
]
SLOW_CASES: list[tuple[dict[str, Any], int | None]] = [
    # The same with the other form of loss.
    *((changes, 16 if chunk is None else None) for changes, chunk in CASES),
    *(({"method": "full"}, chunk) for chunk in (None, 16)),
    *(({"method": "qlora", "grad_ckpt": True, "precision": "bf16"}, chunk) for chunk in (None, 16)),
]
SLOW = [pytest.param(*case, marks=pytest.mark.slow) for case in SLOW_CASES]


@pytest.mark.parametrize(("changes", "chunk"), [*CASES, *SLOW], ids=str)
def test_evaluation_and_saving_need_no_more_memory_than_training(
    base_dir: Path, rows: TokenRows, tmp_path: Path, changes: dict[str, Any], chunk: int | None
):
    """A run that fits and ends out of memory in its held-out loss, in saving, in merging, or in stage evaluate."""
    spec = model_spec_of(**changes)
    peaks = train_and_save(base_dir, spec, chunk, rows, tmp_path / "tuned")
    trained = max(peaks[phase] for phase in ("forward", "backward", "clip", "optimizer"))
    assert peaks["heldout"] <= trained and peaks["save"] <= trained
    limits = EvaluationLimits(
        max_tokens=MAX_TOKENS, logits_chunk=chunk or MAX_TOKENS, max_new_tokens=4, generate_batch_rows=32
    )
    gc.collect()
    meter = make_meter(CPU)
    with meter.window("evaluation"), meter.phase("evaluate"):
        answers = evaluate_models(
            Assets(directory=base_dir),
            tmp_path / "tuned",
            spec,
            questions_of(rows, 9),
            limits,
            device=CPU,
            progress=False,
            merged=spec.method == "lora",  # The merged model of 4-bit weights is not in 4 bits, which estimate counts.
        )
    assert len(answers) == (3 if spec.method == "lora" else 2)
    assert meter.result().peak_bytes_by_phase["evaluate"] <= trained


def test_full_model_is_saved_without_a_copy(base_dir: Path, tmp_path: Path):
    """A second model in memory at the end of a run."""
    model = load_base(base_dir, spec_of("full"), CPU)
    gc.collect()
    meter = make_meter(CPU)
    with meter.window("save"), meter.phase("save"):
        save_full(model, tmp_path)
    assert meter.result().peak_bytes_by_phase["save"] < 1024
    model.save_pretrained(tmp_path / "theirs")
    for name in ("config.json", "generation_config.json", "model.safetensors"):
        assert (tmp_path / name).read_bytes() == (tmp_path / "theirs" / name).read_bytes()


@pytest.mark.parametrize("method", ["lora", "qlora"])
def test_merging_needs_memory_for_one_weight(base_dir: Path, tmp_path: Path, method: str):
    """All weights of a file in memory, or of two."""
    adapter = save_random_adapter(base_dir, method, tmp_path / "tuned")
    (tmp_path / MERGED).mkdir()
    files = [path.name for path in base_dir.iterdir()]
    largest = max(stored.bytes for stored in stored_tensors(base_dir / "model.safetensors").values())
    adapters = (adapter / "adapter_model.safetensors").stat().st_size
    gc.collect()
    meter = make_meter(CPU)
    with meter.window("merge"), meter.phase("merge"):
        write_merged(base_dir, files, adapter, spec_of(method), tmp_path / MERGED)
    assert meter.result().peak_bytes_by_phase["merge"] < 1.05 * largest + adapters
    assert torch.equal(
        stored_tensors(tmp_path / MERGED / "model.safetensors")["model.norm.weight"].read(),
        stored_tensors(base_dir / "model.safetensors")["model.norm.weight"].read(),
    )
