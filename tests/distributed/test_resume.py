"""A stopped run on several GPUs resumes as if it had not stopped, also on another number of GPUs."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from lean_finetune.distributed.processes import SINGLE_PROCESS
from tests.distributed.group import Group, group_of
from tests.distributed.part_of_run import PartOfRun, run_part
from tests.distributed.worker import do_run_part
from tests.kit.estimate_cpu import save_small
from tests.step.common import slow
from tests.train.image_jobs import image_workspace
from tests.train.interrupted import STEPS

pytestmark = pytest.mark.multiprocess

LOSS = 1e-5
"""Largest difference of a loss where the number of processes changes."""


class Runner:
    """Runs parts of one run on one process or several."""

    def __init__(self, model: Path, directory: Path, **options: Any):
        self._options = {"model": str(model), "directory": str(directory), **options}

    def part(self, group: Group, mode: str, stop_after: int | None = None, **more: Any) -> dict[str, Any]:
        """Resume from the last checkpoint and run until a step, or to the end; mode `none` runs in this process."""
        part = PartOfRun(**{**self._options, **more, "mode": mode, "stop_after": stop_after})
        Path(part.directory).mkdir(parents=True, exist_ok=True)
        return run_part(part, SINGLE_PROCESS) if mode == "none" else group.ask(do_run_part, part)


def learnt(ended: dict[str, Any]) -> dict[str, torch.Tensor]:
    return load_file(ended["weights"])


def check_exact(group: Group, model: Path, directory: Path, mode: str, **options: Any) -> None:
    """A run that stops twice learns the same as one that does not, to the bit."""
    alone = Runner(model, directory / "alone", **options).part(group, mode)
    parts = Runner(model, directory / "parts", **options)
    assert parts.part(group, mode, stop_after=1) == {"first_step": 0, "messages": [], "stopped_at": 1}
    assert parts.part(group, mode, stop_after=3)["stopped_at"] == 3
    ended = parts.part(group, mode)
    assert ended["first_step"] == 3 and len(ended["messages"]) == 1
    assert ended["losses"] == alone["losses"] and len(alone["losses"]) == STEPS
    found, expected = learnt(ended), learnt(alone)
    assert found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in found)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "method", "optimizer"),
    [
        ("zero3", "full", "adamw_8bit"),
        ("ddp", "lora", "adamw"),
        ("zero1", "full", "adafactor"),
        ("pp", "lora", "adamw_8bit"),
    ],
)
def test_the_same_processes_resume_to_the_bit(small_llama: Path, tmp_path: Path, pair: Group, mode, method, optimizer):
    """Weights, state, and what dropout draws in each process."""
    dropout = 0.1 if method == "lora" else 0.0
    check_exact(pair, small_llama, tmp_path, mode, method=method, optimizer=optimizer, dropout=dropout)


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return image_workspace(tmp_path_factory.mktemp("images"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "method", "vision"),
    [("zero3", "lora", "lora"), ("ddp", "full", "full"), ("zero1", "lora", "frozen"), ("zero2", "qlora", "lora")],
)
def test_rows_with_images_resume_to_the_bit(images: Path, tmp_path: Path, pair: Group, mode, method, vision):
    """Turns in which one process has images; held-out rows too. One process learns the same."""
    options = {"method": method, "vision": vision, "workspace": str(images)}
    check_exact(pair, images / "model", tmp_path, mode, **options)
    together = Runner(images / "model", tmp_path / "again", **options).part(pair, mode)
    alone = Runner(images / "model", tmp_path / "one", **options).part(pair, "none")
    assert together["losses"] == pytest.approx(alone["losses"], abs=LOSS)
    assert together["heldout"] == pytest.approx(alone["heldout"], abs=LOSS) and len(alone["heldout"]) == 3


@pytest.mark.slow
@pytest.mark.parametrize(
    ("processes", "mode", "method", "optimizer"),
    [
        ("pair", "tp none", "full", "adamw"),
        ("pair", "tp none", "lora", "adamw_8bit"),
        ("four", "tp zero3", "full", "adafactor"),
        ("four", "tp ddp", "lora", "adamw"),
    ],
)
def test_parts_of_products_resume_to_the_bit(request, small_llama: Path, tmp_path, processes, mode, method, optimizer):
    """A part restored as another process's; dropout that differs between processes with the same activations."""
    dropout = 0.1 if method == "lora" else 0.0
    group = request.getfixturevalue(processes)
    check_exact(group, small_llama, tmp_path, mode, method=method, optimizer=optimizer, dropout=dropout)


