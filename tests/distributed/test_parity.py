"""A run shared by several processes learns what one process learns."""

from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from cuda_memory.units import MIB
from lean_finetune.config.optimizers import OPTIMIZERS
from lean_finetune.distributed.processes import SINGLE_PROCESS
from lean_finetune.step.offload.disk_weights import DiskPlace
from tests.distributed.cases import Case, learn
from tests.distributed.conftest import Single
from tests.distributed.group import Group, group_of
from tests.distributed.worker import do_slow_first_process, do_wait_in_vain
from tests.kit.estimate_cpu import save_small
from tests.model.quantized import NF4, save_bitsandbytes, save_fp8_experts, save_mxfp4
from tests.model.recurrent.test_packed_layers import saved as save_hybrid
from tests.small_model import VOCABULARY, moved_adapter, save_small_llama, spec_of
from tests.step.common import slow

pytestmark = pytest.mark.multiprocess

EXACT, NORM = (1e-5, 1e-4), 1e-4
"""Largest differences in fp32: of losses, of weights as a share of what was learnt; and of gradient norms."""

MODES = ("ddp", "zero1", "zero2", "zero3")
METHODS = ("full", "lora", "qlora")
IDLE = (2, 1, 2, 2, 1)
"""Rows of five micro-batches: one of two processes, or three of four, have no work in the last turn."""


def plain_of(case: Case) -> Case:
    """The same learning in one process, without what saves memory."""
    model = {key: value for key, value in case.model.items() if "ckpt" not in key}
    alone = replace(case, mode="none", group_gpus=None, context=1, tensor=1, stages=None)
    return replace(alone, sizes=(8,), flat=False, chunk=None, model=model)


def same_batches(case: Case) -> Case:
    """One process, the same micro-batches: with few bits another division rounds differently."""
    return replace(plain_of(case), sizes=case.sizes, chunk=case.chunk)


def differences(found: dict[str, Any], expected: dict[str, Any], start: dict[str, torch.Tensor]) -> tuple[float, float]:
    """Largest difference of a loss; norm of the difference of the weights, as a share of what was learnt."""
    assert found["weights"].keys() == expected["weights"].keys() == start.keys()
    losses = max(abs(a - b) for a, b in zip(found["losses"], expected["losses"], strict=True))
    weights = expected["weights"]
    apart = torch.stack([(found["weights"][name] - weights[name]).float().norm() for name in start]).norm()
    learnt = torch.stack([(weights[name] - start[name]).float().norm() for name in start]).norm()
    assert learnt > 0
    return losses, (apart / learnt).item()


def check(group: Group, single: Single, case: Case, plain: Case, bounds: tuple[float, float]) -> dict[str, Any]:
    """Compare a case with one process; returns the results of both."""
    found, expected, start = group.learn(case), single(plain), single(replace(plain, steps=0))
    assert all(a <= b for a, b in zip(differences(found, expected, start["weights"]), bounds, strict=True))
    return {"found": found, "expected": expected}


def check_exact_parity(group: Group, single: Single, case: Case) -> None:
    """The case learns, and the same as one process without memory switches; gradient norms agree too."""
    results = check(group, single, case, plain_of(case), EXACT)
    losses = results["expected"]["losses"]
    assert losses[-1] < losses[0] - 0.1
    assert results["found"]["norms"] == pytest.approx(results["expected"]["norms"], abs=NORM, rel=0)


OPTIONS: dict[str, dict[str, Any]] = {
    "accumulation": {"sizes": IDLE},
    "chunk": {"sizes": (4, 4), "chunk": 16},
    "ckpt": {"sizes": (3, 5), "model": {"grad_ckpt": True}},
    "packed": {"sizes": IDLE, "flat": True},
    "all": {"sizes": IDLE, "flat": True, "chunk": 16, "model": {"grad_ckpt": True}},
}


def case_of(directory: Path, mode: str, method: str, option: str) -> Case:
    given = dict(OPTIONS[option])
    model = {"method": method, **given.pop("model", {})}
    return Case(directory=str(directory), mode=mode, model=model, **{"steps": 8, **given})


FAST = {
    ("ddp", "qlora", "accumulation"),
    ("zero1", "lora", "chunk"),
    ("zero3", "full", "accumulation"),
    ("zero3", "qlora", "all"),
}


@pytest.mark.parametrize(
    ("mode", "method", "option"),
    [case if case in FAST else slow(*case) for case in product(MODES, METHODS, OPTIONS)],
)
def test_two_processes_learn_what_one_learns(small_llama: Path, pair: Group, single: Single, mode, method, option):
    check_exact_parity(pair, single, case_of(small_llama, mode, method, option))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "group_gpus", "method", "option"),
    [
        *(("hsdp", 2, method, option) for method in METHODS for option in ("accumulation", "all")),
        *((mode, None, method, "accumulation") for mode in MODES for method in METHODS),
    ],
)
def test_four_processes_learn_what_one_learns(
    small_llama: Path, four: Group, single: Single, mode, group_gpus, method, option
):
    """Three of four have no work in the last turn; with LoRA rank 4, each has a row of an adapter's A."""
    check_exact_parity(four, single, replace(case_of(small_llama, mode, method, option), group_gpus=group_gpus))


