"""Trace another tool's training step on fake tensors, and predict its peak by phase."""

import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, TypeVar

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from transformers import PretrainedConfig

from lean_finetune.config.schema import Train
from lean_finetune.core.optional_bitsandbytes import bnb
from lean_finetune.memory.predict.deep_events import StepEvents, deep_events, events_of
from lean_finetune.memory.predict.depth_extrapolation import NotRepeated, WindowTrace, deep_peaks, deep_windows
from lean_finetune.memory.predict.layer_repetition import find_repetition, with_layers
from lean_finetune.memory.tool_step.deepspeed import ZeroOptimizer
from lean_finetune.memory.tool_step.litgpt_decoder import litgpt_model, updated_by_litgpt
from lean_finetune.memory.tool_step.losses import loss_of
from lean_finetune.memory.tool_step.offloading import Offloading
from lean_finetune.memory.tool_step.pair_losses import PAIR_LOSSES, Reference, pair_loss_of
from lean_finetune.memory.tool_step.sharing import Shared, Sharing, shared_by
from lean_finetune.memory.tool_step.tool_step import ToolStep
from lean_finetune.memory.trace.cached_fake_mode import CachedFakeMode, refuse_untraceable
from lean_finetune.memory.trace.cuda_kernels import Target
from lean_finetune.memory.trace.memory_trace import (
    ADAPTERS,
    GRADIENTS,
    INPUTS,
    QUANTISATION_STATE,
    WEIGHTS,
    MemoryTrace,
    Peak,
)
from lean_finetune.model.checkpointing import recompute_layers
from lean_finetune.model.load_model import fake_model
from lean_finetune.model.quantize import quantisation_tensors
from lean_finetune.patches.of_traces import LAYER_NORM, NORMS_AND_MLPS_OF_TOOLS, OLD_4BIT_PRODUCT, SHARED_KEYS
from lean_finetune.step.batches import BatchShape
from lean_finetune.step.loss import causal_lm, decoder_hidden
from lean_finetune.step.parallel_model import named_trained
from lean_finetune.step.run_optimizer import build_optimizer, device_state

CPU = torch.device("cpu")
HALVES = (torch.bfloat16, torch.float16)
Trace = TypeVar("Trace", bound=MemoryTrace)


@dataclass(frozen=True, kw_only=True)
class ToolRun:
    """A run of another tool on a GPU, or the share of one of several."""

    step: ToolStep
    config: PretrainedConfig
    train: Train
    """The run's values in our parameters; the precision is that on the device."""
    target: Target
    rows: int
    length: int
    micro_batches: int = 1
    """Micro-batches of an optimizer step: with several, gradients exist in forward."""
    optimizer_steps: int = 2
    """State of AdamW is made in the first one, and exists in the forward pass of the second one."""
    sharing: Sharing | None = None
    """How several GPUs share the run; None on one."""

    @property
    def shape(self) -> BatchShape:
        """The shape of each micro-batch."""
        return BatchShape(rows=self.rows, length=self.length, supervised=self.rows * self.length, packed_lengths=None)

    @property
    def built_as(self) -> Train:
        """The parameters from which the model is built, with the tool's types of weights and adapters."""
        step, half = self.step, self.train.precision == "fp16"
        precision = "fp32" if step.weights == "fp32" else "fp16" if half and self.train.adapted else "bf16"
        if precision == "bf16" and step.adapters == "16 bits":
            precision = "pure_bf16"
        lora = self.train.lora.model_copy(update={"joined": "none"})
        return self.train.model_copy(
            update={
                **{"precision": precision, "master_weights": False, "lora": lora},
                **{"fused_kernels": "none", "fused_norms": "none"},
            }
        )


def predict_tool(run: ToolRun) -> dict[str, Peak]:
    """Peaks by phase: loading, forward, backward, clip, optimizer.

    Raises:
        UserError: the step cannot be traced.
    """
    return predict_tool_events(run)[0]


def predict_tool_events(run: ToolRun) -> tuple[dict[str, Peak], StepEvents | None]:
    """The peaks of `predict_tool`, and every allocation and free; None for these if they do not repeat as the peaks do.

    Raises:
        UserError: the step cannot be traced.
    """
    repetition, _ = find_repetition(run.config, run.train)
    if repetition is not None:
        configs = [with_layers(run.config, depth) for depth in repetition.depths]
        traces = [trace_tool(WindowTrace, replace(run, config=config)) for config in configs]
        try:
            windows = deep_windows(traces, repetition, run.target.granularity_bytes)
        except NotRepeated:
            pass
        else:
            events = None
            with suppress(NotRepeated):
                events = deep_events(traces, repetition)
            return dict(deep_peaks(windows, run.target.granularity_bytes)[0]), events
    trace = trace_tool(MemoryTrace, run)
    return trace.peaks(), events_of(trace)


