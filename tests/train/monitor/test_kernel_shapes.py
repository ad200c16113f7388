"""Growth by kernels that a CPU's library keeps for each new shape: counted, told from a leak, and its end is said."""

import json
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from cuda_memory.growth import classify
from cuda_memory.units import GIB, MIB
from lean_finetune.core.atomic_files import write_csv
from lean_finetune.memory.advice.run_notes import notes_of
from lean_finetune.memory.devices import cpu_device
from lean_finetune.train.callbacks.callback import CURVE_COLUMNS
from lean_finetune.train.monitor.growth_advice import check_is_due, explained, growth_line
from lean_finetune.train.monitor.kernel_shapes import KernelShapes
from tests.conftest import ROOT
from tests.memory.common import micro_batch
from tests.memory.workloads import workload
from tests.processes import run_bounded
from tests.small_model import CPU, spec_of
from tests.train.series import rows_of

# QLoRA in bf16 on packed rows, six layers of SmolLM2-135M's sizes: MiB after each step, in a process of its own.
SHAPES = (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 21, 21, 22, 23, 24, 24, 25, 26)
TOKENS = (
    *(226, 231, 163, 165, 153, 180, 194, 210, 161, 148, 155, 159, 180, 151, 175),
    *(145, 228, 183, 219, 190, 213, 146, 151, 159, 236, 174, 224, 180, 192, 230),
)
LIVE_MIB = (
    *(208, 237, 264, 288, 308, 327, 349, 376, 396, 415, 429, 442, 446, 463, 478),
    *(498, 522, 538, 558, 578, 597, 614, 614, 614, 631, 651, 670, 673, 694, 708),
)
OWN_MIB = (
    *(427, 470, 494, 527, 559, 598, 628, 660, 687, 721, 750, 769, 766, 788, 813),
    *(827, 896, 901, 923, 932, 962, 987, 995, 991, 1030, 1045, 1077, 1082, 1089, 1153),
)
STEPS = len(SHAPES)


def recorded(shapes: bool = True, **changes: Any) -> list[dict[str, Any]]:
    columns: dict[str, Any] = {
        "largest_micro_batch_tokens": np.array(TOKENS),
        "live_bytes": np.array(LIVE_MIB) * MIB,
        "rss_own_bytes": np.array(OWN_MIB) * MIB,
        "kernel_shapes": np.array(SHAPES),
        **changes,
    }
    rows = [{**row, "alloc_retries": None} for row in rows_of(**columns)]
    return rows if shapes else [{**row, "kernel_shapes": None} for row in rows]


def test_shapes_are_counted_where_kernels_are_kept_for_them():
    """A growing count on a GPU or in fp32, whose memory does not depend on it."""
    lengths = np.array([5, 7, 7, 9])
    packed = [micro_batch(0, rows, int(lengths[rows].sum()), 4, flat=True) for rows in ([0, 1], [1, 2], [0, 3], [0, 1])]
    padded = [micro_batch(1, [0, 1], 8, 4), micro_batch(1, [2, 3], 8, 4), micro_batch(1, [1], 16, 4)]
    shapes = KernelShapes(CPU, spec_of(precision="bf16"))
    assert shapes.after(packed[:1], lengths) == 3  # 12 tokens, in rows of 5 and 7.
    assert shapes.after(packed, lengths) == 5  # And 14, of which rows of 5 and 9 have as many; a row of 9.
    assert shapes.after(padded, lengths) == 8  # 16 tokens in rows of 8, and in one of 16.
    for device, precision in ((CPU, "fp32"), (torch.device("cuda"), "bf16")):
        assert KernelShapes(device, spec_of(precision=precision)).after(packed, lengths) is None


def test_growth_with_new_shapes_is_kernels_and_its_end_is_said(tmp_path: Path):
    """`explain` said "unclear", or a warning said that it is a leak, of memory that grows to a known bound."""
    rows = recorded()
    for steps in (*filter(check_is_due, range(STEPS)), STEPS):
        assert [(one.cause, one.series) for one in classify(rows[:steps])] == [("kernels", "rss_own_bytes")], steps
    write_csv(tmp_path / "curves.csv", CURVE_COLUMNS, rows)
    (line,) = explained(tmp_path / "curves.csv", None)
    assert line.startswith(
        "kernels: rss_own_bytes grows with new shapes of batches by 25.03 MiB a step, 0.709 GiB over "
    )
    assert "about 0.5 GiB" in line and "it ends by itself, nothing to do" in line


