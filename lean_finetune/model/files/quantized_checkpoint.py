"""Checkpoints that are quantized on disk: their formats, and their weights unpacked or kept."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from pathlib import Path
from types import EllipsisType
from typing import Any, Self

import torch
from transformers import PretrainedConfig, PreTrainedModel
from transformers.quantizers.base import get_keys_to_not_convert
from transformers.utils import CONFIG_NAME

from lean_finetune.config.model_families import family_of
from lean_finetune.core.atomic_files import read_json, write_json
from lean_finetune.core.optional_bitsandbytes import bnb
from lean_finetune.islands.tower import TOWER
from lean_finetune.model.beside.whole_config import is_whole
from lean_finetune.model.experts.grouped_matmul import INT8, INT8_LARGEST
from lean_finetune.model.files.safetensors_files import FileTensor, StoredTensor, give_back_memory, model_tensors
from lean_finetune.pinning.model_files import INDEX

# Quantised weights in a model's files, read one at a time in 16 bits: MXFP4, FP8, and bitsandbytes in 4 and 8 bits.
#
# Shape legend: a weight is N × K; E experts; G groups of a row of K values.

UNPACKED = torch.bfloat16
"""Type of unpacked weights."""
ROWS_AT_ONCE = 128
"""Rows of an FP8 weight that are unpacked at the same time: those of one of DeepSeek's blocks."""
E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""The 4-bit values of MXFP4 (OCP Microscaling Formats v1.0, section 5.3.3)."""
E8M0_VALUES = tuple(2.0**exponent for exponent in range(-127, 129))
"""The values of MXFP4's scales (section 5.4.1)."""


@dataclass(frozen=True, kw_only=True)
class QuantizedWeight:
    """A quantised weight in a model's files, not yet read."""

    packed: StoredTensor

    @property
    def path(self) -> Path:
        """The file of its packed values."""
        return self.packed.path

    @property
    def dtype(self) -> torch.dtype:
        """Type that `read` returns."""
        return UNPACKED

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape that `read` returns."""
        return self.packed.shape

    def read(self) -> torch.Tensor:
        """Read and unpack the weight.

        Raises:
            OSError: a file cannot be read.
            ValueError: scales do not fit the weight.
        """
        raise NotImplementedError

    def __getitem__(self, index: EllipsisType) -> Any:
        """What transformers loads: it indexes a lazy tensor with `...`."""
        give_back_memory()
        return self.read()


@dataclass(frozen=True, kw_only=True)
class Mxfp4Weight(QuantizedWeight):
    """A projection of all experts of gpt-oss: two 4-bit values a byte (E, N, K / 32, 16), a scale for each 32."""

    scales: StoredTensor

    @property
    def shape(self) -> tuple[int, ...]:
        """(E, K, N), as in the model."""
        experts, outputs, groups, group_bytes = self.packed.shape
        return (experts, groups * group_bytes * 2, outputs)

    def read(self) -> torch.Tensor:
        """Unpack it, an expert at a time: the values of transformers' `convert_moe_packed_tensors`, in less memory."""
        weights_EKN = torch.empty(self.shape, dtype=UNPACKED)
        for expert, weight_KN in enumerate(weights_EKN):
            weight_KN.copy_(self._expert(expert).T)
        return weights_EKN

    def rows(self, first: int, count: int) -> Self:
        """A range of its experts."""
        return replace(self, packed=self.packed.rows(first, count), scales=self.scales.rows(first, count))

    def _expert(self, expert: int) -> torch.Tensor:
        """The weight of one expert, N × K."""
        values, scales = torch.tensor(E2M1_VALUES, dtype=UNPACKED), torch.tensor(E8M0_VALUES, dtype=UNPACKED)
        # The lower half of a byte is the first value. Both are looked up together, as one integer.
        pairs = torch.stack([values.repeat(16), values.repeat_interleave(16)], dim=1).view(torch.int32)[:, 0]
        blocks, exponents_NG = self.packed.rows(expert, 1).read()[0].int(), self.scales.rows(expert, 1).read()[0]
        weight_NGV = pairs.index_select(0, blocks.flatten()).view(UNPACKED).view(*exponents_NG.shape, -1)
        weight_NGV *= scales.index_select(0, exponents_NG.int().flatten()).view(*exponents_NG.shape, 1)
        return weight_NGV.flatten(1)