def trace_tool(kind: type[Trace], run: ToolRun) -> Trace:
    """Trace the first optimizer steps; state of AdamW is made in the first one."""
    target, step, zero = run.target, run.step, None if run.sharing is None else run.sharing.zero
    vocabulary = run.config.get_text_config().vocab_size
    trace = kind(granularity_bytes=target.granularity_bytes, rules=target.rules, vocab_size=vocabulary)
    with ExitStack() as stack:
        for context in (refuse_untraceable(run.config), CachedFakeMode(), target.attention()):
            stack.enter_context(context)
        if step.autocast:
            stack.enter_context(_layer_norms_in_fp32())
        if step.old_4bit:
            stack.enter_context(_old_4bit_layers())
        if step.copied_keys:
            stack.enter_context(SHARED_KEYS.during(lambda *args: False))
        model, head = _model(run)
        second = _second_model(run)
        trace.begin_steps(model)
        shared = stack.enter_context(shared_by(run.sharing, model, trace))
        trained = [parameter for _, parameter in named_trained(model)]
        with trace.phase("loading"):
            if zero is None:
                trace.register([*model.parameters(), *model.buffers()], WEIGHTS)
            else:
                zero.register(trace, [*model.parameters(), *model.buffers()])
            if second is not None:
                trace.register([*second.parameters(), *second.buffers()], WEIGHTS)
            trace.register(quantisation_tensors(model), QUANTISATION_STATE)
            if run.train.adapted and (zero is None or zero.stage < 3):
                trace.register(trained, ADAPTERS)
            trace.register_matmul_workspaces(target.constant_bytes, target.bias_workspace_bytes)
        for parameter in trained:
            parameter.register_post_accumulate_grad_hook(partial(_register_gradient, trace))
        optimizer = _optimizer(run, model, trace)
        with trace.recording():
            for _ in range(run.optimizer_steps):
                _run_step(run, trace, shared, partial(_forward, run, trace, model, head, second), optimizer, trained)
    return trace


def _register_gradient(trace: MemoryTrace, parameter: torch.Tensor) -> None:
    assert parameter.grad is not None
    trace.register([parameter.grad], GRADIENTS)


def _run_step(
    run: ToolRun,
    trace: MemoryTrace,
    shared: Shared,
    forward: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    optimizer: torch.optim.Optimizer | ZeroOptimizer,
    trained: list[nn.Parameter],
) -> None:
    """One optimizer step."""
    dtype = torch.float16 if run.train.precision == "fp16" else torch.bfloat16
    cuda_autocast = torch.is_autocast_enabled("cuda")
    for _ in range(run.micro_batches):
        trace.begin_micro_batch(run.shape)
        with trace.phase(INPUTS):
            ids_BT = torch.empty((run.rows, run.length), dtype=torch.int64)
            labels_BT = torch.empty_like(ids_BT)
        torch.set_autocast_enabled("cuda", run.step.autocast)  # peft asks for CUDA's.
        try:
            autocast = torch.autocast("cpu", dtype=dtype, enabled=run.step.autocast)
            offloading = Offloading() if run.step.offloaded == "all" else nullcontext()
            with trace.phase("forward"), autocast, offloading, _keeping_outputs(shared.model, run.step.kept_outputs):
                loss = shared.run(partial(forward, ids_BT, labels_BT))
            with trace.phase("backward"):
                buckets = optimizer.begin_backward() if isinstance(optimizer, ZeroOptimizer) else None
                loss.backward()
                del buckets
        finally:
            torch.set_autocast_enabled("cuda", cuda_autocast)
        del loss, ids_BT, labels_BT
    of_deepspeed = isinstance(optimizer, ZeroOptimizer)
    if run.train.max_grad_norm is not None and not run.train.optimizer_in_backward and not of_deepspeed:
        with trace.phase("clip"):
            shared.clip(trained)
    with trace.phase("optimizer"):
        if not run.train.optimizer_in_backward:
            optimizer.step()
        optimizer.zero_grad(set_to_none=True)