@pytest.mark.slow
def test_others_wait_for_a_process_that_makes_progress(small_llama: Path, pair: Group):
    """Quantising 70B weights on one CPU takes longer than the timeout for a process that hangs."""
    case = Case(directory=str(small_llama), mode="zero3", steps=1, model={"method": "qlora"})
    found = pair.ask(do_slow_first_process, case, 3, 0.25)
    assert found["load_seconds"] > 4 and found["reports"] == 1


@pytest.mark.slow
def test_groups_of_hsdp_wait_no_longer_than_the_timeout(small_llama: Path):
    """With a hanging process in one group, the others waited for PyTorch's 30 minutes."""
    with group_of(4) as broken:
        waited = broken.ask(do_wait_in_vain, small_llama, 2)
    assert 1 < waited < 5


RATES = {"sgd": 0.05, "lion": 5e-4, "lion_8bit": 5e-4}
OF_SHARDS = {str(name): (0.005, 0.1) for name in OPTIMIZERS if "8bit" in name} | {"adafactor": (0.03, 0.3)}
"""Bounds where the state of a shard is not a shard of the state: blocks of 8 bits, sums of rows and columns."""


def optimizer_case(directory: Path, mode: str, name: str) -> Case:
    optim = {"optimizer": name, "lr": RATES.get(name, 2e-3)}
    return Case(directory=str(directory), mode=mode, sizes=(4, 4), chunk=16, model={"method": "full"}, optim=optim)


@pytest.mark.parametrize("name", [name if name == "adamw_8bit" else slow(name) for name in OPTIMIZERS])
def test_every_optimizer_under_zero3(small_llama: Path, pair: Group, single: Single, name: str):
    """Bitsandbytes does not support DTensor: it sees plain shards."""
    case = optimizer_case(small_llama, "zero3", name)
    check(pair, single, case, same_batches(case), OF_SHARDS.get(name, EXACT))


@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_is_exact_under_zero1(small_llama: Path, pair: Group, single: Single, name: str):
    """Each tensor has one owner, so blocks, rows and columns are scaled as in one process; no owner has all state."""
    case = optimizer_case(small_llama, "zero1", name)
    found = check(pair, single, case, same_batches(case), (0.0, 0.0))["found"]
    # Half of it, but small tensors have wider state.
    assert found["state_bytes"] <= 0.75 * pair.learn(replace(case, mode="ddp"))["state_bytes"]


