"""Checkpoints that are quantised already: unpacked to what transformers unpacks, or taken as they are."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, FineGrainedFP8Config, PretrainedConfig
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from transformers.integrations.mxfp4 import convert_moe_packed_tensors
from transformers.utils.quantization_config import Mxfp4Config, QuantizationMethod

from lean_finetune.core.errors import UserError
from lean_finetune.model.files.quantized_checkpoint import Fp8Weight, Mxfp4Weight, file_tensors
from lean_finetune.model.files.safetensors_files import stored_tensors
from lean_finetune.model.model_config import read_config
from lean_finetune.model.quantize import quantisation_tensors, refuse_other_method
from tests.kit.loaded import load_base, load_model
from tests.model.quantized import (
    FILE,
    NF4,
    QWEN3,
    QWEN3_MOE,
    resized,
    save_bitsandbytes,
    save_compressed_fp8,
    save_fp8,
    save_fp8_experts,
    save_mxfp4,
)
from tests.small_model import CPU, spec_of

FULL = spec_of(method="full", precision="bf16")


def test_mxfp4_is_unpacked_as_transformers_does(tmp_path: Path):
    """Two values of a byte in the wrong order, or a scale of another exponent: all bytes with all scales but NaN."""
    blocks = torch.arange(256, dtype=torch.uint8).view(1, 1, 16, 16).repeat(1, 255, 1, 1)
    scales = torch.arange(255, dtype=torch.uint8).view(1, 255, 1).repeat(1, 1, 16)
    save_file({"blocks": blocks, "scales": scales}, tmp_path / FILE)
    stored = stored_tensors(tmp_path / FILE)
    ours = Mxfp4Weight(packed=stored["blocks"], scales=stored["scales"]).read()
    assert torch.equal(ours, convert_moe_packed_tensors(blocks, scales))


@pytest.mark.parametrize("shape", [(256, 384), (128, 128)])
def test_fp8_is_unpacked_as_transformers_does(tmp_path: Path, shape: tuple[int, int]):
    """A scale applied to another block."""
    weight = torch.randn(shape).to(torch.float8_e4m3fn)
    scales = torch.rand(shape[0] // 128, shape[1] // 128)
    save_file({"weight": weight, "scales": scales}, tmp_path / FILE)
    stored = stored_tensors(tmp_path / FILE)
    ours = Fp8Weight(packed=stored["weight"], scales=stored["scales"], block=(128, 128)).read()
    theirs = Fp8Dequantize(None)._dequantize_one(weight, scales, torch.bfloat16)
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize("block", [(128, 128), (64, 32), (1, 160)])
def test_blocks_at_the_edges_may_be_smaller(tmp_path: Path, block: tuple[int, int]):
    """DeepSeek's weights of 576 rows: a scale of the neighbouring block, or of blocks of another size."""
    rows, columns = 200, 160
    weight = torch.randn(rows, columns).to(torch.float8_e4m3fn)
    scales = torch.rand(-(-rows // block[0]), -(-columns // block[1]))
    save_file({"weight": weight, "scales": scales}, tmp_path / FILE)
    stored = stored_tensors(tmp_path / FILE)
    ours = Fp8Weight(packed=stored["weight"], scales=stored["scales"], block=block).read()
    for row, column in ((0, 0), (127, 127), (128, 128), (199, 159), (199, 0)):
        right = weight[row, column].float() * scales[row // block[0], column // block[1]]
        assert ours[row, column] == right.to(torch.bfloat16)


def weights(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def check_equal(ours: torch.nn.Module, theirs: torch.nn.Module) -> None:
    mine, expected = weights(ours), weights(theirs)
    assert list(mine) == list(expected)
    for name, tensor in expected.items():
        assert mine[name].dtype == tensor.dtype and torch.equal(mine[name], tensor), name


@pytest.mark.filterwarnings("ignore")
def test_mxfp4_loads_as_in_transformers(tmp_path: Path):
    """Experts transposed, or under another name."""
    save_mxfp4(tmp_path)
    how = Mxfp4Config(dequantize=True)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16, quantization_config=how)
    check_equal(load_base(tmp_path, FULL, CPU), theirs)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("family", [QWEN3, QWEN3_MOE], ids=lambda config: config.model_type)
def test_fp8_loads_as_in_transformers(tmp_path: Path, family: PretrainedConfig):
    """A weight that is not unpacked, or a scale taken for a weight. Sizes are those that transformers can unpack."""
    save_fp8(tmp_path, config=resized(family, hidden_size=128, intermediate_size=256, moe_intermediate_size=128))
    how = FineGrainedFP8Config(dequantize=True)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16, quantization_config=how)
    check_equal(load_base(tmp_path, FULL, CPU), theirs)


@pytest.mark.parametrize("save", [save_fp8, lambda path: save_fp8(path, None), save_compressed_fp8])
def test_scales_of_blocks_rows_and_weights(tmp_path: Path, save: Any):
    """A checkpoint with other scales than DeepSeek's read with the wrong ones."""
    save(tmp_path)
    model, tensors = load_base(tmp_path, FULL, CPU), load_file(tmp_path / FILE)
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        scale = tensors.get(f"{name}_scale_inv", tensors.get(f"{name}_scale"))
        assert scale is not None
        right = tensors[name][0, 0].float() * scale.flatten()[0]
        assert model.get_parameter(name)[0, 0] == right.to(torch.bfloat16)


@pytest.mark.parametrize("method", ["full", "lora", "qlora", "int8_lora"])
@pytest.mark.parametrize("save", [save_mxfp4, save_fp8, save_fp8_experts])
def test_every_method_takes_unpacked_weights(tmp_path: Path, method: Any, save: Any):
    """A model that differs from the one trained from the same weights in 16-bit files."""
    save(tmp_path / "quantised")
    unpacked = load_base(tmp_path / "quantised", FULL, CPU)
    assert not hasattr(unpacked.config, "quantization_config")
    unpacked.save_pretrained(tmp_path / "bf16")
    spec = spec_of(method=method, precision="bf16")
    ours, from_16_bits = (load_model(tmp_path / name, spec, CPU) for name in ("quantised", "bf16"))
    check_equal(ours, from_16_bits)


@pytest.mark.parametrize("double", [True, False])
def test_packed_weights_are_those_that_packing_gives(tmp_path: Path, double: bool):
    """A checkpoint of bitsandbytes packed twice, or with the scales of another weight."""
    save_bitsandbytes(tmp_path, **NF4, bnb_4bit_use_double_quant=double)
    spec = spec_of(method="qlora", precision="bf16", quant_double=double)
    ours, packed = load_base(tmp_path, spec, CPU), load_base(tmp_path / "16_bit", spec, CPU)
    check_equal(ours, packed)
    pairs = list(zip(quantisation_tensors(ours), quantisation_tensors(packed), strict=True))
    assert pairs and all(torch.equal(one, other) for one, other in pairs)
    ids = torch.arange(8)[None]
    assert torch.equal(ours(ids).logits, packed(ids).logits)


def test_packed_in_8_bits(tmp_path: Path):
    """The scales of 8-bit rows lost."""
    save_bitsandbytes(tmp_path, load_in_8bit=True)
    spec = spec_of(method="int8_lora", precision="bf16")
    ours, packed = load_base(tmp_path, spec, CPU), load_base(tmp_path / "16_bit", spec, CPU)
    check_equal(ours, packed)
    ids = torch.arange(8)[None]
    assert torch.equal(ours(ids).logits, packed(ids).logits)


def test_layers_that_bitsandbytes_did_not_pack_stay_as_they_are(tmp_path: Path):
    """A layer that a publisher left in 16 bits for its precision packed after all."""
    save_bitsandbytes(tmp_path, **NF4, llm_int8_skip_modules=["lm_head", "model.layers.1.mlp.down_proj"])
    model = load_base(tmp_path, spec_of(method="qlora", precision="bf16", quant_double=False), CPU)
    down = "mlp.down_proj.weight"
    assert model.get_parameter(f"model.layers.0.{down}").dtype == torch.uint8
    assert model.get_parameter(f"model.layers.1.{down}").dtype == torch.bfloat16


def test_a_packed_head_is_refused(tmp_path: Path):
    """The loss multiplies by the head's weight, which would be packed bytes."""
    save_bitsandbytes(tmp_path, **NF4, llm_int8_skip_modules=["nothing"])
    with pytest.raises(UserError, match="whose layer must be in 16 bits, such as the head"):
        load_base(tmp_path, spec_of(method="qlora", precision="bf16", quant_double=False), CPU)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"method": "lora"}, "train.method: must be qlora .* NF4 of bitsandbytes; got lora; set it to qlora"),
        ({"method": "full"}, "train.method: must be qlora"),
        ({"method": "qlora", "quant_type": "fp4"}, "train.quant.type: must be nf4 .* got fp4; set it to nf4"),
        ({"method": "qlora", "quant_double": False}, "train.quant.double: must be true .* got false; set it to true"),
        ({"method": "qlora", "lora_init": "loftq"}, "train.lora.init: must be default"),
    ],
)
def test_another_method_is_refused(changes: dict[str, Any], message: str):
    """Packed weights trained as if they were numbers, or predicted as another format."""
    config = resized(QWEN3)
    config.quantization_config = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}
    refuse_other_method(config, spec_of(method="qlora"))
    with pytest.raises(UserError, match=message):
        refuse_other_method(config, spec_of(**changes))