def _forward(
    run: ToolRun,
    trace: MemoryTrace,
    model: nn.Module,
    head: nn.Module,
    second: nn.Module | None,
    ids_BT: torch.Tensor,
    labels_BT: torch.Tensor,
) -> torch.Tensor:
    if run.step.decoder == "litgpt":
        return loss_of(run.step, head, model(ids_BT), labels_BT)
    with Offloading() if run.step.offloaded == "decoder" else nullcontext():
        hidden_BTD = decoder_hidden(causal_lm(model), ids_BT)
    if run.step.loss not in PAIR_LOSSES:
        return loss_of(run.step, head, hidden_BTD, labels_BT)
    reference: Reference | None = None
    if run.step.reference != "none":
        hidden = partial(_reference_hidden, model if second is None else second, ids_BT)
        reference = Reference(hidden=hidden, phase=partial(trace.phase, "reference"))
    return pair_loss_of(run.step, head, hidden_BTD, labels_BT, reference)


def _reference_hidden(model: nn.Module, ids_BT: torch.Tensor) -> tuple[nn.Module, torch.Tensor]:
    """The head and the hidden states of the model without its adapters."""
    lm: Any = causal_lm(model)
    adapted = [module for module in model.modules() if isinstance(module, BaseTunerLayer)]
    for module in adapted:  # peft's own context would also change what needs gradients.
        module._disable_adapters = True
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "None of the inputs have requires_grad=True")  # Of checkpointing.
        hidden_BTD = decoder_hidden(lm, ids_BT)
    for module in adapted:
        module._disable_adapters = False
    return lm.get_output_embeddings(), hidden_BTD


def _second_model(run: ToolRun) -> nn.Module | None:
    """The reference of a full fine-tuning; None where adapters are turned off instead."""
    if run.step.reference != "second model":
        return None
    model = fake_model(run.config, run.built_as.model_copy(update={"grad_ckpt": False}), CPU)
    return model.requires_grad_(False).eval()


def _optimizer(run: ToolRun, model: nn.Module, trace: MemoryTrace) -> torch.optim.Optimizer | ZeroOptimizer:
    """The optimizer. AdamW has no state yet: its first step makes it."""
    trained = [parameter for _, parameter in named_trained(model)]
    if run.sharing is not None and run.sharing.zero is not None:
        return ZeroOptimizer(run.sharing.zero, trained)
    if run.step.decoder == "litgpt" and run.train.adapted:
        trained = updated_by_litgpt(model)
    train = run.built_as.model_copy(update={"lr": 1.0, "weight_decay": 0.0})
    if train.optimizer == "adamw":
        foreach = run.step.foreach_update
        optimizer: torch.optim.Optimizer = torch.optim.AdamW(trained, lr=1.0, foreach=foreach, fused=not foreach)
    else:
        optimizer = build_optimizer(model, train, on_host=trace.on_host)
        trace.register(device_state(optimizer, train.optimizer, cuda=run.target.foreach), "optimizer")
    if train.optimizer_in_backward:
        _update_in_backward(optimizer)
    return optimizer


def _update_in_backward(optimizer: torch.optim.Optimizer) -> None:
    """Update each parameter as soon as its gradient is complete, and free the gradient."""
    groups = optimizer.param_groups

    def update(group: dict[str, Any], parameter: torch.Tensor) -> None:
        optimizer.param_groups = [{**group, "params": [parameter]}]
        optimizer.step()
        optimizer.param_groups = groups
        parameter.grad = None

    for group in groups:
        for parameter in group["params"]:
            parameter.register_post_accumulate_grad_hook(partial(update, group))


def _model(run: ToolRun) -> tuple[nn.Module, nn.Module]:
    """The model as the tool prepares it, and its head."""
    if run.step.decoder == "litgpt":
        return litgpt_model(run.config, run.built_as, run.step)
    model = fake_model(run.config, run.built_as, CPU)
    for module in model.modules():
        module.__dict__.pop("_cast_input_dtype", None)  # peft's own adapters convert their inputs.
    lm: Any = causal_lm(model)
    if run.train.grad_ckpt and run.step.reentrant:
        lm.enable_input_require_grads()
        recompute_layers(lm, {"use_reentrant": True, "preserve_rng_state": True})
    if run.step.fused_layers != "none":
        fuse_layers(lm, mlps=run.step.fused_layers == "norms and MLPs")
    head = lm.get_output_embeddings()
    _to_fp32(lm, run.step.fp32_parts)
    return model, head


