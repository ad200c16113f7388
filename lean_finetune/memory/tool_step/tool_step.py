"""How another tool's training step differs in memory from ours: small descriptions, of which a step is traced."""

from dataclasses import dataclass
from typing import Literal

Loss = Literal[
    "logits",
    "shifted_logits",
    "fp32_logits",
    "logits_in_16_bits",
    "fp32_logits_alone",
    "chunked_nll",
    "liger",
    "cut_cross_entropy",
    "chunked_head",
    "chunked_logits",
    "pairs_by_rows",
    "pairs_log_softmax",
    "pairs_in_tiles",
]
"""How the loss is computed; `losses` has one function for each, and `pair_losses` for preference pairs."""
LOSS_TEXT: dict[Loss, str] = {
    "logits": "logits of all positions, and their fp32 copy",
    "shifted_logits": "logits of all positions, their fp32 copy, and a shifted copy (transformers 4.46 to 4.48)",
    "fp32_logits": "logits of all positions in fp32, and a shifted copy (transformers up to 4.45)",
    "logits_in_16_bits": "logits of all positions, and a shifted copy, in 16 bits",
    "fp32_logits_alone": "logits of all positions in fp32",
    "chunked_nll": "loss in chunks of 256 tokens, recomputed in backward with an fp32 copy of the head",
    "liger": "Liger's fused linear cross-entropy: one chunk of logits",
    "cut_cross_entropy": "cut cross-entropy: no logits",
    "chunked_head": "logits in eight chunks, in fp32 or (if compiled) 16 bits, all kept until backward",
    "chunked_logits": "logits in chunks of 128 tokens, all kept until backward",
    "pairs_by_rows": "logits of both answers in the model and in the reference, and a copy that is measured",
    "pairs_log_softmax": "fp32 logits of both answers and their log-softmax, in the model and in the reference",
    "pairs_in_tiles": "tiles of logits, computed again in backward",
}
"""What each loss keeps in memory."""


@dataclass(frozen=True, kw_only=True)
class ToolStep:
    """The order and the types of a tool's training step, as far as memory depends on them."""

    tool: str
    """Its name."""
    loss: Loss = "logits"
    cross_entropy: Literal["PyTorch", "in place", "compiled"] = "PyTorch"
    """How the loss of logits is computed: by PyTorch's operations; by one kernel, after which the logits become their
    gradient; or by compiled code, which keeps no copy of the logits and makes a new gradient."""
    compiled_head: bool = False
    """The head is compiled with the loss."""
    fused_layers: Literal["none", "norms", "norms and MLPs"] = "none"
    """Which parts of layers are one kernel, Unsloth's or Liger's: these save less and overwrite gradients."""
    autocast: bool = True
    """The forward pass runs under autocast to 16 bits."""
    outputs_in_fp32: bool = False
    """accelerate (under autocast) or Fabric converts what the model returns, logits included, to fp32."""
    logits_measured: bool = False
    """Accuracy and entropy are computed from the logits, which live until then."""
    fp32_parts: Literal["none", "all", "norms"] = "none"
    """Frozen parts in fp32: peft.prepare_model_for_kbit_training converts norms, embedding and head."""
    adapters: Literal["fp32", "16 bits"] = "fp32"
    weights: Literal["16 bits", "fp32"] = "16 bits"
    """Type of the base weights that are not quantised."""
    head_output_in_fp32: bool = False
    """A hook converts the head's output to fp32."""
    foreach_update: bool = False
    """AdamW updates with multi-tensor kernels, which need a temporary copy of the parameters."""
    kept_outputs: tuple[str, ...] = ()
    """Layers whose outputs live until the loss is known: a key/value cache that nobody reads is a view of them."""
    old_4bit: bool = False
    """bitsandbytes up to 0.42: 4-bit layers save their input for backward, and unpack by way of fp16."""
    decoder: Literal["transformers", "litgpt"] = "transformers"
    """Whose code the layers are."""
    reentrant: bool = False
    """Checkpointing runs the first forward pass without a graph, so that nothing is saved in it."""
    reference: Literal["none", "adapters off", "second model"] = "none"
    """What computes the log-probabilities that a loss of pairs compares with."""
    copied_keys: bool = False
    """Attention gets a copy of keys and values for each head of queries."""
    offloaded: Literal["none", "decoder", "all"] = "none"
    """Saved tensors of the decoder alone, or of the loss too, move to host memory (torchtune's OffloadActivations)."""
    adapted_head: bool = False
    """The head has an adapter, also where it is the embedding in transformers: LitGPT keeps them apart."""
    stable_embedding: bool = False
    """LitGPT replaces the embedding of a 4-bit model by one of bitsandbytes that gets gradients nobody reads."""
