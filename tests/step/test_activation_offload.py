"""Offloaded activations come back bit by bit, shared memory is stored once, and weights stay on the device."""

import gc
import os
from pathlib import Path

import pytest
import torch

from lean_finetune.core.errors import UserError
from lean_finetune.step.loss import summed_loss
from lean_finetune.step.offload.activation_offload import KEPT, ActivationOffload, DiskStore, HostStore, make_offload
from lean_finetune.step.step_loss import TokenLoss
from tests.kit.loaded import load_model
from tests.small_model import CPU, spec_of
from tests.step.common import assert_equal, run, split


class RecordingStore(HostStore):
    """Records what is stored and how often it is read."""

    def __init__(self):
        super().__init__(CPU)
        self.stored: list[torch.Tensor] = []
        self.reads = 0

    def put(self, values):
        self.stored.append(values.clone())
        return super().put(values)

    def get(self, handle):
        self.reads += 1
        return super().get(handle)


@pytest.mark.parametrize(("method", "grad_ckpt"), [("full", False), ("qlora", True)])
def test_losses_and_weights_are_equal_to_the_last_bit(small_llama, tmp_path, method, grad_ckpt):
    """Values that change, or come back in another memory layout, for which another kernel rounds differently."""
    spec = {"method": method, "grad_ckpt": grad_ckpt, "lora_dropout": 0.1}
    plain, weights = run(small_llama, split([3, 5]), chunk=16, steps=2, **spec)
    for store in (DiskStore(CPU, tmp_path), HostStore(CPU)):
        results, found = run(small_llama, split([3, 5]), chunk=16, steps=2, offload=ActivationOffload(store), **spec)
        assert [r.loss.item() for r in results] == [r.loss.item() for r in plain]
        assert [r.grad_norm.item() for r in results] == [r.grad_norm.item() for r in plain]
        assert_equal(found, weights, 0)


def test_a_tensor_saved_twice_is_copied_once_and_weights_never(small_llama):
    """Weights copied in every step; the input of three projections stored three times."""
    model, store = load_model(small_llama, spec_of(method="full"), CPU), RecordingStore()
    with torch.no_grad():  # Norms of weight 1 return their input.
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.mul_(1.5)
    loss = summed_loss(model, split([8])[0], TokenLoss(None), ActivationOffload(store))
    largest = max(tensor.numel() for tensor in model.parameters())
    assert store.stored and store.reads == 0
    assert all(values.numel() != largest for values in store.stored)
    fp32_values = [values for values in store.stored if values.dtype == torch.float32]
    hidden = [values for values in fp32_values if values.numel() == 8 * 27 * 64]
    assert len({values.numpy().tobytes() for values in hidden}) == len(hidden)
    loss.backward()
    assert store.reads > len(store.stored)


@pytest.mark.parametrize("policy", ["full", "selective"])
def test_only_the_inputs_of_recomputed_layers_are_offloaded(small_llama, policy):
    """Inner activations offloaded too, or a warning of torch 2.15 about outputs that a policy saves."""
    sizes = {}
    for changes in ({}, {"grad_ckpt": True, "grad_ckpt_policy": policy}):
        model, store = load_model(small_llama, spec_of(**changes), CPU), RecordingStore()
        summed_loss(model, split([8])[0], TokenLoss(16), ActivationOffload(store)).backward()
        sizes[bool(changes)] = sum(values.nbytes for values in store.stored)
    hidden_bytes = 8 * 27 * 64 * 4
    assert 2 * hidden_bytes <= sizes[True] < 5 * hidden_bytes < sizes[False]


def test_reused_memory_is_copied_again(small_llama):
    """A new activation at the address of a freed one must not get the old copy."""
    offload = ActivationOffload(HostStore(CPU))
    with offload.saving(torch.nn.Linear(1, 1)):
        packed = []
        for number in range(50):
            values = torch.full((512,), float(number), requires_grad=True)
            packed.append((number, values.exp()))
            del values
    for number, result in packed:
        result.sum().backward()
        assert result[0].item() == pytest.approx(torch.tensor(float(number)).exp().item())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool, torch.int64])
def test_any_layout_and_type_comes_back(tmp_path, dtype):
    """Transposed, sliced and expanded tensors in another layout."""
    values = (torch.arange(32 * 64 * 2).reshape(32, 64, 2) % 7 > 3).to(dtype)
    for store in (HostStore(CPU), DiskStore(CPU, tmp_path)):
        offload = ActivationOffload(store)
        for view in (values.transpose(0, 2), values[3:, 5:50], values[:, :1].expand(32, 64, 2)):
            packed = offload._pack(view)
            assert not isinstance(packed, torch.Tensor)
            back = offload._unpack(packed)
            assert torch.equal(back, view) and back.stride() == view.stride()


def test_the_file_has_no_name_and_does_not_grow_from_step_to_step(small_llama, tmp_path):
    """A disk that fills up in the course of a run, or stays full after it."""
    store = DiskStore(CPU, tmp_path / "scratch")
    sizes = []
    for steps in (1, 2):
        run(small_llama, split([8]), steps=steps, offload=ActivationOffload(store))
        gc.collect()
        sizes.append(os.fstat(store._file.fileno()).st_size)
    assert sizes[0] == sizes[1] > 0
    assert list((tmp_path / "scratch").iterdir()) == []


def test_a_disk_that_is_full_or_cannot_be_written_is_a_user_error(tmp_path: Path):
    """A traceback, out of backward too."""
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="file: cannot be written"):
        DiskStore(CPU, tmp_path / "file")
    store = DiskStore(CPU, tmp_path)
    store._file.close()
    store._file = open("/dev/full", "wb", buffering=0)  # noqa: SIM115
    with pytest.raises(UserError, match=r"train\.offload_activations: disk must have room .*No space left"):
        store.put(torch.zeros(512))
    store._file.close()


def test_offloading_from_the_cpu_to_the_cpu_is_refused(tmp_path: Path):
    """A switch that costs copies and saves nothing."""
    with pytest.raises(UserError, match=r"train\.offload_activations: .* use disk or none"):
        make_offload("cpu", "none", CPU, tmp_path)
    assert make_offload("none", "none", CPU, tmp_path) is KEPT
