"""What the tests of memory share: settings, shapes, models, devices and plans."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import LlamaConfig

from cuda_memory.gpus import BF16_CAPABILITY, Device, context_of
from cuda_memory.units import MIB
from lean_finetune.core.atomic_files import sha256_file
from lean_finetune.memory.devices import cpu_device, resolve_gpu
from lean_finetune.memory.trace.cuda_kernels import Target, target_of
from lean_finetune.memory.trace.setting import Setting
from lean_finetune.plan.batch_plan import MicroBatch, Plan
from lean_finetune.step.offload.master_weights import MasterWeights
from lean_finetune.step.run_optimizer import device_state
from tests.kit.specs import joined  # noqa: F401 - for the tests
from tests.kit.specs import llama as large_llama
from tests.kit.specs import padded as shape  # noqa: F401
from tests.small_model import spec_of

CPU_TARGET = target_of(cpu_device(2**34))
ONEDNN_SCRATCH_BYTES = 256 * 1024
"""More than the scratch of a small model's bf16 product on one thread (115,840 bytes; 196,736 without AVX512_BF16)."""


def gpu_target(name: str) -> Target:
    return target_of(resolve_gpu(name)[0])


def card(memory_bytes: float, name: str = "card", capability: tuple[int, int] = (8, 0)) -> Device:
    return Device(name=name, kind="cuda", memory_bytes=int(memory_bytes), compute_capability=capability)


def card_for(tensor_bytes: float) -> str:
    """A size for hardware.gpu with room for these bytes of tensors and a CUDA context."""
    return f"{(tensor_bytes + context_of(BF16_CAPABILITY).max_bytes) / MIB:.3f}MiB"


def llama(**changes: Any) -> LlamaConfig:
    """A small Llama of two layers: a config, no weights."""
    sizes: dict[str, Any] = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 256,
        "tie_word_embeddings": False,
    }
    return LlamaConfig(**{**sizes, **changes})


LLAMA_3_1_8B = large_llama(4096, 14336, layers=32, heads=32, kv_heads=8)
LLAMA_3_1_70B = large_llama(8192, 28672, layers=80, heads=64, kv_heads=8)


def setting_of(**changes: Any) -> Setting:
    """A setting from fields of `Setting` and of its section train."""
    own = {name: changes.pop(name) for name in set(changes) & set(Setting.__dataclass_fields__)}
    return Setting(train=spec_of(**{"loss_chunk": 32, "max_grad_norm": 1.0, **changes}), **own)


def host_bytes(optimizer: torch.optim.Optimizer, setting: Setting) -> int:
    """Bytes of what train.offload=optimizer keeps in host memory: copies, their state and the buffers."""
    assert isinstance(optimizer, MasterWeights) and optimizer.link is not None
    tensors = [
        *optimizer.link.buffers,
        *(state["master"] for state in optimizer.state.values()),
        *device_state(optimizer.inner, setting.train.optimizer, cuda=False),
    ]
    sizes = {tensor.data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}  # Code books exist once.
    return sum(sizes.values())


def micro_batch(step: int, rows: Iterable[int], length: int, supervised: int, **changes: Any) -> MicroBatch:
    numbers = np.array(list(rows), np.int32)
    values: dict[str, Any] = {"epoch": 0, "rank": 0, "flat": False, **changes}
    return MicroBatch(step=step, rows=numbers, length=length, supervised=supervised, **values)


def plan_of(steps: Iterable[Iterable[tuple[int, int, int]]]) -> Plan:
    """A plan from (rows, length, supervised) of each step's micro-batches."""
    return Plan.of([micro_batch(n, range(one[0]), *one[1:]) for n, step in enumerate(steps) for one in step])


def pin(workspace: Path, model: Path) -> None:
    """Write the lock of a model's directory, as stage pin does."""
    lock: dict[str, Any] = {"kind": "directory", "name": str(model), "revision": None, "tokenizer_files": []}
    lock["files"] = {"config.json": sha256_file(model / "config.json")}
    (workspace / "model.json").write_text(json.dumps(lock))


SMALL: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
    "max_position_embeddings": 4096,
}
"""Sizes of a decoder whose layers a trace takes little time for."""
