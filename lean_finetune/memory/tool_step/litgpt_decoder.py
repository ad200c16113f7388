"""The shapes and the order of operations of LitGPT's decoder, which is not that of transformers.

It multiplies queries, keys and values by one matrix, repeats grouped keys and values, pads the adapters' outputs with
zeros, keeps embedding and head apart, and quantises the head too.

Shapes: B rows, T tokens, C hidden size, H heads, D head size.
"""

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from transformers import PretrainedConfig

from lean_finetune.config.schema import Train
from lean_finetune.memory.tool_step.tool_step import ToolStep
from lean_finetune.memory.trace.cuda_kernels import cuda_attention
from lean_finetune.model.precision import base_dtype

FLASH_CAPABILITY = (8, 0)
BLOCK, NESTED_BLOCK = 64, 256
"""Values of a 4-bit block, which share a scale; scales that share one, if they are quantised too."""
ZERO_CENTRED = {"gemma", "gemma2"}
"""Families whose norms add 1 to the weight, and which scale embeddings."""
PARALLEL = {"gpt_neox", "phi", "falcon"}
"""Families whose attention and MLP read the same hidden states."""
ONE_NORM = {"phi", "falcon"}
"""Families in which they also share a norm."""
LITGPT_FAMILIES = {*ZERO_CENTRED, *PARALLEL, "llama", "mistral", "phi3", "qwen2"}


class RmsNorm(nn.Module):
    """In fp32, whose copy of the input is saved."""

    def __init__(self, width: int, dtype: torch.dtype, *, zero_centred: bool):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width, dtype=dtype))
        self._zero_centred = zero_centred

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalise (…, C)."""
        values = x.float()
        normed = values * torch.rsqrt(torch.mean(values * values, dim=-1, keepdim=True) + 1e-6)
        weight = 1 + self.weight if self._zero_centred else self.weight
        return (normed * weight.float()).to(x.dtype)


class _Multiply4Bit(torch.autograd.Function):
    """A product with a weight that is unpacked on the way, as bitsandbytes does it."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, layer: "Linear4Bit", bias: torch.Tensor | None) -> torch.Tensor:
        ctx.layer = layer
        ctx.kept = x if layer.is_old else None
        return F.linear(x, layer.unpacked(x.dtype), bias)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return gradient @ ctx.layer.unpacked(gradient.dtype), None, None