TAKEN = {"bitsandbytes", "fp8", "mxfp4"}
REFUSED = [
    *({"quant_method": method.value} for method in QuantizationMethod if method.value not in TAKEN),
    {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": {"weights": {"num_bits": 4, "type": "int"}}},
    },
    {"quant_method": "modelopt", "quant_algo": "NVFP4"},
    {"quant_method": "mxfp4"},  # Of a family that has no MXFP4 code in transformers.
    {"group_size": 64, "bits": 4},  # As MLX writes it.
]


@pytest.mark.parametrize("how", REFUSED, ids=str)
def test_other_formats_are_refused(tmp_path: Path, how: dict[str, Any]):
    """A traceback of a library that is not installed: every method that transformers knows, and others' own."""
    resized(QWEN3, quantization_config=how).save_pretrained(tmp_path)
    name = how.get("quant_method", "a method that config.json does not name") + (" (" if "format" in how else "")
    with pytest.raises(UserError, match=f"quantised with {re.escape(name)}.*; give the 16-bit model") as error:
        read_config(tmp_path)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("drop", "message"),
    [("q_proj.weight_scale_inv", "needs .*q_proj.weight_scale_inv"), ("q_proj.weight", "q_proj.weight,")],
)
def test_scales_and_weights_belong_together(tmp_path: Path, drop: str, message: str):
    """8-bit values read as weights."""
    save_fp8(tmp_path)
    tensors = {name: one for name, one in load_file(tmp_path / FILE).items() if not name.endswith(drop)}
    save_file(tensors, tmp_path / FILE)
    with pytest.raises(ValueError, match=message):
        file_tensors(tmp_path, read_config(tmp_path))
    with pytest.raises(UserError, match=re.escape(str(tmp_path))):
        load_base(tmp_path, FULL, CPU)


def test_stacked_experts_in_fp8_are_refused(tmp_path: Path):
    """A message about unpacking values, from which nobody learns what is wrong."""
    save_fp8(tmp_path)
    save_file(
        {"experts": torch.zeros(2, 4, 4).to(torch.float8_e4m3fn), "experts_scale": torch.ones(2)}, tmp_path / FILE
    )
    with pytest.raises(UserError, match=r"experts of shape \(2, 4, 4\) is in FP8"):
        load_base(tmp_path, FULL, CPU)