@pytest.mark.parametrize(
    "rows",
    [
        recorded(kernel_shapes=np.minimum(SHAPES, 5)),  # Most growth is in steps without a new shape.
        recorded(live_bytes=np.array(LIVE_MIB) * 2 * MIB),  # 1 GiB is more than kernels take.
        recorded(rss_own_bytes=np.array(OWN_MIB) * 3 * MIB),
        recorded(shapes=False),
    ],
    ids=["old shapes", "too many tensors", "too large a process", "no shapes"],
)
def test_growth_that_kernels_do_not_explain_is_not_called_so(rows):
    """A leak that is said to end."""
    assert "kernels" not in {one.cause for one in classify(rows)}


def test_unclear_growth_names_two_causes_and_what_tells_them_apart():
    """Before, the line said that no cause is certain, and left nothing to do."""
    drifting = 2 * GIB + np.array([0, 0, 6, 2, 9, 14, 8, 20, 22, 18, 30, 34]) * 8 * MIB
    sizes = np.array([3, 4, 3, 4, 3, 4, 3, 4, 3, 4, 3, 4])
    expected = {
        "rss_own_bytes": r"either a cache .* or each step keeps something: after twice as many steps",
        "live_bytes": r"either batches have ever other sizes, or each step keeps tensors: `dvc exp run -S ",
    }
    for name, text in expected.items():
        (growth,) = classify(rows := rows_of(**{name: drifting, "tokens": sizes}))
        assert growth.cause == "unclear"
        line = growth_line(growth, rows, 4 * GIB, {})
        assert re.search(text, line) and "; at this speed the remaining 4 GiB last for 165 steps" in line
    (growth,) = classify(rows := rows_of(live_bytes=drifting, tokens=sizes))
    line = growth_line(growth, rows, None, None)
    assert line.endswith("with batches of one size only the second still grows") and "dvc" not in line
    (growth,) = classify(rows := rows_of(rss_bytes=8 * GIB + (drifting - 2 * GIB)))
    assert growth_line(growth, rows, None, {}).endswith("; 3.3 % in all: nothing to do in a run of this length")


TRAINING = """
import json, sys, tempfile
from pathlib import Path
import torch
torch.set_num_threads(1)
from cuda_memory.growth import classify
from lean_finetune.train.loop import train
from lean_finetune.train.monitor.measured_peak import make_meter
from tests.small_model import CPU, save_small_llama, spec_of
from tests.train.jobs import make_job, plan_of, random_tokens
precision, kernels = sys.argv[1], sys.argv[2] == "onednn"
torch.backends.mkldnn.set_flags(kernels)
with tempfile.TemporaryDirectory() as name:
    model = save_small_llama(Path(name) / "model")
    tokens = random_tokens(Path(name), range(20, 60))
    plan = plan_of(tokens[0], [[[step, step + 16]] for step in range(24)], flat=True)
    job = make_job(model, tokens, plan, train=spec_of(precision=precision), heldout_every_steps=None)
    curves = train(job, make_meter(CPU)).curves
grown = curves[-1]["live_bytes"] - curves[1]["live_bytes"]
print(json.dumps([classify(curves)[0].cause, grown, curves[-1]["kernel_shapes"]]))
"""


@pytest.mark.slow
@pytest.mark.skipif(
    not torch.backends.mkldnn.is_available() or not torch.ops.mkldnn._is_mkldnn_bf16_supported(),
    reason="needs a CPU on which oneDNN computes in bf16",
)
def test_a_cpu_keeps_kernels_for_each_shape_in_16_bits_only():
    """What the explanation rests on, in processes of their own: without oneDNN, and in fp32, memory is flat."""
    runs = [("bf16", "onednn"), ("bf16", "none"), ("fp32", "onednn")]
    done = [run_bounded([sys.executable, "-c", TRAINING, *run], cwd=ROOT, check=True) for run in runs]
    (cause, grown, shapes), *flat = (json.loads(one.stdout.splitlines()[-1]) for one in done)
    assert cause == "kernels" and 100 * MIB < grown < 768 * MIB and shapes > 24
    assert all(cause != "kernels" and abs(grown) < 8 * MIB for cause, grown, _ in flat)
    assert flat[1][2] is None


@pytest.mark.parametrize(
    ("device", "precision", "noted"), [("cpu", "bf16", True), ("cpu", "fp32", False), ("H100", "bf16", False)]
)
def test_a_prediction_says_that_it_does_not_count_kernels(device, precision, noted):
    """A container with room for the predicted tensors alone, killed after some steps."""
    run = workload(method="lora", precision=precision)
    run = replace(run, device=cpu_device(2**34) if device == "cpu" else run.device)
    assert any("up to 1 GiB for kernels" in note for note in notes_of(run)) == noted
