"""Triton's kernels of this project: computed by its interpreter, and compiled for GPUs, on a machine without one."""

import json
import os
import sys
from importlib.util import find_spec

import pytest

from tests.conftest import ROOT
from tests.processes import run_bounded

needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="needs triton: pip install triton (Linux)")
MOST_REGISTERS = 64
"""Of a thread: a multiprocessor then has half of the threads that it can have."""


def output_of(module: str, **variables: str) -> str:
    """What a module of this folder prints; Triton decides at its import whether kernels are interpreted."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", f"tests.model.kernels.{module}"]
    return run_bounded(command, check=True, cwd=ROOT, env={**env, **variables}).stdout


@needs_triton
@pytest.mark.slow
@pytest.mark.parametrize("module", ["check_adamw_8bit", "check_layer_ops"])
def test_kernels_compute_what_the_code_that_they_replace_computes(module: str):
    """Another update, other state, or other gradients than on a CPU; the module says what it compares."""
    assert "equal" in output_of(module, TRITON_INTERPRET="1")


@needs_triton
@pytest.mark.slow
def test_kernels_compile_for_gpus_and_keep_values_in_registers():
    """A kernel that only the interpreter takes, that is too large for its registers, or whose warps wait."""
    found = [json.loads(line) for line in output_of("check_compiled").splitlines() if line.startswith("{")]
    assert {one["capability"] for one in found} == {80, 90}
    for one in found:
        assert one["reg"] <= MOST_REGISTERS and one["stack"] == one["local"] == 0, one
        assert one["barriers"] <= 5, one  # To store the scales of a program's blocks; in fp32 two more.