class Linear4Bit(nn.Module):
    """A frozen 4-bit layer."""

    packed: torch.Tensor
    scales: torch.Tensor

    def __init__(self, inputs: int, outputs: int, dtype: torch.dtype, *, bias: bool, train: Train, old_4bit: bool):
        super().__init__()
        self._shape, self.is_old = (outputs, inputs), old_4bit
        blocks = -(-inputs * outputs // BLOCK)
        scale_dtype = torch.uint8 if train.quant.double else torch.float32
        self.register_buffer("packed", torch.empty(inputs * outputs // 2, dtype=torch.uint8))
        self.register_buffer("scales", torch.empty(blocks, dtype=scale_dtype))
        if train.quant.double:
            self.register_buffer("scales_of_scales", torch.empty(-(-blocks // NESTED_BLOCK)))
        self.bias = nn.Parameter(torch.empty(outputs, dtype=dtype)) if bias else None

    def unpacked(self, dtype: torch.dtype) -> torch.Tensor:
        """The weight in 16 bits, for which nested scales are unpacked to fp32 first."""
        scales: torch.Tensor | None = None
        if self.scales.dtype == torch.uint8:
            scales = self.scales.float() + 0.0
        weight = self.packed.new_empty(self._shape, dtype=torch.float16 if self.is_old else dtype)
        del scales
        return weight.to(dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Multiply (…, inputs)."""
        product: torch.Tensor = _Multiply4Bit.apply(x, self, self.bias)
        return product


class AdaptedLinear(nn.Module):
    """A layer, and if `adapts` its adapter."""

    def __init__(self, base: nn.Module, inputs: int, outputs: int, dtype: torch.dtype, train: Train, *, adapts: bool):
        super().__init__()
        self.base, self._dropout = base, train.lora.dropout
        self.A = self.B = None
        if adapts:
            self.A = nn.Parameter(torch.empty((train.lora.rank, inputs), dtype=dtype))
            self.B = nn.Parameter(torch.empty((outputs, train.lora.rank), dtype=dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Multiply (…, inputs)."""
        product: torch.Tensor = self.base(x)
        if self.A is None or self.B is None:
            return product
        return product + (F.dropout(x, self._dropout) @ self.A.transpose(0, 1) @ self.B.transpose(0, 1)) * 2.0


class AdaptedQkv(nn.Module):
    """Queries, keys and values by one matrix; the adapters of some are padded with zeros to the width of all."""

    places: torch.Tensor

    def __init__(self, base: nn.Module, inputs: int, widths: list[int], dtype: torch.dtype, train: Train):
        super().__init__()
        self.base, self._dropout, self._outputs = base, train.lora.dropout, sum(widths)
        names = ("q_proj", "k_proj", "v_proj")
        whole = bool({"query_key_value", "qkv_proj", "all-linear"} & set(train.lora.targets))
        chosen = [whole or name in train.lora.targets for name in names] if train.adapted else [False] * 3
        self._adapted = [width for width, on in zip(widths, chosen, strict=True) if on]
        self._pads = not all(chosen)
        self._same = len(set(widths)) == 1
        self.A = self.B = None
        if self._adapted:
            self.A = nn.Parameter(torch.empty((train.lora.rank * len(self._adapted), inputs), dtype=dtype))
            self.B = nn.Parameter(torch.empty((sum(self._adapted), train.lora.rank), dtype=dtype))
            self.register_buffer("places", torch.empty(sum(self._adapted), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Multiply (B, T, C)."""
        product: torch.Tensor = self.base(x)
        if self.A is None or self.B is None:
            return product
        after_A = F.linear(F.dropout(x, self._dropout), self.A).transpose(-2, -1)
        weight = self.B.unsqueeze(-1)
        if self._same:
            after_B = F.conv1d(after_A, weight, groups=len(self._adapted))
        else:
            parts = zip(after_A.chunk(len(self._adapted), dim=1), weight.split(self._adapted), strict=True)
            after_B = torch.cat([F.conv1d(part, of_part) for part, of_part in parts], dim=1)
        after_B = after_B.transpose(-2, -1)
        if self._pads:
            zeros = after_B.new_zeros((*after_B.shape[:-1], self._outputs))
            after_B = zeros.index_copy_(-1, self.places.clone(), after_B)
        return product + after_B * 2.0


class Layer(nn.Module):
    """A decoder layer."""

    def __init__(self, config: PretrainedConfig, dtype: torch.dtype, train: Train, *, old_4bit: bool):
        super().__init__()
        self._family = config.model_type
        C, self._H = config.hidden_size, config.num_attention_heads
        self._D = _head_size(config)
        groups = 1 if getattr(config, "multi_query", False) else getattr(config, "num_key_value_heads", None)
        self._G = groups or self._H
        self.rotated = int(self._D * _rotated_part(config))
        rms = gated = hasattr(config, "rms_norm_eps")
        inner = getattr(config, "intermediate_size", None) or getattr(config, "ffn_hidden_size", None) or 4 * C
        bias = self._family in ("gpt_neox", "phi")
        attention_bias = bias or bool(getattr(config, "attention_bias", False)) or self._family == "qwen2"
        targets = set(train.lora.targets) if train.adapted else set()
        everything = "all-linear" in targets

        def linear(inputs: int, outputs: int, *names: str, bias: bool = bias) -> AdaptedLinear:
            base = _linear(inputs, outputs, dtype, train, bias=bias, old_4bit=old_4bit)
            adapts = everything or bool(targets & set(names))
            return AdaptedLinear(base, inputs, outputs, dtype, train, adapts=adapts)

        def norm() -> nn.Module:
            if rms:
                return RmsNorm(C, dtype, zero_centred=self._family in ZERO_CENTRED)
            return nn.LayerNorm(C, dtype=dtype)

        widths = [self._H * self._D, self._G * self._D, self._G * self._D]
        base = _linear(C, sum(widths), dtype, train, bias=attention_bias, old_4bit=old_4bit)
        self.qkv = AdaptedQkv(base, C, widths, dtype, train)
        self.proj = linear(self._H * self._D, C, "o_proj", "dense")
        self.norm_1 = norm()
        self.norm_2 = None if self._family in ONE_NORM else norm()
        twice = self._family == "gemma2"
        self.after_attention, self.after_mlp = (norm() if twice else nn.Identity() for _ in range(2))
        self.fc_1 = linear(C, inner, "gate_proj", "fc1", "dense_h_to_4h")
        self.fc_2 = linear(C, inner, "up_proj") if gated else None
        self.down = linear(inner, C, "down_proj", "fc2", "dense_4h_to_h")
        self._cap = getattr(config, "attn_logit_softcapping", None)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """Hidden states (B, T, C)."""
        normed = self.norm_1(x)
        attended = self.after_attention(self._attend(normed, cos, sin))
        if self._family in PARALLEL:
            if self.norm_2 is not None:
                normed = self.norm_2(x)
            x = attended + x
        else:
            assert self.norm_2 is not None
            x = attended + x
            normed = self.norm_2(x)
        del attended
        return self.after_mlp(self._mlp(normed)) + x

    def _mlp(self, x: torch.Tensor) -> torch.Tensor:
        first = self.fc_1(x)
        if self.fc_2 is None:
            return self.down(F.gelu(first))
        second = self.fc_2(x)
        activated = F.gelu(first) if self._family in ZERO_CENTRED else F.silu(first)
        return self.down(activated * second)

    def _attend(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        B, T, _ = x.shape
        parts = self.qkv(x).split([self._H * self._D, self._G * self._D, self._G * self._D], dim=-1)
        heads = zip(parts, (self._H, self._G, self._G), strict=True)
        query, key, value = (part.view(B, T, count, self._D).transpose(1, 2) for part, count in heads)
        del parts
        query, key = (
            torch.cat((_rotate(one[..., : self.rotated], cos, sin), one[..., self.rotated :]), dim=-1)
            for one in (query, key)
        )
        if self._G != self._H:
            key, value = (one.repeat_interleave(self._H // self._G, dim=1) for one in (key, value))
        if self._cap is None:
            out = cuda_attention(FLASH_CAPABILITY)(self, query, key, value, None)[0]
        else:
            out = _capped_attention(query, key, value, self._cap).transpose(1, 2)
        return self.proj(out.reshape(B, T, -1))


def _capped_attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, cap: float) -> torch.Tensor:
    """Attention whose scores have a soft cap, so that all of them exist."""
    scores = query @ key.mT * 0.1
    scores = torch.tanh(scores / cap) * cap
    mask = torch.ones(query.shape[2], query.shape[2], dtype=query.dtype).triu(diagonal=1)
    mask.masked_fill_(mask.bool(), torch.finfo(query.dtype).min)
    scores = scores + mask
    weights = F.softmax(scores, dim=-1, dtype=torch.float).to(query.dtype)
    return weights @ value


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    half = x.shape[-1] // 2
    turned = torch.cat((-x[..., half:], x[..., :half]), dim=-1)
    return ((x * cos) + (turned * sin)).to(x.dtype)


def _head_size(config: PretrainedConfig) -> int:
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def _rotated_part(config: PretrainedConfig) -> float:
    """Share of a head's values that positions rotate."""
    parameters = getattr(config, "rope_parameters", None) or {}
    part = parameters.get("partial_rotary_factor") if isinstance(parameters, dict) else None
    return part or getattr(config, "partial_rotary_factor", None) or getattr(config, "rotary_pct", None) or 1.0


def _linear(inputs: int, outputs: int, dtype: torch.dtype, train: Train, *, bias: bool, old_4bit: bool) -> nn.Module:
    if train.method == "qlora":
        return Linear4Bit(inputs, outputs, dtype, bias=bias, train=train, old_4bit=old_4bit)
    return nn.Linear(inputs, outputs, bias=bias, dtype=dtype)


class LitGptDecoder(nn.Module):
    """Embedding, layers and last norm; `config` and `layers` are as transformers names them."""

    cos: torch.Tensor
    sin: torch.Tensor

    def __init__(self, config: PretrainedConfig, train: Train, step: ToolStep):
        super().__init__()
        self._recomputes = train.grad_ckpt  # LitGPT does so on several GPUs only.
        self.config, dtype, old_4bit = config, base_dtype(train), step.old_4bit
        C = config.hidden_size
        self.embedding = nn.Embedding(config.vocab_size, C, dtype=dtype)
        self.embedding_norm: nn.Module | None = None
        if train.method == "qlora" and step.stable_embedding:  # The optimizer keeps the first embedding.
            self.first_embedding, self.embedding_norm = self.embedding, nn.LayerNorm(C, dtype=dtype)
            self.embedding = nn.Embedding(config.vocab_size, C, dtype=dtype)
        self.layers = nn.ModuleList(
            Layer(config, dtype, train, old_4bit=old_4bit) for _ in range(config.num_hidden_layers)
        )
        zero_centred = config.model_type in ZERO_CENTRED
        rms = hasattr(config, "rms_norm_eps")
        self.last_norm = RmsNorm(C, dtype, zero_centred=zero_centred) if rms else nn.LayerNorm(C, dtype=dtype)
        head = _linear(C, config.vocab_size, dtype, train, bias=config.model_type == "phi", old_4bit=old_4bit)
        adapts = train.adapted and (step.adapted_head or "lm_head" in train.lora.targets)
        self.head = AdaptedLinear(head, C, config.vocab_size, dtype, train, adapts=adapts)
        rotated = int(_head_size(config) * _rotated_part(config))
        for name in ("cos", "sin"):
            self.register_buffer(name, torch.empty((getattr(config, "max_position_embeddings", 4096), rotated)))

    def get_decoder(self) -> "LitGptDecoder":
        """Itself: what holds the layers."""
        return self

    def forward(self, ids_BT: torch.Tensor) -> torch.Tensor:
        """The last hidden states (B, T, C)."""
        x = self.embedding(ids_BT)
        if self.embedding_norm is not None:
            x = self.embedding_norm(x)
        if self.config.model_type in ZERO_CENTRED:
            x = x * 2.0
        cos, sin = self.cos[: ids_BT.shape[1]], self.sin[: ids_BT.shape[1]]
        for layer in self.layers:
            x = checkpoint(layer, x, cos, sin, use_reentrant=False) if self._recomputes else layer(x, cos, sin)
        return self.last_norm(x)


def litgpt_model(config: PretrainedConfig, train: Train, step: ToolStep) -> tuple[nn.Module, nn.Module]:
    """The decoder and its head on fake tensors, frozen as LitGPT freezes them."""
    model = LitGptDecoder(config, train, step)
    if train.adapted:
        for name, parameter in model.named_parameters():
            stable = model.embedding_norm is not None and name.startswith("embedding")
            parameter.requires_grad_(name.rpartition(".")[2] in ("A", "B") or stable)
    return model.train(), model.head


def updated_by_litgpt(model: nn.Module) -> list[nn.Parameter]:
    """The parameters that the optimizer updates. LitGPT makes the embedding later, so it is left out."""
    named = model.named_parameters()
    return [p for name, p in named if p.requires_grad and not name.startswith("embedding")]