@pytest.mark.slow
@pytest.mark.parametrize(("method", "experts"), [("qlora", "all"), ("lora", "all"), ("full", "none")])
def test_a_sharded_mixture_resumes_to_the_bit(tmp_path: Path, pair: Group, method: str, experts: str):
    """Shards of adapters of all experts, of packed experts or of their scales."""
    save_small("Qwen3-MoE", tmp_path / "model")
    check_exact(pair, tmp_path / "model", tmp_path, "zero3", method=method, experts=experts)


@pytest.mark.parametrize(
    ("first", "then"),
    [("zero3", "none"), *(slow(*case) for case in (("none", "zero3"), ("ddp", "zero1"), ("zero1", "none")))],
)
def test_another_number_of_processes_resumes(small_llama: Path, tmp_path: Path, pair: Group, first: str, then: str):
    """Each reads its own rows, however a checkpoint divides them."""
    check_reshard(small_llama, tmp_path, (pair, first), (pair, then))


@pytest.mark.slow
@pytest.mark.parametrize(("first", "then"), [("pp", "none"), ("none", "pp"), ("pp", "zero3")])
def test_a_pipeline_resumes_on_one_process_and_back(small_llama: Path, tmp_path: Path, pair: Group, first, then):
    """Each stage writes and reads the weights and state of its own layers."""
    check_reshard(small_llama, tmp_path, (pair, first), (pair, then), method="lora")


def check_reshard(
    model: Path, directory: Path, first: tuple[Group, str], then: tuple[Group, str], **options: Any
) -> None:
    """Mode `none` runs in this process."""
    alone = Runner(model, directory / "alone", **options).part(first[0], "none")
    parts = Runner(model, directory / "parts", **options)
    assert parts.part(*first, stop_after=2)["stopped_at"] == 2
    ended = parts.part(*then)
    assert ended["first_step"] == 2
    assert len(ended["messages"]) == 2 and ended["messages"][1].startswith("note: the checkpoint is of ")
    assert ended["losses"] == pytest.approx(alone["losses"], abs=LOSS, rel=0)
    found, expected = learnt(ended), learnt(alone)
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-3, atol=1e-5, msg=name)


@pytest.mark.slow
def test_four_processes_resume_to_the_bit_or_on_fewer(small_llama: Path, tmp_path: Path, pair: Group):
    """Under hsdp several processes have each row, and the first group saves it."""
    with group_of(4) as four:
        check_exact(four, small_llama, tmp_path / "hsdp", "hsdp")
        for mode, then in (("zero3", "zero2"), ("hsdp", "zero3"), ("hsdp", "ddp"), ("hsdp", "none")):
            check_reshard(small_llama, tmp_path / mode / then, (four, mode), (pair, then))


def test_8_bit_state_is_refused_on_another_number_of_processes(small_llama: Path, tmp_path: Path, pair: Group):
    """Blocks of 8 bits begin with each shard: read into other shards they would be garbage."""
    parts = Runner(small_llama, tmp_path, optimizer="adamw_8bit")
    assert parts.part(pair, "zero3", stop_after=2)["stopped_at"] == 2
    error = parts.part(pair, "none")["error"]
    assert error.startswith("hardware.num_gpus: a checkpoint of ") and "got 1 for 2; use the same number" in error


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_a_full_disk_of_one_process_costs_a_checkpoint_only(small_llama: Path, tmp_path: Path, pair: Group, rank: int):
    """A checkpoint without one rank's part must not be published, and training continues."""
    parts = Runner(small_llama, tmp_path)
    assert parts.part(pair, "zero3", stop_after=2)["stopped_at"] == 2
    ended = parts.part(pair, "zero3", every_step=True, full_disk_rank=rank)
    assert len(ended["losses"]) == STEPS and ended["last_step"] == 2
    assert {path.name for path in (tmp_path / "checkpoints").glob("step-*")} == {"step-000000002"}
    assert any("no checkpoint was made, that of optimizer step " in line for line in ended["messages"])
