"""flash-linear-attention's gated delta rule instead of the chunked loop in PyTorch (train.fused_kernels: fla).

The convolution before it and the norm after it stay those of the model: each is a few kernels without a loop. fla
overwrites none of its inputs.
"""

import os
from importlib.metadata import version
from importlib.util import find_spec
from inspect import unwrap
from types import MethodType
from typing import Any

import torch
from packaging.version import parse
from transformers import PretrainedConfig, PreTrainedModel

from lean_finetune.config.model_families import families_that, family_of
from lean_finetune.core.errors import UserError
from lean_finetune.model.attention.kernels import PackedRows, note_rows
from lean_finetune.model.recurrent.packed_layers import DELTA_RULE_CHUNK, with_global
from lean_finetune.patches.of_models import OTHER_KERNELS

RULE = "torch_chunk_gated_delta_rule"
"""The function of the delta rule in a family's code."""
LARGEST_HEAD = 256
"""Largest head size of fla's kernels (fla/ops/common/chunk_delta_h.py)."""
RIGHT_TRITON = "3.7.1"
"""Oldest Triton whose code for Hopper GPUs is right: fla raises in backward for older ones (its issue 640)."""
OTHER_CODE = ("flash_qla", "tilelang")
"""Packages that fla calls where they are installed, unless FLA_DISABLE_BACKEND_DISPATCH=1; other memory."""


def uncounted_code() -> str | None:
    """What this installation would run instead of the kernels whose memory is predicted; None if nothing."""
    if os.environ.get("FLA_DISABLE_BACKEND_DISPATCH") == "1":
        return None
    return next((name for name in OTHER_CODE if find_spec(name)), None)


def refuse_family(key: str, config: PretrainedConfig) -> None:
    """Raise UserError, which names the parameter `key`, if fla's gated delta rule is not that of a model."""
    if not family_of(config.model_type).gated_delta_rule:
        known = ", ".join(families_that("gated_delta_rule"))
        raise UserError(
            f"{key}: fla is for layers with a gated delta rule ({known}); got {config.model_type}; use none"
        )
    text = config.get_text_config()
    largest = max(text.linear_key_head_dim, text.linear_value_head_dim)
    if largest > LARGEST_HEAD:
        raise UserError(
            f"{key}: fla's kernels take heads of up to {LARGEST_HEAD} values; {config.model_type} has heads of "
            f"{largest}; use none"
        )


def refuse_triton(key: str) -> None:
    """Raise UserError if the installed Triton computes fla's gradients wrongly on some GPUs."""
    if parse(found := version("triton")) < parse(RIGHT_TRITON):
        raise UserError(
            f"{key}: fla needs triton {RIGHT_TRITON} or later, whose gradients are right on every GPU; got {found}; "
            f'run `pip install "triton>={RIGHT_TRITON}"`, or use none'
        )


def fuse_delta_rule(model: PreTrainedModel) -> None:
    """Make the layers of a model call fla's gated delta rule; their tensors stay."""
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    def rule(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        packed_rows: PackedRows | None = None,
        cu_seqlens: None = None,
        **options: Any,
    ) -> Any:
        note_rows(packed_rows)
        if packed_rows is not None:
            # With the chunks of rows given, fla reads no values of tensors.
            options |= {"cu_seqlens": packed_rows.offsets, "chunk_indices": packed_rows.chunks_of(DELTA_RULE_CHUNK)}
        return chunk_gated_delta_rule(query, key, value, **options)

    for module in model.modules():
        if type(module).__name__.endswith("GatedDeltaNet"):
            OTHER_KERNELS.give_method(module, MethodType(with_global(unwrap(type(module).forward), RULE, rule), module))
