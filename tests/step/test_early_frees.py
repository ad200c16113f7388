"""The step frees batches, logits and gradients as early as possible."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from lean_finetune.model.load_model import load_model
from lean_finetune.step.batches import Batch, collate
from lean_finetune.step.loss import causal_lm
from lean_finetune.step.run_optimizer import OptimSpec, build_optimizer
from lean_finetune.step.training_step import Phase, StepSpec, training_step
from tests.small_model import CPU, VOCABULARY, spec_of

ROWS, LENGTH, MICRO_BATCHES = 4, 40, 2
PLAIN = OptimSpec(name="adamw", lr=1e-3, weight_decay=0.0, schedule="constant", warmup_fraction=0.0)


class Logits(TorchDispatchMode):
    """Knows every tensor of logits that was made and is not freed yet."""

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


def batches(on_device: list[StorageWeakRef]) -> Iterator[Batch]:
    """Micro-batches, and references to what they hold that keep nothing alive."""
    draw = np.random.default_rng(0)

    def made() -> Batch:
        rows = [(draw.integers(3, VOCABULARY, LENGTH), np.array([[1, LENGTH]])) for _ in range(ROWS)]
        batch = collate(rows, LENGTH, 0)
        on_device.extend(StorageWeakRef(each.untyped_storage()) for each in (batch.input_ids_BT, batch.targets_BT))
        return batch

    for _ in range(MICRO_BATCHES):
        yield made()


def run_step(model: nn.Module, method: str, chunk: int | None, phase: Phase, on_device: list[StorageWeakRef]) -> None:
    """One optimizer step."""
    training_step(
        model,
        build_optimizer(model, PLAIN),
        batches(on_device),
        supervised_tokens=MICRO_BATCHES * ROWS * (LENGTH - 1),
        model_spec=spec_of(method=method),
        spec=StepSpec(loss_chunk=chunk, max_grad_norm=1.0, foreach=False),
        phase=phase,
        guard=lambda losses, norm: None,
    )


@pytest.mark.parametrize("chunk", [None, 32])
def test_logits_are_freed_before_the_layers_backward_and_gradients_after_the_update(
    small_llama: Path, chunk: int | None
):
    """A peak where logits and all that the layers make in backward are there at once."""
    model = load_model(small_llama, spec_of(method="full"), CPU)
    logits = Logits(model)
    seen: list[tuple[str, int]] = []

    @contextmanager
    def phase(name: str) -> Iterator[None]:
        yield
        seen.append((name, logits.living()))

    last_layer = causal_lm(model).get_decoder().layers[-1]
    last_layer.register_full_backward_pre_hook(lambda *_: seen.append(("below the loss", logits.living())))
    with logits:
        run_step(model, "full", chunk, phase, [])
    saved = 1 if chunk is None else 0  # Without chunks cross-entropy saves the logits for its backward.
    turn = [("forward", saved), ("below the loss", 0), ("backward", 0)]
    assert seen == [*turn, *turn, ("clip", 0), ("optimizer", 0)]
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_batch_is_freed_before_its_backward(small_llama: Path):
    """Token ids and targets alive at the next peak; any function that passes batches on may keep them."""
    model = load_model(small_llama, spec_of(method="lora"), CPU)
    on_device: list[StorageWeakRef] = []
    seen: list[bool] = []

    @contextmanager
    def phase(name: str) -> Iterator[None]:
        if name == "backward":
            seen.append(all(ref.expired() for ref in on_device))
        yield

    run_step(model, "lora", 32, phase, on_device)
    assert seen == [True] * MICRO_BATCHES and len(on_device) == 2 * MICRO_BATCHES
