"""What predictions replace in other packages, as they compute on fake tensors that stand for those of a GPU.

All of it ends with the trace. Nothing of it waits for another package.
"""

from lean_finetune.patches.patch import Patch

ALWAYS = "never: fake tensors on a CPU stand for those of a GPU"

DROPOUT_AND_SOFTMAX = Patch(
    replaces=("torch.nn.functional:dropout", "torch.nn.functional:softmax"),
    why="CUDA's dropout saves one byte a value, and its softmax of fp16 converts to fp32 inside its kernel",
    until=ALWAYS,
)
LAYER_NORM = Patch(
    replaces=("torch.nn.functional:layer_norm",),
    why="CUDA's autocast runs it in fp32, that of CPUs in 16 bits",
    until=ALWAYS,
)
SHARED_KEYS = Patch(
    replaces=("transformers.integrations.sdpa_attention:use_gqa_in_sdpa",),
    why="other tools give attention a copy of keys and values for each head of queries",
    until=ALWAYS,
)
RNG_STATE = Patch(
    replaces=("torch:get_rng_state",),
    why="counts the states that checkpointing saves for dropout",
    until=ALWAYS,
)
KNOWN_LISTS = Patch(
    replaces=("torch._subclasses.fake_tensor:FakeTensor.tolist",),
    why="reads known values at once, not one by one",
    until=ALWAYS,
)
LAUNCHES = Patch(
    replaces=("triton.runtime.jit:KernelInterface.__getitem__",),
    why="a machine without a GPU launches no kernels",
    until=ALWAYS,
)
SHARED_MEMORY_CHECK = Patch(
    replaces=("fla.ops.common.chunk_o:check_shared_mem",),
    why="asks for the shared memory of this machine's GPU",
    until=ALWAYS,
)
NORM_GRADIENT = Patch(
    replaces=("liger_kernel.ops.rms_norm:rms_norm_backward",),
    why="allocates one row of partial sums on a machine without a GPU, not one for each multiprocessor",
    until=ALWAYS,
)
RESIZED = Patch(
    replaces=("torch:UntypedStorage.resize_",),
    why="FSDP frees and allocates gathered layers by it, which the trace counts",
    until=ALWAYS,
)
STREAMS = Patch(
    replaces=("torch.cpu:stream",),
    why="notes the stream of an allocation: FSDP selects streams on a CPU too, where they mean nothing",
    until=ALWAYS,
)
QUANT_STATE = Patch(
    replaces=("bitsandbytes.nn.modules:fix_4bit_weight_quant_state_from_module",),
    why="converts a gathered weight to a class that fake tensors cannot have",
    until=ALWAYS,
)
_GROUP = "torch.distributed.fsdp._fully_shard._fsdp_param_group:"
SHARDED_SHAPES = Patch(
    replaces=("torch.distributed.tensor._sharding_prop:ShardingPropagator._propagate_tensor_meta_non_cached",),
    why="derives shapes on fake tensors of its own, which are not memory of the step",
    until=ALWAYS,
)
GATHERED_LAYERS = Patch(
    replaces=tuple(
        _GROUP + name
        for name in ("foreach_all_gather", "foreach_all_gather_copy_out", "FSDPParamGroup.wait_for_unshard")
    ),
    why="the trace counts what they allocate as sharding",
    until=ALWAYS,
)
REDUCED_GRADIENTS = Patch(
    replaces=(f"{_GROUP}foreach_reduce",),
    why="the trace counts whole gradients and their shards apart",
    until=ALWAYS,
)
SHARDS_ON_HOST = Patch(
    replaces=("torch.distributed.fsdp._fully_shard._fsdp_param:FSDPParam.all_gather_inputs",),
    why="PyTorch copies nothing from a CPU to a CPU, as it does from the host to a GPU",
    until=ALWAYS,
)
SAME_STORAGE = Patch(
    replaces=("torch:Tensor.data_ptr", "torch.distributed.fsdp._flat_param:_same_storage"),
    why="compare storages by their addresses, which fake tensors lack",
    until=ALWAYS,
)
OLD_4BIT_PRODUCT = Patch(
    replaces=(
        "bitsandbytes.autograd._functions:MatMul4Bit.forward",
        "bitsandbytes.autograd._functions:MatMul4Bit.backward",
    ),
    why="other tools' bitsandbytes, up to 0.42, keeps inputs and unpacks by way of fp16",
    until="no described tool runs it",
)
ALIKE_LAYERS = Patch(
    replaces=("torch.nn:Module.forward",),
    why="a layer like two that ran repeats their events",
    until=ALWAYS,
)
NORMS_AND_MLPS_OF_TOOLS = Patch(
    replaces=("torch.nn:Module.forward",),
    why="Unsloth's and Liger's kernels save and allocate other tensors",
    until=ALWAYS,
)
