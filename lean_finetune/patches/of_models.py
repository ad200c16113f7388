"""What models replace in transformers, peft and bitsandbytes, in training and in predictions alike.

Read in transformers 5.17, 5.23 and 5.24, and peft 0.21.0 and 0.21.2: nothing that a patch waits for has happened there.
"""

import sys
from collections.abc import Callable, Mapping
from inspect import isfunction
from typing import Any

from lean_finetune.patches.patch import Patch

NEVER = "never: a switch of params.yaml"


def _in_families(name: str, *families: str) -> tuple[str, ...]:
    return tuple(f"transformers.models.{family}.modeling_{family}:{name}" for family in families)


SELECTIVE_SCAN = Patch(
    replaces=_in_families("mamba_selective_scan", "falcon_mamba", "jamba", "mamba", "zamba"),
    why="loops over tokens: it keeps every state for backward, whose time grows with the square of a row's length",
    until="transformers computes chunks of a row in PyTorch",
)
LINEAR_OF_FALCON = Patch(
    replaces=_in_families("FalconLinear", "falcon"),
    why="bitsandbytes packs nn.Linear alone, not this subclass",
    until="Falcon's layers are nn.Linear",
)
FULL_OR_MASK = Patch(
    replaces=("transformers.masking_utils:create_bidirectional_mask",),
    why="reads values of a mask that hides nothing, but not in a trace, which would count a mask that does not exist",
    until="masks are left out by what their caller says, not by their values",
)
CONVOLUTION = Patch(
    replaces=_in_families("causal_conv1d_fn", "qwen3_next", "lfm2", "bamba", "kimi_linear"),
    why="a packed row would see the last tokens of the row before it",
    until="transformers' own functions take the bounds of packed rows",
)
DELTA_RULE = Patch(
    replaces=(
        *_in_families("torch_chunk_gated_delta_rule", "qwen3_next", "qwen3_5", "olmo_hybrid"),
        *_in_families("chunk_kimi_delta_attention", "kimi_linear"),
    ),
    why="a packed row would see the state that the row before it left",
    until=CONVOLUTION.until,
)
MAMBA2_SCAN = Patch(
    replaces=_in_families("mamba2_chunk_scan", "mamba2", "bamba", "zamba2", "falcon_h1", "nemotron_h"),
    why=DELTA_RULE.why,
    until=CONVOLUTION.until,
)
HUB_KERNELS = Patch(
    replaces=("transformers.integrations.hub_kernels:use_kernel_func_from_hub_with_fallback",),
    why="runs mamba-ssm, causal-conv1d and fla where they are installed: they cannot be traced, and take other memory",
    until="an option of transformers turns them off",
)
IN_FAMILIES: Mapping[str, Patch] = {
    "FalconLinear": LINEAR_OF_FALCON,
    "causal_conv1d_fn": CONVOLUTION,
    "chunk_kimi_delta_attention": DELTA_RULE,
    "create_bidirectional_mask": FULL_OR_MASK,
    "mamba2_chunk_scan": MAMBA2_SCAN,
    "mamba_selective_scan": SELECTIVE_SCAN,
    "torch_chunk_gated_delta_rule": DELTA_RULE,
}
"""What is replaced in the code of every family that has something of the name."""


def use_in_family(kind: type, replacements: Mapping[str, Callable[[Any], Any]]) -> None:
    """Replace functions of a family's code for good: `IN_FAMILIES` by their names, and `HUB_KERNELS` where they are.

    Args:
        kind: a class of the family. Modules of its base classes in transformers.models are changed too.
        replacements: by name in `IN_FAMILIES`, what makes the replacement of what the family's code has. It returns a
            replacement as it is.
    """
    assert replacements.keys() == IN_FAMILIES.keys()
    (wrapping,) = HUB_KERNELS.originals()
    for name in {base.__module__ for base in kind.__mro__ if base.__module__.startswith("transformers.models.")}:
        code = sys.modules[name]
        for key, value in list(vars(code).items()):
            of_hub = isfunction(value) and value.__code__.co_filename == wrapping.__code__.co_filename
            plain = getattr(value, "__wrapped__", value) if of_hub else value
            if (new := replacements[key](plain) if key in replacements else plain) is not value:
                setattr(code, key, new)


