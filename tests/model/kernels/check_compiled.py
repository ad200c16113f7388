"""Triton's kernels compiled for GPUs that this machine need not have: registers, and no value outside of them.

`test_kernels.py` runs this in a process of its own, without TRITON_INTERPRET.
"""

import json
import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from lean_finetune.model.kernels import adamw_8bit_kernel as adamw

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
            subprocess.run([TOOLS / tool, option, file.name], capture_output=True, text=True, check=True).stdout
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


KERNELS = {f"8-bit AdamW, {kind}": (adamw_8bit, kind) for kind in ("bf16", "fp16", "fp32")}


def main() -> None:
    """Print what each kernel uses."""
    for name, (compiled, kind) in KERNELS.items():
        for capability in CAPABILITIES:
            print(json.dumps({"kernel": name, "capability": capability, **compiled(kind, capability)}))


if __name__ == "__main__":
    main()
