"""Expandable segments: set on GPUs, unless the user's environment variables say otherwise."""

import os
import sys

import pytest
import torch

from lean_finetune.model.allocator_settings import environment_notes, segments_from_environment, use_segments
from tests.conftest import ROOT
from tests.processes import run_bounded
from tests.step.common import slow

CUDA = torch.device("cuda", 0)


KNOWN = hasattr(torch._C, "_accelerator_getAllocatorSettings")
"""Whether torch gives its allocator's settings back; 2.11 does not."""


@pytest.fixture
def settings():
    """Reads PyTorch's allocator settings, and sets them back after the test."""
    if not KNOWN:
        pytest.skip("this torch does not return its settings")
    before = torch._C._accelerator_getAllocatorSettings()
    yield torch._C._accelerator_getAllocatorSettings
    torch._C._accelerator_setAllocatorSettings("expandable_segments:False")
    torch._C._accelerator_setAllocatorSettings(before)


@pytest.mark.parametrize("expandable", [True, False])
def test_the_parameter_reaches_the_allocator_and_other_settings_stay(settings, expandable: bool):
    """A parameter that PyTorch never hears of: its environment was read before any parameter."""
    torch._C._accelerator_setAllocatorSettings("max_split_size_mb:100")
    assert use_segments(expandable, CUDA) is None
    assert settings() == f"max_split_size_mb:100,expandable_segments:{expandable}"


def test_a_cpu_is_left_alone(settings):
    before = settings()
    assert use_segments(True, torch.device("cpu")) is None and settings() == before


@pytest.mark.parametrize(
    ("variable", "value", "expandable", "note"),
    [
        ("PYTORCH_ALLOC_CONF", "expandable_segments:False", True, "False: false is used"),
        slow("PYTORCH_ALLOC_CONF", "garbage_collection_threshold:0.8, expandable_segments: True", False, "True: true"),
        slow("PYTORCH_ALLOC_CONF", "backend:cudaMallocAsync", True, "PyTorch's allocator is not in use"),
        slow("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:False", True, "False: false is used"),
        slow("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True", True, None),
    ],
)
def test_the_environment_takes_precedence_with_a_note(variable: str, value: str, expandable: bool, note: str | None):
    """A user's own setting overruled, or followed in silence: the prediction is then for other segments."""
    code = (
        "import torch; from lean_finetune.model.allocator_settings import use_segments\n"
        "settings = vars(torch._C).get('_accelerator_getAllocatorSettings', str)\n"
        "before = settings()\n"
        f"print(use_segments({expandable}, torch.device('cuda', 0)))\n"
        "assert settings() == before, settings()"
    )
    environment = {k: v for k, v in os.environ.items() if not k.endswith("ALLOC_CONF")} | {variable: value}
    done = run_bounded([sys.executable, "-c", code], cwd=ROOT, env=environment, check=True)
    assert note in done.stdout if note is not None else done.stdout.strip() == "None"


@pytest.mark.parametrize("variable", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_a_torch_that_does_not_give_its_settings_back_can_train(monkeypatch, variable: str):
    """Every GPU run ended by AttributeError on torch 2.11."""
    monkeypatch.delattr(torch._C, "_accelerator_getAllocatorSettings", raising=False)
    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)
    monkeypatch.setenv(variable, "expandable_segments:False")
    note = use_segments(True, CUDA)
    assert note is not None and "False: false is used" in note
    assert use_segments(False, CUDA) is None


@pytest.mark.parametrize(
    ("value", "segments", "note"),
    [
        ("expandable_segments:False", False, ["train.expandable_segments: is true, but PYTORCH_ALLOC_CONF"]),
        ("max_split_size_mb:128, garbage_collection_threshold:0.8", None, ["PYTORCH_ALLOC_CONF"]),
        ("backend:cudaMallocAsync", None, ["PYTORCH_ALLOC_CONF"]),
        ("expandable_segments:True", True, []),
    ],
)
def test_the_estimate_follows_the_environment_or_says_what_it_does_not_know(settings, value, segments, note):
    """Reserved memory predicted for segments that are not used, without a word."""
    torch._C._accelerator_setAllocatorSettings(value)
    if "cudaMallocAsync" in value and "cudaMallocAsync" not in settings():
        pytest.skip("this build of PyTorch takes the backend from the environment alone")
    assert segments_from_environment() is segments
    notes = environment_notes(True)
    assert len(notes) == len(note) and all(map(str.startswith, notes, note))
    assert ("max_split_size_mb, garbage_collection_threshold" in "".join(notes)) is ("max_split" in value)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("expandable", [True, False])
def test_a_gpu_reserves_in_the_segments_asked_for(expandable: bool):
    """A setting that is heard too late: the first segment shows."""
    code = (
        "import torch; from lean_finetune.model.allocator_settings import use_segments\n"
        f"use_segments({expandable}, torch.device('cuda', 0))\n"
        "held = torch.empty(1 << 20, device='cuda')\n"
        "print(torch.cuda.memory_snapshot()[0]['is_expandable'])"
    )
    environment = {k: v for k, v in os.environ.items() if not k.endswith("ALLOC_CONF")}
    done = run_bounded([sys.executable, "-c", code], cwd=ROOT, env=environment, check=True)
    assert done.stdout.split()[-1] == str(expandable)
