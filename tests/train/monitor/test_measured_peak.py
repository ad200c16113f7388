"""Measured peaks are exact inside windows, and absent outside."""

import gc

import pytest
import torch

from lean_finetune.train.monitor.measured_peak import CpuMeter, CudaMeter, make_meter
from tests.small_model import CPU

KIB = 1024


@pytest.fixture
def meter() -> CpuMeter:
    gc.collect()  # Garbage of earlier tests must not be freed inside a window.
    made = make_meter(CPU)
    assert isinstance(made, CpuMeter)
    return made


def block(kib: int) -> torch.Tensor:
    return torch.zeros(kib * KIB, dtype=torch.uint8)


def test_each_phase_has_its_own_peak(meter):
    """A phase credited with another one's peak, or without what it inherited."""
    with meter.window("run"):
        with meter.phase("load"):
            weights = block(100)
        with meter.phase("forward"):
            activations = block(50)
            del activations
            block(10)
        block(170)  # Between phases: counts in the total only.
        with meter.phase("backward"):
            block(20)
    measured = meter.result()
    assert measured.peak_bytes_by_phase == {"load": 100 * KIB, "forward": 150 * KIB, "backward": 120 * KIB}
    assert measured.peak_bytes == 270 * KIB
    assert weights.nbytes == 100 * KIB


def test_window_starts_with_the_bytes_in_use_after_the_previous_one(meter):
    """Weights forgotten after the first window."""
    with meter.window("first"), meter.phase("load"):
        weights = block(100)
    block(500)  # Outside: nobody counts.
    with meter.window("second"), meter.phase("forward"):
        block(30)
    assert meter.result().peak_bytes_by_phase == {"load": 100 * KIB, "forward": 130 * KIB}
    assert weights.nbytes == 100 * KIB


def test_peak_of_a_step_excludes_loading_and_is_returned_once(meter):
    """The curve's first point showing the loading of the model, or an unmeasured step the last measured one's."""
    with meter.window("run"):
        with meter.phase("load"):
            block(200)
            weights = block(100)
        with meter.phase("forward"):
            block(50)
    assert meter.peak_bytes_of_step() == 150 * KIB
    assert meter.peak_bytes_of_step() is None
    assert weights.nbytes == 100 * KIB


def test_nothing_is_measured_outside_windows(meter):
    """A zero reported for something that was not measured."""
    with meter.phase("forward"):
        block(10)
    measured = meter.result()
    assert (measured.peak_bytes, measured.peak_bytes_by_phase, measured.peak_reserved_bytes) == (None, {}, None)


def test_a_failed_window_can_be_opened_again(meter):
    """A meter that stays open after a fault; an inner window that ends the outer one's profile."""
    with pytest.raises(RuntimeError, match="'inner' opened inside window 'first'"), meter.window("first"):
        with meter.window("inner"):
            pass
    with meter.window("second"), meter.phase("forward"):
        block(10)
    assert meter.result().peak_bytes == 10 * KIB


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_statistics_give_each_phase_its_own_peak():
    """Statistics not reset between phases."""
    device = torch.device("cuda")
    meter = make_meter(device)
    assert isinstance(meter, CudaMeter)
    base = torch.cuda.memory_allocated(device)
    with meter.phase("forward"):
        tensor = torch.zeros(1 << 20, dtype=torch.uint8, device=device)
        torch.zeros(1 << 21, dtype=torch.uint8, device=device)
    with meter.phase("backward"):
        torch.zeros(1 << 20, dtype=torch.uint8, device=device)
    by_phase = meter.result().peak_bytes_by_phase
    assert by_phase["forward"] - base == 3 << 20
    assert by_phase["backward"] - base == 2 << 20
    assert tensor.nbytes == 1 << 20
