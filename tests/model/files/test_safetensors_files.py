"""Safetensors files: our reader and writer agree with the library, and use memory for one tensor at a time."""

import json
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from lean_finetune.core.errors import UserError
from lean_finetune.model.files.safetensors_files import (
    DTYPES,
    TensorSpec,
    model_tensors,
    stored_tensors,
    write_loaded,
    write_tensors,
)
from lean_finetune.pinning.model_files import INDEX, WEIGHTS, shard_names
from lean_finetune.train.monitor.measured_peak import make_meter
from tests.kit.loaded import load_base
from tests.small_model import CPU, spec_of


def of_every_type() -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(2)
    values = torch.randint(0, 2, (5, 3), generator=draw)
    tensors = {f"{side}é.{name}": values.to(dtype, copy=True) for side in "ba" for name, dtype in DTYPES.items()}
    return {**tensors, "one value": torch.tensor(1.5), "none": torch.empty(0, 4), "sliced": torch.eye(6)[:, :2]}


def test_the_bytes_are_those_of_safetensors(tmp_path: Path):
    """Equal weights in other bytes: evaluate would be run again for nothing."""
    tensors = of_every_type()
    write_loaded(tmp_path / "ours", tensors)
    save_file({name: t.contiguous() for name, t in tensors.items()}, tmp_path / "theirs", metadata={"format": "pt"})
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "theirs").read_bytes()


def test_what_is_read_is_what_safetensors_reads(tmp_path: Path):
    """A tensor from the wrong place, in the wrong type, or from its second half on."""
    save_file({name: tensor.contiguous() for name, tensor in of_every_type().items()}, tmp_path / "file")
    expected, found = load_file(tmp_path / "file"), stored_tensors(tmp_path / "file")
    assert sorted(expected) == sorted(found)
    for name, stored in found.items():
        tensor = stored.read()
        assert (tensor.dtype, tensor.shape) == (expected[name].dtype, expected[name].shape)
        assert tensor.flatten().view(torch.uint8).tolist() == expected[name].flatten().view(torch.uint8).tolist()
        assert stored.bytes == tensor.nbytes


def test_one_tensor_is_in_memory_at_a_time(tmp_path: Path):
    """A complete file in memory while it is written or read."""
    forms = {f"{number}": TensorSpec(dtype=torch.float32, shape=(64, 64)) for number in range(9)}
    meter = make_meter(CPU)
    with meter.window("all"):
        with meter.phase("write"):
            write_tensors(tmp_path / "file", forms, lambda name: torch.full((64, 64), float(name)))
        with meter.phase("read"):
            sums = {name: stored.read().max().item() for name, stored in stored_tensors(tmp_path / "file").items()}
    assert sums == {name: float(name) for name in forms}
    peaks = meter.result().peak_bytes_by_phase
    assert 64 * 64 * 4 <= peaks["write"] < 64 * 64 * 4 + 64 and 64 * 64 * 4 <= peaks["read"] < 64 * 64 * 4 + 64


def test_a_tensor_unlike_its_form_is_not_written(tmp_path: Path):
    """A header with another shape than the tensor's."""
    form = TensorSpec(dtype=torch.float32, shape=(2, 3))
    with pytest.raises(RuntimeError, match="a is not of the announced type and shape"):
        write_tensors(tmp_path / "file", {"a": form}, lambda name: torch.zeros(3, 2))


def test_broken_files_are_refused(small_llama: Path, tmp_path: Path):
    """A truncated or forged file read past its end, or a type taken for another one."""
    original = (small_llama / WEIGHTS).read_bytes()
    for content, fault in (
        (original[:-1], SafetensorError),
        (original[:20], SafetensorError),
        (b"", SafetensorError),
        (original + b"x", SafetensorError),
        (original.replace(b'"BF16"', b'"F4_X"', 1), SafetensorError),
    ):
        (tmp_path / WEIGHTS).write_bytes(content)
        with pytest.raises(fault):
            model_tensors(tmp_path)
    (tmp_path / "config.json").write_bytes((small_llama / "config.json").read_bytes())
    with pytest.raises(UserError, match=r"model\.name: weights in .* cannot be loaded \(.*; replace the files"):
        load_base(tmp_path, spec_of(method="full"), CPU)
    (tmp_path / WEIGHTS).unlink()
    with pytest.raises(UserError, match=rf"cannot be loaded \(no file named {WEIGHTS} or {INDEX}\)"):
        load_base(tmp_path, spec_of(method="full"), CPU)
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"a": "model-1.safetensors"}}))
    with pytest.raises(UserError, match=r"cannot be loaded \(.*No such file"):
        load_base(tmp_path, spec_of(method="full"), CPU)


def test_the_pinned_files_are_the_ones_that_are_read(tmp_path: Path):
    """Of a directory with one file and an index, the index's files were pinned, and the other one was trained."""
    write_loaded(tmp_path / WEIGHTS, {"a": torch.zeros(2)})
    write_loaded(tmp_path / "model-1.safetensors", {"a": torch.ones(2)})
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"a": "model-1.safetensors"}}))
    assert {tensor.path.name for tensor in model_tensors(tmp_path).values()} == {*shard_names(tmp_path)}
    (tmp_path / INDEX).write_text('{"weight_map": [1]}')
    with pytest.raises(UserError, match="has no weight_map"):
        model_tensors(tmp_path)


def test_a_file_that_ends_while_it_is_read_is_told(small_llama: Path, tmp_path: Path):
    """The rest of a weight left uninitialised."""
    (tmp_path / WEIGHTS).write_bytes((small_llama / WEIGHTS).read_bytes())
    last = max(model_tensors(tmp_path).values(), key=lambda stored: stored.start)
    (tmp_path / WEIGHTS).write_bytes((small_llama / WEIGHTS).read_bytes()[: last.start + 1])
    with pytest.raises(OSError, match="bytes too soon"):
        last.read()
