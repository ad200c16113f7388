"""Triton's kernels compiled for GPUs that this machine need not have: registers, and no value outside of them.

`test_kernels.py` runs this in a process of its own, without TRITON_INTERPRET.
"""

import json
import re
import tempfile
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from lean_finetune.model.kernels import adamw_8bit_kernel as adamw
from lean_finetune.model.kernels import layer_kernels as layer
from tests.processes import run_bounded

CAPABILITIES = (80, 90)
TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


def usage(kernel: Any, types: dict[str, str], constants: dict[str, Any], warps: int, capability: int) -> dict[str, int]:
    """Registers, stack bytes, barriers and instructions of a kernel whose pointers and sizes are multiples of 16."""
    names = kernel.arg_names
    aligned = {(names.index(name),): [["tt.divisibility", 16]] for name, kind in types.items() if kind != "fp32"}
    signature = {name: types.get(name, "constexpr") for name in names}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=aligned)
    code = triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": warps})
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(code.asm["cubin"])
        file.flush()
        text, assembly = (
            run_bounded([TOOLS / tool, option, file.name], check=True).stdout
            for tool, option in (("cuobjdump", "-res-usage"), ("nvdisasm", "-c"))
        )
    found = {name.lower(): int(value) for name, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", text)}
    instructions = len(re.findall(r"/\*[0-9a-f]{4}\*/", assembly))
    return {**found, "barriers": assembly.count("BAR.SYNC"), "instructions": instructions}


def adamw_8bit(kind: str, capability: int) -> dict[str, int]:
    """8-bit AdamW of parameters of a type."""
    pointers = {
        **{name: f"*{kind}" for name in ("parameter_ptr", "gradient_ptr")},
        **{f"codes{n}_ptr": "*u8" for n in (1, 2)},
        **{f"scales{n}_ptr": "*fp32" for n in (1, 2)},
    }
    numbers = ("decay", "step_size", "epsilon", "beta1", "beta2", "rest1", "rest2")
    types = {**pointers, "values": "i32", **dict.fromkeys(numbers, "fp32")}
    constants = {"BLOCK": adamw.BLOCK, "WARPS": adamw.WARPS}
    return usage(adamw.adamw_8bit_kernel, types, constants, adamw.WARPS, capability)


def silu_mul(kind: str, capability: int) -> dict[str, int]:
    """The gated activation."""
    types = {**{name: f"*{kind}" for name in ("gate_ptr", "up_ptr", "out_ptr")}, "values": "i32"}
    return usage(layer.silu_mul_kernel, types, {"BLOCK": layer.BLOCK}, layer.WARPS, capability)


def silu_mul_gradients(kind: str, capability: int) -> dict[str, int]:
    """Its gradients."""
    pointers = ("grad_ptr", "gate_ptr", "up_ptr", "gate_grad_ptr", "up_grad_ptr")
    types = {**{name: f"*{kind}" for name in pointers}, "values": "i32"}
    return usage(layer.silu_mul_gradients_kernel, types, {"BLOCK": layer.BLOCK}, layer.WARPS, capability)


def rotate(kind: str, capability: int) -> dict[str, int]:
    """The rotation of Llama-3.1-8B's queries and keys."""
    tensors = ("query", "key", "query_out", "key_out", "cos", "sin")
    strides = [f"{name}_{of}_stride" for name in ("query", "key") for of in ("row", "token", "head")]
    types = {**{f"{name}_ptr": f"*{kind}" for name in tensors}, **dict.fromkeys([*strides, "angle_row_stride"], "i32")}
    constants = {"INVERSE": False, "QUERY_HEADS": 32, "KEY_HEADS": 8, "HALF": 64, "WIDTH": 64, "TILE": 16}
    return usage(layer.rotate_kernel, {**types, "tokens": "i32"}, constants, layer.WARPS, capability)


KERNELS = {
    **{f"8-bit AdamW, {kind}": (adamw_8bit, kind) for kind in ("bf16", "fp16", "fp32")},
    **{f"{each.__name__}, bf16": (each, "bf16") for each in (silu_mul, silu_mul_gradients, rotate)},
}


def main() -> None:
    """Print what each kernel uses."""
    for name, (compiled, kind) in KERNELS.items():
        for capability in CAPABILITIES:
            print(json.dumps({"kernel": name, "capability": capability, **compiled(kind, capability)}))


if __name__ == "__main__":
    main()
