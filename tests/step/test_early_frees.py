"""The step frees logits and gradients as early as possible."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from lean_finetune.step.batches import collate
from lean_finetune.step.loss import causal_lm
from lean_finetune.step.offload.activation_offload import KEPT
from lean_finetune.step.parallel_model import ParallelModel
from lean_finetune.step.run_optimizer import build_optimizer
from lean_finetune.step.step_loss import StepGoal
from lean_finetune.step.training_step import training_step
from lean_finetune.step.update.loss_scaler import LossScaler
from tests.kit.loaded import load_model
from tests.small_model import CPU, VOCABULARY, spec_of
from tests.step.common import OPTIM, rows


class Logits(TorchDispatchMode):
    """Counts tensors of logits that are not freed yet."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self._head = tuple(causal_lm(model).get_output_embeddings().weight.T.shape)
        self._made: list[StorageWeakRef] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else (out,):
            if isinstance(tensor, torch.Tensor) and tensor.ndim > 1 and tensor.shape[-1] == VOCABULARY:
                if tuple(tensor.shape) != self._head:  # The head, or its gradient as it is made.
                    self._made.append(StorageWeakRef(tensor.untyped_storage()))
        return out

    def living(self) -> int:
        return len({ref.cdata for ref in self._made if not ref.expired()})


@pytest.mark.parametrize("chunk", [None, 32])
def test_logits_are_freed_before_the_layers_backward_and_gradients_after_the_update(
    small_llama: Path, chunk: int | None
):
    """A peak at which logits and the tensors of the layers' backward exist together."""
    model = load_model(small_llama, spec_of(method="full"), CPU)
    logits = Logits(model)
    seen: list[tuple[str, int]] = []

    @contextmanager
    def phase(name: str) -> Iterator[None]:
        yield
        seen.append((name, logits.living()))

    last_layer = causal_lm(model).get_decoder().layers[-1]
    last_layer.register_full_backward_pre_hook(lambda *_: seen.append(("below the loss", logits.living())))
    batches = [collate(rows(), 40, 0)] * 2
    with logits:
        training_step(
            ParallelModel(model),
            build_optimizer(model, OPTIM),
            batches,
            before=(),
            micro_batches=len(batches),
            goal=StepGoal.of_any_rows(spec_of(), 9),
            train=spec_of(method="full", loss_chunk=chunk, max_grad_norm=1.0),
            foreach=False,
            phase=phase,
            guard=lambda losses, norm: None,
            scaler=LossScaler(),
            offload=KEPT,
        )
    saved = 1 if chunk is None else 0  # Without chunks cross-entropy saves the logits for its backward.
    turn = [("forward", saved), ("below the loss", 0), ("backward", 0)]
    assert seen == [*turn, *turn, ("clip", 0), ("optimizer", 0)]
    assert all(parameter.grad is None for parameter in model.parameters())
