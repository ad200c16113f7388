"""A stopped run on several GPUs resumes as if it had not stopped, also on another number of GPUs."""

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from lean_finetune.distributed.processes import SINGLE_PROCESS
from tests.distributed.group import Group, group_of
from tests.distributed.part_of_run import PartOfRun, run_part
from tests.train.interrupted import STEPS

pytestmark = pytest.mark.multiprocess

LOSS = 1e-5
"""Largest difference of a loss where the number of processes changes."""


@pytest.fixture(scope="module")
def pair() -> Iterator[Group]:
    with group_of(2) as group:
        yield group


@pytest.fixture(autouse=True)
def one_thread():
    """A sum over threads may take another order in each run."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


class Runner:
    """Runs parts of one run on one process or several."""

    def __init__(self, model: Path, directory: Path, **options: Any):
        self._options = {"model": str(model), "directory": str(directory), **options}

    def part(self, group: Group | None, mode: str, stop_after: int | None = None, **more: Any) -> dict[str, Any]:
        """Run until a step, or to the end, from whatever was kept."""
        part = PartOfRun(**{**self._options, **more, "mode": mode, "stop_after": stop_after})
        Path(part.directory).mkdir(parents=True, exist_ok=True)
        return run_part(part, SINGLE_PROCESS) if group is None else group.ask("run_part", asdict(part))


def learnt(ended: dict[str, Any]) -> dict[str, torch.Tensor]:
    return load_file(ended["weights"])


@pytest.mark.parametrize(
    ("mode", "method", "optimizer"),
    [
        ("zero3", "full", "adamw_8bit"),
        pytest.param("ddp", "lora", "adamw", marks=pytest.mark.slow),
        pytest.param("zero1", "full", "adafactor", marks=pytest.mark.slow),
    ],
)
@pytest.mark.slow
def test_the_same_processes_go_on_to_the_bit(small_llama: Path, tmp_path: Path, pair: Group, mode, method, optimizer):
    """Weights, state, and what dropout draws in each process."""
    options = {"method": method, "optimizer": optimizer, "dropout": 0.1 if method == "lora" else 0.0}
    whole = Runner(small_llama, tmp_path / "whole", **options).part(pair, mode)
    parts = Runner(small_llama, tmp_path / "parts", **options)
    assert parts.part(pair, mode, stop_after=1) == {"first_step": 0, "said": [], "stopped_at": 1}
    assert parts.part(pair, mode, stop_after=3)["stopped_at"] == 3
    ended = parts.part(pair, mode)
    assert ended["first_step"] == 3 and len(ended["said"]) == 1
    assert ended["losses"] == whole["losses"] and len(whole["losses"]) == STEPS
    found, expected = learnt(ended), learnt(whole)
    assert found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in found)


@pytest.mark.parametrize(
    ("first", "then"),
    [
        ("zero3", "none"),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (("none", "zero3"), ("ddp", "zero1"), ("zero1", "none"))
        ),
    ],
)
def test_another_number_of_processes_goes_on(small_llama: Path, tmp_path: Path, pair: Group, first: str, then: str):
    """Each reads the rows that it holds, however they were cut when they were kept."""
    check_recut(
        small_llama, tmp_path, (pair if first != "none" else None, first), (pair if then != "none" else None, then)
    )


def check_recut(model: Path, directory: Path, first: tuple[Group | None, str], then: tuple[Group | None, str]) -> None:
    alone = Runner(model, directory / "alone").part(None, "none")
    parts = Runner(model, directory / "parts")
    assert parts.part(*first, stop_after=2)["stopped_at"] == 2
    ended = parts.part(*then)
    assert ended["first_step"] == 2
    assert len(ended["said"]) == 2 and ended["said"][1].startswith("note: the checkpoint is of ")
    assert ended["losses"] == pytest.approx(alone["losses"], abs=LOSS, rel=0)
    found, expected = learnt(ended), learnt(alone)
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-3, atol=1e-5, msg=name)


@pytest.mark.slow
@pytest.mark.parametrize("then", ["zero2", "none"])
def test_four_processes_give_way_to_fewer(small_llama: Path, tmp_path: Path, pair: Group, then: str):
    with group_of(4) as four:
        check_recut(small_llama, tmp_path, (four, "zero3"), (pair if then != "none" else None, then))


def test_state_that_is_a_parts_alone_is_refused_elsewhere(small_llama: Path, tmp_path: Path, pair: Group):
    """Blocks of 8 bits begin with each part: read as another's they would be garbage."""
    parts = Runner(small_llama, tmp_path, optimizer="adamw_8bit")
    assert parts.part(pair, "zero3", stop_after=2)["stopped_at"] == 2
    told = parts.part(None, "none")["error"]
    assert told.startswith("hardware.num_gpus: a checkpoint of ") and "got 1 for 2; use the same number" in told


@pytest.mark.slow
@pytest.mark.parametrize("then", ["hsdp", "zero3", "ddp", "none"])
def test_groups_that_hold_the_same_go_on(small_llama: Path, tmp_path: Path, pair: Group, then: str):
    """Each row is kept once, by the first group; the same four processes go on to the bit, fewer to rounding."""
    with group_of(4) as four:
        if then != "hsdp":
            fewer = pair if then != "none" else None
            check_recut(small_llama, tmp_path, (four, "hsdp"), (fewer, then))
            return
        whole = Runner(small_llama, tmp_path / "whole").part(four, "hsdp")
        parts = Runner(small_llama, tmp_path / "parts")
        assert parts.part(four, "hsdp", stop_after=2)["stopped_at"] == 2
        ended = parts.part(four, "hsdp")
    assert ended["first_step"] == 2 and ended["losses"] == whole["losses"]
    found, expected = learnt(ended), learnt(whole)
    assert found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in found)


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_a_full_disk_of_one_process_costs_a_checkpoint_only(small_llama: Path, tmp_path: Path, pair: Group, rank: int):
    """A checkpoint that lacks a part must not get a name, and training goes on."""
    parts = Runner(small_llama, tmp_path)
    assert parts.part(pair, "zero3", stop_after=2)["stopped_at"] == 2
    ended = parts.part(pair, "zero3", every_step=True, full_disk_rank=rank)
    assert len(ended["losses"]) == STEPS and ended["kept"] == 2
    assert {path.name for path in (tmp_path / "kept").iterdir()} == {"step-000000002"}
    assert any("no checkpoint was made, earlier ones are kept" in line for line in ended["said"])
