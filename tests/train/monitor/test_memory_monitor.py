"""The monitor: its figures are those of the allocator and the system, and it finds real leaks."""

import gc
import mmap
from collections.abc import Callable
from pathlib import Path

import numpy
import pytest
import torch

from cuda_memory.growth import CONFIDENCE, classify
from cuda_memory.units import MIB
from lean_finetune.train.callbacks.callback import CALLBACKS, Callback, CurveRow
from lean_finetune.train.job import TrainJob, TrainResult
from lean_finetune.train.loop import train
from lean_finetune.train.monitor import memory_monitor
from lean_finetune.train.monitor.growth_advice import FIRST_CHECK_STEPS
from lean_finetune.train.monitor.measured_peak import make_meter
from lean_finetune.train.monitor.memory_monitor import (
    STATUS,
    Counters,
    CudaCounters,
    MallocCounters,
    MemoryMonitor,
    host_peak,
    make_counters,
    process_bytes,
)
from lean_finetune.train.publish_outputs import train_metrics
from tests.small_model import CPU, spec_of
from tests.train.jobs import make_job, plan_of, random_lengths, random_tokens

STEPS = 2 * FIRST_CHECK_STEPS
LEAK_BYTES = MIB // 2
glibc = pytest.mark.skipif(
    not isinstance(make_counters(CPU), MallocCounters), reason="needs a C library with mallinfo2 (glibc 2.33)"
)
linux = pytest.mark.skipif(not STATUS.exists(), reason="needs Linux's /proc")


@pytest.fixture
def monitor() -> MemoryMonitor:
    return MemoryMonitor(CPU, make_meter(CPU))


def live_bytes() -> int:
    counts = make_counters(CPU).read()
    assert counts.live_bytes is not None and counts.reserved_bytes is not None and counts.retries is None
    assert counts.reserved_bytes >= counts.live_bytes > MIB
    return counts.live_bytes


@glibc
@pytest.mark.parametrize(("values", "count"), [(1000, 1000), (3_000_000, 20)])
def test_malloc_counters_follow_allocation_and_free_of_tensors(values: int, count: int):
    """Blocks on the heap (small) or mapped blocks (large) that are not counted."""
    gc.collect()
    before = live_bytes()
    tensors = [torch.zeros(values) for _ in range(count)]
    added = live_bytes() - before
    assert added == pytest.approx(count * 4 * values, rel=0.15)
    del tensors
    assert live_bytes() - before < added / 10


def test_without_counters_columns_are_empty(monkeypatch):
    """Zeros in the curves that look like measurements."""
    monkeypatch.setattr(memory_monitor.platform, "system", lambda: "Darwin")
    assert type(make_counters(CPU)) is Counters
    row = MemoryMonitor(CPU, make_meter(CPU)).step_columns()
    assert row["live_bytes"] is row["reserved_bytes"] is row["alloc_retries"] is None
    assert row["rss_bytes"] is not None and row["rss_bytes"] > MIB