def _to_fp32(lm: nn.Module, which: Literal["none", "all", "norms"]) -> None:
    """Replace frozen 16-bit parameters by fp32 ones; tied parameters stay tied."""
    made: dict[int, nn.Parameter] = {}
    for module in lm.modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is None or parameter.dtype not in HALVES or parameter.requires_grad:
                continue
            if which == "all" or (which == "norms" and parameter.ndim == 1):
                if id(parameter) not in made:
                    made[id(parameter)] = nn.Parameter(parameter.data.float(), requires_grad=False)
                module._parameters[name] = made[id(parameter)]


@contextmanager
def _keeping_outputs(model: nn.Module, names: tuple[str, ...]) -> Iterator[None]:
    """Keep the outputs of layers of these names until the block ends."""
    kept: list[Any] = []
    layers = [module for path, module in model.named_modules() if path.rpartition(".")[2] in names]
    hooks = [layer.register_forward_hook(lambda module, args, output: kept.append(output)) for layer in layers]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def _layer_norms_in_fp32() -> Iterator[None]:
    """Layer norms as CUDA's autocast runs them; that of CPUs leaves them in 16 bits."""
    normalise: Any = F.layer_norm

    def in_fp32(x: torch.Tensor, shape: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        if torch.is_autocast_enabled("cuda"):
            x = x.float()
            args = tuple(each.float() if isinstance(each, torch.Tensor) else each for each in args)
        normed: torch.Tensor = normalise(x, shape, *args, **kwargs)
        return normed

    with LAYER_NORM.during(in_fp32):
        yield


@contextmanager
def _old_4bit_layers() -> Iterator[None]:
    """Let 4-bit layers keep their inputs, and unpack by way of fp16, as bitsandbytes up to 0.42 does."""
    matmul = bnb.autograd._functions.MatMul4Bit
    forward, backward = matmul.forward, matmul.backward

    def keeping(ctx: Any, A: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        ctx.kept_input = A
        ctx.unpacked_shape = kwargs["quant_state"].shape if "quant_state" in kwargs else args[-1].shape
        unpacked = torch.empty(ctx.unpacked_shape, dtype=torch.float16)
        product = forward(ctx, A, *args, **kwargs)
        del unpacked
        return product

    def unpacking(ctx: Any, gradient: torch.Tensor) -> Any:
        unpacked = torch.empty(ctx.unpacked_shape, dtype=torch.float16)
        gradients = backward(ctx, gradient)
        del unpacked
        return gradients

    with OLD_4BIT_PRODUCT.during(staticmethod(keeping), staticmethod(unpacking)):
        yield


# Norms and MLPs as one kernel each, as Unsloth and Liger write them: what they save and allocate.

GATED = ("gate_proj", "up_proj", "down_proj")


class _FusedNorm(torch.autograd.Function):
    """Saves the input and one fp32 value a token; the gradient takes the memory of the incoming one."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        scales = x.new_empty(x.shape[:-1], dtype=torch.float32)
        ctx.save_for_backward(x, weight, scales)
        return torch.empty_like(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        x, weight, _ = ctx.saved_tensors
        return gradient, torch.empty_like(weight) if ctx.needs_input_grad[1] else None


class _FusedProduct(torch.autograd.Function):
    """silu(gate) × up: saves both, and writes their gradients into them."""

    @staticmethod
    def forward(ctx: Any, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(gate, up)
        return torch.empty_like(gate)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, ...]:
        saved: tuple[torch.Tensor, ...] = ctx.saved_tensors
        return saved


def fuse_layers(model: nn.Module, *, mlps: bool) -> None:
    """Let every RMS norm of a model run as one kernel; with `mlps` also the product inside its gated MLPs."""
    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm"):
            NORMS_AND_MLPS_OF_TOOLS.give_method(module, partial(_norm, module))
        elif mlps and all(hasattr(module, name) for name in GATED):
            NORMS_AND_MLPS_OF_TOOLS.give_method(module, partial(_mlp, module))


def _norm(module: Any, x: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = _FusedNorm.apply(x, module.weight)
    return result


def _mlp(module: Any, x: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = module.down_proj(_FusedProduct.apply(module.gate_proj(x), module.up_proj(x)))
    return result