BF16, FP16 = (0.005, 0.05), (0.001, 0.01)
"""What the order of sums changes in 16 bits, where gradients of processes are added instead of micro-batches'."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "model", "optim", "bounds"),
    [
        ("zero3", {"method": "full", "precision": "bf16"}, {"master_weights": True}, BF16),
        ("zero1", {"method": "full", "precision": "bf16"}, {"master_weights": True}, BF16),
        ("zero3", {"method": "full", "precision": "bf16"}, {}, BF16),
        ("zero3", {"method": "full", "precision": "fp16"}, {}, FP16),
        ("zero3", {"method": "lora", "precision": "bf16"}, {}, EXACT),
        ("zero3", {"method": "qlora", "precision": "bf16"}, {}, EXACT),
        ("zero3", {"method": "lora", "precision": "pure_bf16"}, {}, BF16),
        ("ddp", {"method": "int8_lora"}, {}, EXACT),
        ("zero1", {"method": "int8_lora", "grad_ckpt": True}, {}, EXACT),
        ("zero3", {"method": "lora", "lora_dora": True}, {}, EXACT),
        ("zero3", {"method": "lora", "lora_init": "pissa"}, {}, EXACT),
        ("zero3", {"method": "qlora", "lora_init": "loftq"}, {}, EXACT),
        ("zero3", {"method": "full", "grad_ckpt": True, "grad_ckpt_policy": "selective"}, {}, EXACT),
        ("zero3", {"method": "full", "grad_ckpt": True, "sequence_tiles": 4}, {}, EXACT),
        ("zero3", {"method": "qlora", "sequence_tiles": 3}, {}, EXACT),
        ("zero2", {"method": "qlora", "grad_ckpt": True, "grad_ckpt_policy": "every_n"}, {}, EXACT),
    ],
)
def test_precisions_and_adapters(small_llama: Path, pair: Group, single: Single, mode, model, optim, bounds):
    case = Case(directory=str(small_llama), mode=mode, sizes=IDLE, chunk=16, steps=12, model=model, optim=optim)
    check(pair, single, case, same_batches(case), bounds)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "method"),
    [
        ("ddp", "lora"),
        ("zero1", "qlora"),
        ("zero2", "qlora"),
        ("zero3", "lora"),
        ("zero3", "qlora"),
        ("ddp", "int8_lora"),
    ],
)
def test_an_adapter_goes_on_in_every_process(small_llama: Path, tmp_path, pair: Group, single: Single, mode, method):
    """Processes that did not read its files, and would train the adapter that they initialised."""
    start = moved_adapter(small_llama, tmp_path / "start", spec_of(method=method))
    case = Case(directory=str(small_llama), mode=mode, sizes=IDLE, chunk=16, steps=4, model={"method": method})
    fresh, case = case, replace(case, adapter=str(start))
    results = check(pair, single, case, same_batches(case), EXACT)
    assert abs(results["expected"]["losses"][0] - single(fresh)["losses"][0]) > 1e-4


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "method", "precision"),
    [
        *product(("ddp", "zero2", "zero3"), ("lora", "qlora"), ("fp32",)),
        ("zero3", "lora", "bf16"),
        ("zero1", "lora", "fp32"),
    ],
)
def test_a_trained_embedding_and_head_are_shared(tmp_path, pair: Group, single: Single, mode, method, precision):
    """Copies that FSDP leaves in shards where the chunked loss reads the head, or whose gradients are not summed."""
    directory = str(save_small_llama(tmp_path, dtype=torch.float32, tie_word_embeddings=False))
    model = {"method": method, "precision": precision, "lora_modules_to_save": ["embed_tokens", "lm_head"]}
    case = Case(directory=directory, mode=mode, sizes=IDLE, chunk=16, steps=8, model=model)
    check(pair, single, case, same_batches(case), EXACT if precision == "fp32" else BF16)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "method"), [*product(("ddp", "zero2", "zero3"), ("lora", "qlora")), ("zero1", "lora")]
)
@pytest.mark.parametrize("tied", [True, False])
def test_trained_rows_are_shared(tmp_path, pair: Group, single: Single, mode, method, tied):
    """A row that two processes have in part, or a new one that only the first process has."""
    directory = str(save_small_llama(tmp_path, dtype=torch.float32, tie_word_embeddings=tied))
    model = {"method": method, "lora_trainable_tokens": [5, 9, 40, VOCABULARY + 2]}
    case = Case(directory=directory, mode=mode, sizes=IDLE, chunk=16, steps=8, model=model)
    check(pair, single, case, same_batches(case), EXACT)


EXPERT_CASES = [
    ("zero3", {"method": "qlora", "lora_experts": "all"}),
    ("zero3", {"method": "full"}),
    ("zero2", {"method": "lora", "lora_experts": "all"}),
    ("ddp", {"method": "full", "router": "trained"}),
    ("zero1", {"method": "full"}),
    ("zero1", {"method": "qlora", "lora_experts": "all"}),
    ("ddp", {"method": "int8_lora", "lora_experts": "all", "grad_ckpt": True}),
]


@pytest.mark.parametrize(
    ("processes", "mode", "model"),
    [("pair", *EXPERT_CASES[0]), *(slow("pair", *case) for case in EXPERT_CASES[1:])]
    + [slow("four", *case) for case in EXPERT_CASES],
)
def test_experts_shared_by_processes_learn_the_same(request, tmp_path, single: Single, processes, mode, model):
    """Packed experts sharded without their scales, rows sent to another process's experts, or padding counted."""
    save_small("Qwen3-MoE", tmp_path)
    case = Case(directory=str(tmp_path), mode=mode, sizes=IDLE, chunk=16, steps=8, model=model)
    results = check(request.getfixturevalue(processes), single, case, same_batches(case), EXACT)
    found, expected = (results[name]["expert_loads"] for name in ("found", "expected"))
    assert len(expected) == 8
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)


HYBRIDS = ("granitemoehybrid", "lfm2", "qwen3_5_text", "qwen3_next")
"""Mamba 2, a convolution alone, and the gated delta rule, also in a mixture of experts."""


@pytest.mark.slow
@pytest.mark.parametrize("option", ["packed", "all"])
@pytest.mark.parametrize("method", ["full", "lora"])
@pytest.mark.parametrize(("family", "mode"), list(product(HYBRIDS, ("ddp", "zero3"))))
def test_packed_hybrids_on_two_processes_learn_what_one_learns(
    tmp_path, pair: Group, single: Single, family, mode, method, option
):
    """A gathered layer that does not see the bounds of the rows, or a convolution whose shard is read."""
    check_exact_parity(pair, single, case_of(save_hybrid(family, tmp_path), mode, method, option))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module:UserWarning")