@linux
def test_process_memory_is_separated_from_mapped_files(tmp_path: Path):
    """Weights and token shards that are read counted as growth of the process."""
    size = 48 * MIB
    (tmp_path / "file").write_bytes(bytes(size))
    rss, own = process_bytes()
    with open(tmp_path / "file", "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        assert sum(mapped[:: mmap.PAGESIZE]) == 0
        rss_read, own_read = process_bytes()
    assert own is not None and own_read is not None
    assert rss_read - rss > 0.9 * size and own_read - own < size / 4
    with mmap.mmap(-1, size) as filled:  # malloc's heap may have as many resident pages already.
        filled.write(b"\1" * size)
        assert process_bytes()[0] > rss_read + 0.9 * size - size
        assert process_bytes()[1] > own + 0.9 * size  # type: ignore[operator]


@linux
def test_freed_memory_counts_inside_the_block_only():
    """A peak between two samples missed, or an earlier peak of the process reported."""
    before = numpy.ones(96 << 20, dtype=numpy.uint8)
    del before
    gc.disable()  # Garbage of earlier tests that is collected inside a block would be subtracted.
    try:
        with host_peak() as found:
            inside = numpy.ones(64 << 20, dtype=numpy.uint8)
            del inside
        with host_peak() as nothing:
            pass
    finally:
        gc.enable()
    assert found.peak_bytes is not None and found.added_bytes is not None and nothing.added_bytes is not None
    assert 63 * MIB < found.added_bytes < 72 * MIB
    assert found.peak_bytes > found.added_bytes
    assert nothing.added_bytes < 4 * MIB


@glibc
def test_phase_figures_are_the_highest_at_its_ends(monitor: MemoryMonitor):
    tensors = []
    for _ in range(2):
        with monitor.phase("forward"):
            # More than any heap has free, so it is mapped. Never touched: no page is resident.
            tensors.append(torch.empty(2048 * MIB, dtype=torch.uint8))
    with monitor.phase("backward"):
        tensors.clear()
    phases = monitor.by_phase()
    assert list(phases) == ["forward", "backward"]
    forward, backward = (phases[name]["reserved_bytes"] for name in phases)
    assert forward is not None and backward is not None
    assert forward - backward == pytest.approx(4096 * MIB, rel=0.1)
    unused = phases["forward"]["unused_bytes"]
    assert unused is not None and 0 <= unused < 1024 * MIB  # Of what is reserved, nearly all is live.
    assert phases["forward"]["alloc_retries"] is None
    assert phases["forward"]["rss_bytes"] > 16 * MIB  # type: ignore[operator]


def test_restored_figures_sum_retries_and_keep_the_largest_bytes(monitor: MemoryMonitor):
    """Retries before an interruption forgotten, or sizes of two processes summed."""
    seen = {"reserved_bytes": 9 * MIB, "unused_bytes": 2 * MIB, "alloc_retries": 2, "rss_bytes": 8 * MIB}
    monitor.restore({"forward": seen})
    monitor.restore({"forward": {**seen, "reserved_bytes": 7 * MIB, "alloc_retries": 3}})
    assert monitor.by_phase() == {"forward": {**seen, "alloc_retries": 5}}


@pytest.fixture(scope="module")
def job(small_llama: Path, tmp_path_factory) -> TrainJob:
    """A run of `STEPS` steps of one row each, the longest first."""
    rows, held = random_tokens(tmp_path_factory.mktemp("tokens"), random_lengths(6, 30, 30))
    longest = int(rows.lengths.argmax())
    plan = plan_of(rows, [[[(longest + step) % len(rows)]] for step in range(STEPS)])
    return make_job(small_llama, (rows, held), plan, train=spec_of(), heldout_every_steps=None, loader_threads=0)


def run(job: TrainJob, leak: Callable[[], object] = lambda: None) -> TrainResult:
    """Train with a callback that leaks in every step."""

    class Leaking(Callback):
        def on_step(self, row: CurveRow) -> None:
            leak()

    CALLBACKS.append(Leaking)
    try:
        return train(job, make_meter(CPU))
    finally:
        CALLBACKS.remove(Leaking)


@glibc
@pytest.mark.usefixtures("one_thread")
def test_leaked_tensors_are_reported_at_the_first_check(job: TrainJob, capsys):
    """Tensors that a list references.

    One thread: with more, some CPUs' matrix products allocate a buffer of 4 MiB at a length that comes late.
    """
    leaked: list[torch.Tensor] = []
    result = run(job, lambda: leaked.append(torch.zeros(LEAK_BYTES, dtype=torch.uint8)))
    warned = [line for line in capsys.readouterr().err.splitlines() if line.startswith("warning: ")]
    assert len(warned) == 1
    assert warned[0].startswith("warning: leak: live_bytes grows steadily at equal batch shape by ")
    assert f"-{FIRST_CHECK_STEPS - 1}," in warned[0] and " are used up at about step " in warned[0]
    growth = train_metrics(job, result, make_meter(CPU).result())["growth"]
    assert growth["cause"] == "leak" and growth["confidence"] >= CONFIDENCE
    assert growth["slope_bytes_per_step"] == pytest.approx(LEAK_BYTES, rel=0.2)
    assert growth["summary"].startswith("leak: live_bytes grows steadily") and "dvc exp run -S" in growth["summary"]


@linux
def test_leak_outside_malloc_is_found(job: TrainJob, capsys):
    """Memory of a driver or of another library."""
    leaked: list[mmap.mmap] = []

    def leak() -> None:
        leaked.append(mmap.mmap(-1, 2 * MIB))
        leaked[-1].write(bytes(2 * MIB))

    growth = classify(run(job, leak).curves)[0]
    assert (growth.cause, growth.series) == ("leak", "rss_own_bytes")
    assert growth.slope_bytes_per_step == pytest.approx(2 * MIB, rel=0.2)
    assert capsys.readouterr().err.count("warning: ") == 1
    for one in leaked:
        one.close()


def test_run_without_a_leak_has_no_warning(job: TrainJob, capsys):
    result = run(job)
    assert "warning: " not in capsys.readouterr().err
    assert {growth.cause for growth in classify(result.curves)} <= {"steady", "unclear"}
    assert list(result.memory_by_phase) == ["load", "forward", "backward", "clip", "optimizer"]
    assert all(row["longest_row"] <= row["largest_micro_batch_tokens"] for row in result.curves)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_counters_are_those_of_torch():
    device = torch.device("cuda")
    found = CudaCounters(device)
    tensor = torch.zeros(3 * MIB, dtype=torch.uint8, device=device)
    counts = found.read()
    assert counts.live_bytes == torch.cuda.memory_allocated(device) >= tensor.nbytes
    assert counts.reserved_bytes == torch.cuda.memory_reserved(device)
    assert counts.retries == torch.cuda.memory_stats(device)["num_alloc_retries"]
    before = found.pinned_bytes()
    pinned = torch.zeros(8 * MIB, dtype=torch.uint8).pin_memory()
    after = found.pinned_bytes()
    assert before is not None and after is not None and after - before >= pinned.nbytes
    assert 0 < found.left_bytes() <= torch.cuda.get_device_properties(device).total_memory