@dataclass(frozen=True, kw_only=True)
class Fp8Weight(QuantizedWeight):
    """An 8-bit floating-point weight N × K with a scale for each block, row, or for all of it.

    Blocks at the lower and right edge may be smaller (DeepSeek-V3's `weight_dequant`, inference/kernel.py), which
    transformers' `Fp8Dequantize` refuses, or scales by blocks of another size.
    """

    scales: StoredTensor
    block: tuple[int, int]
    """Rows and columns of a block, if there is more than one scale for a row."""

    def read(self) -> torch.Tensor:
        """Multiply by the scales in fp32, `ROWS_AT_ONCE` rows at a time."""
        rows, columns = self.shape
        scales = self.scales.read().float()
        scales = scales.reshape(1, 1) if scales.numel() == 1 else scales
        height, width = self._block_of(tuple(scales.shape))
        weight_NK = torch.empty(rows, columns, dtype=UNPACKED)
        for first in range(0, rows, ROWS_AT_ONCE):
            count = min(ROWS_AT_ONCE, rows - first)
            of_rows = scales[torch.arange(first, first + count) // height]
            scaled_RK = self.packed.rows(first, count).read().float()
            weight_NK[first : first + count] = scaled_RK.mul_(of_rows.repeat_interleave(width, dim=1)[:, :columns])
            del scaled_RK
        return weight_NK

    def _block_of(self, grid: tuple[int, ...]) -> tuple[int, int]:
        """Rows and columns for which one scale is; `grid` is the shape of the scales."""
        rows, columns = self.shape
        for height, width in ((rows, columns), (1, columns), self.block):
            if grid == (-(-rows // height), -(-columns // width)):
                return height, width
        raise ValueError(f"scales of shape {grid} do not fit an FP8 weight of shape {self.shape}")


@dataclass(frozen=True)
class AsStored:
    """The tensors of a weight that bitsandbytes packed, read: the packed values as `weight`, others by their names."""

    tensors: Mapping[str, torch.Tensor]

    def to(self, device: Any = None, dtype: Any = None) -> Self:
        """Move them to a device; transformers would convert a weight to `dtype`, which packed values are not."""
        return type(self)({name: tensor.to(device) for name, tensor in self.tensors.items()})

    def is_floating_point(self) -> bool:
        """Refuse the place of a weight in 16 bits, of which transformers asks this.

        Raises:
            ValueError: always.
        """
        raise ValueError("one is packed by bitsandbytes whose layer must be in 16 bits, such as the head")


@dataclass(frozen=True, kw_only=True)
class BitsAndBytesWeight(QuantizedWeight):
    """A weight that bitsandbytes packed in 4 or 8 bits."""

    state: Mapping[str, StoredTensor]
    """Its scales and code books by the last parts of their names, such as `weight.absmax` or `SCB`."""

    @cached_property
    def _format(self) -> Mapping[str, Any]:
        """How a 4-bit weight is packed; empty for 8 bits."""
        found = [tensor for name, tensor in self.state.items() if "quant_state" in name]
        return bnb.utils.unpack_tensor_to_dict(found[0].read()) if found else {}

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the weight before packing."""
        return tuple(self._format.get("shape", self.packed.shape))

    def __getitem__(self, index: EllipsisType) -> AsStored:
        """The weight as it is stored."""
        give_back_memory()
        return AsStored({"weight": self.packed.read(), **{name: one.read() for name, one in self.state.items()}})

    def read(self) -> torch.Tensor:
        """Unpack it with bitsandbytes."""
        tensors = dict(self[...].tensors)
        packed = tensors.pop("weight")
        if "SCB" in tensors:
            return (packed.float() * (tensors["SCB"] / INT8_LARGEST)[:, None]).to(UNPACKED)
        state = bnb.functional.QuantState.from_dict(tensors, device=torch.device("cpu"))
        return bnb.functional.dequantize_4bit(packed, state).to(UNPACKED)


# Checkpoints whose weights are already quantised: which ones are read, and their tensors.
#
# MXFP4 and FP8 are unpacked while a model is loaded, one weight at a time. What bitsandbytes packed is loaded as it
# is, and unpacked only to merge an adapter into it.

MXFP4, FP8, NF4, FP4 = "MXFP4", "FP8", "NF4", "FP4"
BITSANDBYTES = (NF4, FP4, INT8)
"""Formats that are loaded as they are."""
FP8_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2)
FP8_SCALES = ("_scale_inv", "_scale")
"""Ends of the names of an FP8 weight's scales: transformers' and compressed-tensors'."""
NOT_READ = (".activation_scale", ".input_scale", ".k_scale", ".v_scale", ".q_scale", ".weight_format")
"""Ends of names that say how activations are quantised, or how 8-bit weights are ordered."""


def stored_quantisation(config: PretrainedConfig) -> dict[str, Any]:
    """`quantization_config` of a config.json that was just read; empty without one."""
    found = (getattr(part, "quantization_config", None) for part in (config, config.get_text_config()))
    return next((dict(one) for one in found if one), {})


def without_quantisation(config: PretrainedConfig) -> PretrainedConfig:
    """The config of the same model in 16 bits; changes `config`."""
    for part in (config, config.get_text_config()):
        vars(part).pop("quantization_config", None)
    return config


def stored_format(config: PretrainedConfig) -> str | None:
    """MXFP4, FP8, NF4, FP4 or int8; None for weights that are not quantised, or in a way that is not supported."""
    how = stored_quantisation(config)
    method = how.get("quant_method")
    if how.get("load_in_4bit") or how.get("load_in_8bit"):
        return INT8 if how.get("load_in_8bit") else str(how.get("bnb_4bit_quant_type", FP4)).upper()
    if method == "compressed-tensors":
        return FP8 if _is_float_quantized(how) else None
    return {"mxfp4": MXFP4, "fp8": FP8}.get(str(method))


def _is_float_quantized(how: Mapping[str, Any]) -> bool:
    """Whether compressed-tensors stored 8-bit floating-point weights."""
    return how.get("format") == "float-quantized" and all(
        one.get("type") == "float" and one.get("num_bits") == 8 for one in _groups(how)
    )


def _groups(how: Mapping[str, Any]) -> list[dict[str, Any]]:
    """How compressed-tensors stored the weights of each group of layers; empty for a group that does not say it."""
    groups = how.get("config_groups") or {}
    found = groups.values() if isinstance(groups, Mapping) else [groups]
    weights = [group.get("weights") if isinstance(group, Mapping) else None for group in found]
    return [one if isinstance(one, dict) else {} for one in weights]


def unsupported_format(config: PretrainedConfig) -> str | None:
    """What a refusal says of a quantised checkpoint that cannot be read; None for others."""
    how, found = stored_quantisation(config), stored_format(config)
    if not how or (found is not None and (found != MXFP4 or family_of(config.model_type).stored_in_mxfp4)):
        return None
    name = how.get("quant_method", "a method that config.json does not name")
    kind = f" ({how['format']})" if how.get("format") else ""
    return (
        f"has weights quantised with {name}{kind}, which are not read; give the 16-bit model that they were made from, "
        "or that model in FP8 or quantised by bitsandbytes"
    )


def format_text(config: PretrainedConfig) -> str | None:
    """How the weights are stored and what is loaded; None if they are not quantised."""
    found = stored_format(config)
    if found in BITSANDBYTES:
        return f"{found} of bitsandbytes in the model's files, taken as they are"
    return found and f"{found} in the model's files, unpacked to bf16 while loading"


def kept_modules(config: PretrainedConfig) -> list[str] | None:
    """Names or patterns of layers that are not packed, besides the head; None without any.

    What stands beside the decoder is small, and stays in 16 bits.
    """
    kept = [*family_of(config.get_text_config().model_type).read_unpacked]
    if stored_format(config) in BITSANDBYTES:
        skipped = stored_quantisation(config).get("llm_int8_skip_modules")
        kept += skipped if isinstance(skipped, list) else []
    elif is_whole(config):
        kept += TOWER.parts
    return kept or None


def unpacked_layers(model: PreTrainedModel) -> list[str]:
    """Names or patterns of the layers that transformers does not pack: the head, tied weights and `kept_modules`.

    It adds the last parameter, when the head is not yet tied; in `model` it is.
    """
    last, last_untied = (
        [*model.named_parameters(remove_duplicate=tied)][-1][0].removesuffix(".weight") for tied in (True, False)
    )
    found = {*get_keys_to_not_convert(model)} - {last} | {last_untied}
    return [*sorted(found), *(kept_modules(model.config) or ())]


def file_tensors(directory: Path, config: PretrainedConfig) -> dict[str, FileTensor]:
    """The tensors of a model's files by the names that they have in 16 bits, not yet read.

    Raises:
        OSError, SafetensorError: as `model_tensors`.
        ValueError: as `model_tensors`, or a quantised weight lacks its scales.
    """
    stored, found = model_tensors(directory), stored_format(config)
    if found is None:
        return dict(stored)
    kept = {name: tensor for name, tensor in stored.items() if not name.endswith(NOT_READ)}
    if found == MXFP4:
        return _mxfp4(kept)
    return _fp8(kept, config) if found == FP8 else _bitsandbytes(kept)


def write_16_bit_config(directory: Path, tensors: Mapping[str, FileTensor]) -> None:
    """Make copies of config.json and of the index in `directory` those of the same model in 16 bits."""
    path = directory / CONFIG_NAME
    config = read_json(path)
    for part in (config, config.get("text_config", {})):
        part.pop("quantization_config", None)
    if not {"dtype", "torch_dtype"} & {*config}:
        config["dtype"] = str(UNPACKED).removeprefix("torch.")
    write_json(path, config)
    if (directory / INDEX).exists():
        size = sum(prod(one.shape) * one.dtype.itemsize for one in tensors.values())
        names = {name: one.path.name for name, one in sorted(tensors.items())}
        write_json(directory / INDEX, {"metadata": {"total_size": size}, "weight_map": names})


def _mxfp4(stored: dict[str, StoredTensor]) -> dict[str, FileTensor]:
    """Join the blocks and scales of experts."""
    found: dict[str, FileTensor] = {}
    for name, tensor in stored.items():
        weight = name.removesuffix("_blocks")
        if weight != name:
            found[weight] = Mxfp4Weight(packed=tensor, scales=_part(stored, f"{weight}_scales"))
        elif not name.endswith("_scales"):
            found[name] = tensor
    return found


def fp8_block(config: PretrainedConfig) -> tuple[int, int]:
    """Rows and columns of a block of FP8 weights with one scale, where scales are by block."""
    how = stored_quantisation(config)
    blocks = [how.get("weight_block_size"), *(group.get("block_structure") for group in _groups(how))]
    rows, columns = next((block for block in blocks if block), (ROWS_AT_ONCE, ROWS_AT_ONCE))
    return rows, columns


def _fp8(stored: dict[str, StoredTensor], config: PretrainedConfig) -> dict[str, FileTensor]:
    """Join weights in FP8 and their scales."""
    block, found = fp8_block(config), dict[str, FileTensor]()
    for name, tensor in stored.items():
        if tensor.dtype in FP8_DTYPES:
            if len(tensor.shape) != 2:
                raise ValueError(f"{name} of shape {tensor.shape} is in FP8, which is supported for matrices alone")
            scales = next((name + end for end in FP8_SCALES if name + end in stored), name + FP8_SCALES[0])
            found[name] = Fp8Weight(packed=tensor, scales=_part(stored, scales), block=block)
        elif not name.endswith(FP8_SCALES):
            found[name] = tensor
        elif _part(stored, name.removesuffix("_inv").removesuffix("_scale")).dtype not in FP8_DTYPES:
            raise ValueError(f"{name} scales a weight that is not in FP8, which is not supported")
    return found


def _bitsandbytes(stored: dict[str, StoredTensor]) -> dict[str, FileTensor]:
    """Join packed weights, their scales and code books."""
    found: dict[str, FileTensor] = {}
    states: dict[str, dict[str, StoredTensor]] = {}
    for name, tensor in stored.items():
        layer, weight, rest = name.rpartition(".weight.")
        if weight:
            states.setdefault(f"{layer}.weight", {})[f"weight.{rest}"] = tensor
        elif name.endswith(".SCB"):
            states.setdefault(name.removesuffix("SCB") + "weight", {})["SCB"] = tensor
        else:
            found[name] = tensor
    for name, state in states.items():
        found[name] = BitsAndBytesWeight(packed=_part(stored, name), state=state)
    return found


def _part(stored: Mapping[str, StoredTensor], name: str) -> StoredTensor:
    """A tensor that a quantised weight needs.

    Raises:
        ValueError: the files lack it.
    """
    if name not in stored:
        raise ValueError(f"a quantised weight needs {name}, which the files lack")
    return stored[name]