@pytest.mark.parametrize("method", ["full", "lora"])
def test_layers_that_return_a_view_learn_the_same(tmp_path, pair: Group, single: Single, method):
    """FSDP warns that an in-place operation on OPT's hidden states would skip gathering weights for backward."""
    save_small("OPT", tmp_path)
    case = Case(directory=str(tmp_path), mode="zero3", sizes=IDLE, chunk=16, steps=8, model={"method": method})
    check(pair, single, case, same_batches(case), EXACT)


FROM_FILES: dict[str, tuple[Callable[[Path], Path], tuple[str, ...]]] = {
    "mxfp4": (save_mxfp4, METHODS),
    "fp8 experts": (save_fp8_experts, METHODS),
    "nf4": (lambda directory: save_bitsandbytes(directory, **NF4, bnb_4bit_use_double_quant=True), ("qlora",)),
}
"""Files that are quantised already, and methods that take them."""


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["ddp", "zero3"])
@pytest.mark.parametrize(("name", "method"), [(name, method) for name, (_, of) in FROM_FILES.items() for method in of])
def test_quantised_files_shared_by_processes_learn_the_same(tmp_path, pair: Group, single: Single, name, method, mode):
    """Processes that do not read the files, and expect other layers to be packed than the one that does."""
    FROM_FILES[name][0](tmp_path)
    case = Case(directory=str(tmp_path), mode=mode, sizes=IDLE, chunk=16, steps=8, model={"method": method})
    check(pair, single, case, same_batches(case), EXACT)


@pytest.mark.parametrize(
    ("mode", "method", "ckpt"),
    [
        case if case == ("zero3", "full", False) else slow(*case)
        for case in product(("ddp", "zero2", "zero3"), ("full", "qlora"), (False, True))
    ],
)
def test_activations_in_a_file_change_no_bit(small_llama: Path, pair: Group, mode, method, ckpt):
    """Gathered weights, which exist only while a layer computes, must not be offloaded with its activations."""
    model = {"method": method, "grad_ckpt": ckpt}
    case = Case(directory=str(small_llama), mode=mode, sizes=(4, 4), chunk=16, steps=5, model=model)
    plain, found = pair.learn(case), pair.learn(replace(case, offload=True))
    assert_same_bits(found, plain)
    alone = learn(replace(case, mode="none", offload=True), SINGLE_PROCESS)
    assert found["offloaded_bytes"] == alone.offloaded_bytes > 0


def assert_same_bits(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found["losses"] == expected["losses"] and found["norms"] == expected["norms"]
    assert all(torch.equal(found["weights"][name], weight) for name, weight in expected["weights"].items())


HOST_MODES: dict[str, tuple[str, dict[str, Any]]] = {
    **{mode: ("pair", {"mode": mode}) for mode in MODES},
    "zero3 of four": ("four", {"mode": "zero3"}),
    "hsdp": ("four", {"mode": "hsdp", "group_gpus": 2}),
    "cp": ("four", {"mode": "ddp", "context": 2}),
    "cp x zero3": ("four", {"mode": "zero3", "context": 2}),
    "tp": ("pair", {"mode": "none", "tensor": 2}),
    "pp": ("pair", {"mode": "none", "stages": (1, 1)}),
}
"""Processes, and values of a case."""
HOST_CASES = [
    *product(MODES, ("full", "lora"), ("optimizer",), ("cpu",)),
    *product(("zero3", "hsdp"), METHODS, ("parameters",), ("cpu",)),
    *product(("hsdp", "cp", "cp x zero3"), ("full", "lora"), ("optimizer",), ("cpu",)),
    ("cp x zero3", "full", "parameters", "cpu"),
    *product(("ddp", "zero1", "zero3", "tp", "pp"), ("full", "lora"), ("optimizer",), ("disk",)),
    *product(("zero3",), METHODS, ("parameters",), ("disk",)),
    ("zero3 of four", "lora", "optimizer", "disk"),
]


@pytest.mark.parametrize(
    ("mode", "method", "place", "to"),
    [case if case == ("zero3", "full", "parameters", "cpu") else slow(*case) for case in HOST_CASES],
)
def test_the_host_changes_no_bit(request, small_llama: Path, tmp_path: Path, mode, method, place, to):
    """Shards or gradients that lose bits on the way to the host; empty shards (rank 3, four processes) on disk."""
    processes, given = HOST_MODES[mode]
    group: Group = request.getfixturevalue(processes)
    model = {"method": method, "grad_ckpt": True, "lora_rank": 3}
    case = Case(directory=str(small_llama), sizes=IDLE, chunk=16, steps=5, model=model, **given)
    disk = DiskPlace(directory=tmp_path, buffer_bytes=64 * MIB) if to == "disk" else None
    here, there = group.learn(case), group.learn(replace(case, optim={"offload": place, "disk": disk}))
    assert_same_bits(there, here)