GEMMA3N_OF_TEXT = Patch(
    replaces=("transformers.models.gemma3n.modeling_gemma3n:Gemma3nModel",),
    why="embeds every token as one of its encoders too, by parts that text never reaches and that are left out",
    until="its forward skips parts that the model lacks",
)
TIMM_WITHOUT_LAYERS = Patch(
    replaces=("transformers.models.timm_wrapper.modeling_timm_wrapper:TimmWrapperModel.__init__",),
    why="needs the package timm to build an encoder of Gemma 3n, which is left out at once",
    until="a model can be built without its encoders",
)
LLAMA4_EXPERTS = Patch(
    replaces=_in_families("Llama4TextExperts", "llama4") + _in_families("Llama4TextMoe", "llama4"),
    why="runs every expert on every token; its experts call no registered function as those of other families do",
    until="Llama 4's experts use transformers' interface of experts",
)
PACKED_SEARCH = Patch(
    replaces=("transformers.masking_utils:find_packed_sequence_indices",),
    why="reads values of positions to find packed rows: a GPU is waited for, and fake tensors have no values",
    until="an argument of a forward says that no rows are packed",
)
EXPERT_ADAPTERS = Patch(
    replaces=("peft.tuners.lora.layer:ParamWrapper",),
    why="adds B A to the weights of all experts and keeps the sum for backward",
    until="peft multiplies the rows of an expert by its adapter",
)
GIVEN_NAMES = Patch(
    replaces=("peft.utils.transformers_weight_conversion:convert_peft_config_for_transformers",),
    why="takes the names of some layers for those of experts in older files, and adapts other layers than those named",
    until="peft converts only the configs of older files",
)
TRAINED_ROWS = Patch(
    replaces=("peft.tuners.trainable_tokens.layer:TrainableTokensLayer",),
    why="copies the whole embedding in each forward, and its backward makes a gradient of that size",
    until="peft computes the trained rows alone",
)
TRAINED_PARTS = Patch(
    replaces=("peft.utils.other:ModulesToSaveWrapper",),
    why="trains a copy of a part beside the decoder, and keeps the module as it was besides",
    until="peft trains a module in place",
)
INPUTS_AS_AUTOCAST = Patch(
    replaces=("peft.tuners.tuners_utils:BaseTunerLayer._cast_input_dtype",),
    why="makes a copy of a layer's input in fp32, which autocast converts back and saves",
    until="peft leaves the type of inputs to autocast",
)
FUSED_NORMS = Patch(
    replaces=_in_families("LlamaRMSNorm.forward", "llama"),
    why="computes in eight operations and saves its input in fp32; a kernel of PyTorch saves one value a token",
    until="transformers calls nn.functional.rms_norm",
)
_LAYERS_OF_LLAMA = _in_families("LlamaMLP.forward", "llama") + FUSED_NORMS.replaces
FUSED_LAYERS = Patch(
    replaces=_in_families("LlamaMLP.forward", "llama") + _in_families("LlamaAttention.forward", "llama"),
    why="kernels of this project save fewer tensors, in families whose code equals Llama's (train.fused_kernels)",
    until=NEVER,
)
OTHER_KERNELS = Patch(
    replaces=(
        *_LAYERS_OF_LLAMA,
        *_in_families("LlamaAttention.forward", "llama"),
        *_in_families("Qwen3NextGatedDeltaNet.forward", "qwen3_next"),
    ),
    why="kernels of Liger-Kernel or flash-linear-attention save fewer tensors (train.fused_kernels)",
    until=NEVER,
)
JOINED_ADAPTERS = Patch(
    replaces=("peft.tuners.lora.layer:Linear.forward",),
    why="layers of one input compute together and save it once (train.lora.joined)",
    until=NEVER,
)
TILES = Patch(
    replaces=_LAYERS_OF_LLAMA,
    why="MLPs and norms compute one part of the tokens after the other (train.sequence_tiles)",
    until=NEVER,
)
FROZEN_TOWER = Patch(
    replaces=("torch.nn:Module.forward",),
    why="transformers makes the output of a patch embedding require a gradient: a frozen tower would keep activations",
    until="transformers asks for gradients of a decoder's embedding alone",
)
VOCABULARY_SHARD = Patch(
    replaces=("torch.nn:Embedding.forward",),
    why="a process looks up the tokens of its rows alone (train.tensor_parallel)",
    until=NEVER,
)
