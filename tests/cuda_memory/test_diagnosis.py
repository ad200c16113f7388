"""What a recording's stacks, sizes and lifetimes say is said, and nothing more."""

import copy
import json
import pickle
import random
import time

import pytest
from transformers import TrainingArguments

from cuda_memory.diagnosis import analyse, failures_of, unused_ranges
from cuda_memory.recorded_state import contradiction
from cuda_memory.recording import ACTIONS, Frame, read_table
from cuda_memory.remedies import EXPANDABLE, GRAD_CKPT, REMEDIES, TRAINER, TRAINER_AND_TRL, replayed
from cuda_memory.snapshot_file import read_snapshot
from cuda_memory.timeline import origin_of, timeline_of
from cuda_memory.units import MIB
from cuda_memory.what_if import what_if
from lean_finetune.config.other_tools import shared, tables
from lean_finetune.core.errors import UserError
from tests.conftest import ROOT
from tests.cuda_memory.snapshots import Snapshot, frame

SITE = "/usr/lib/python3/site-packages/"
MODEL = frame("/home/me/model.py", 20, "forward")
LOSS = frame(f"{SITE}torch/nn/functional.py", 3053, "cross_entropy")
ENGINE = frame("??", 0, "torch::autograd::Engine::thread_main(std::shared_ptr<torch::autograd::GraphTask> const&)")
UPDATE = frame(f"{SITE}torch/optim/adamw.py", 130, "step")
QLORA_TABLE = ROOT.parent / "shared/facts/cuda_traces/tinyllama_qlora_1x1000.csv.gz"

STACKS = {
    "weights": [(f"{SITE}torch/nn/modules/module.py", 1, "_apply"), ("/home/me/train.py", 5, "<module>")],
    "optimizer": [(f"{SITE}torch/optim/adamw.py", 1, "_init_group"), ("/home/me/train.py", 5, "step")],
    "activations": [(f"{SITE}torch/nn/functional.py", 1, "silu"), ("/home/me/model.py", 7, "forward")],
    "logits": [(f"{SITE}torch/nn/functional.py", 1, "cross_entropy"), ("/home/me/model.py", 9, "forward")],
    "backward": [("??", 0, "torch::autograd::generated::MmBackward0::apply(x)"), ("??", 0, ENGINE["name"])],
    "gradients": [("??", 0, "torch::autograd::AccumulateGrad::apply(x)"), ("??", 0, ENGINE["name"])],
    "unknown": [("/home/me/data.py", 3, "to_device")],
}


@pytest.mark.parametrize("category", STACKS)
def test_a_stack_says_the_category(category):
    assert origin_of([Frame(*each) for each in STACKS[category]]).category == category


def test_a_place_is_the_line_of_the_user_and_the_operation_of_pytorch():
    """PyTorch's own lines say nothing to a user, its operation does."""
    stack = [
        Frame("??", 0, "at::_ops::silu::call(at::Tensor const&)"),
        Frame("/usr/src/Python/Objects/methodobject.c", 543, "cfunction_call"),
        Frame(f"{SITE}torch/nn/functional.py", 2072, "silu"),
        Frame(f"{SITE}torch/nn/modules/module.py", 1500, "_call_impl"),
        Frame("/home/me/proj/model.py", 7, "forward"),
    ]
    assert origin_of(stack).label == "proj/model.py:7 forward (silu)"
    assert origin_of([Frame("??", 0, "torch::autograd::generated::MmBackward0::apply(x)")]).label == "backward of Mm"


def training(steps: int, *, leak: int = 0) -> Snapshot:
    """Steps of 6 MiB of activations, logits and loss of 16 MiB, a gradient of 4 MiB; an optimizer's state of 8 MiB."""
    snapshot = Snapshot(recording=False)
    snapshot.reserve(0, 200 * MIB)
    snapshot.alloc(0, 4 * MIB)
    snapshot.recording = True
    for step in range(steps):
        snapshot.alloc(8 * MIB, 6 * MIB, MODEL)
        snapshot.alloc(16 * MIB, 16 * MIB, frame("/home/me/model.py", 30, "forward"))
        snapshot.alloc(32 * MIB, 16 * MIB, LOSS, MODEL)
        snapshot.alloc(48 * MIB, 16 * MIB, ENGINE)
        snapshot.alloc(64 * MIB, 4 * MIB, ENGINE)
        for start in (8, 16, 32, 48):
            snapshot.free(start * MIB)
        if step == 0:
            snapshot.alloc(72 * MIB, 8 * MIB, UPDATE)
        snapshot.alloc(80 * MIB, MIB, UPDATE)
        snapshot.free(80 * MIB)
        snapshot.free(64 * MIB)
        if leak:
            snapshot.alloc((100 + 2 * step) * MIB, leak, frame("/home/me/metrics.py", 4, "log"))
    return snapshot


def analysed(snapshot, tmp_path, **options):
    (recording,) = read_snapshot(snapshot.write(tmp_path / "s.pickle", **options))
    return analyse(recording)


def test_the_peak_by_category_and_place(tmp_path):
    peak = analysed(training(3), tmp_path).peak
    sizes = {"logits": 32, "backward": 16, "optimizer": 8, "activations": 6, "gradients": 4, "earlier": 4}
    assert peak.by_category == {category: size * MIB for category, size in sizes.items()}
    assert peak.by_inference == {"by its size": 16 * MIB, "by its lifetime": 4 * MIB}
    assert sum(holding.bytes for holding in peak.holdings) == peak.allocated_bytes == 70 * MIB
    assert peak.reserved_bytes == 200 * MIB and peak.largest[0][2] == 16 * MIB


CAST = frame("??", 0, "at::autocast::cached_cast(c10::ScalarType, at::Tensor const&, c10::DeviceType)")
LINEAR = frame(f"{SITE}torch/nn/modules/linear.py", 125, "forward")
SOFTMAX = frame(f"{SITE}torch/nn/functional.py", 2137, "softmax")


def test_copies_of_weights_by_autocast_are_a_part_of_their_own(tmp_path):
    """They were activations, which checkpointing would make smaller: it leaves all of them."""
    snapshot = Snapshot(recording=False)
    snapshot.reserve(0, 200 * MIB)
    for number in range(3):
        snapshot.alloc(20 * number * MIB, 16 * MIB)  # Weights in fp32.
    snapshot.recording = True
    for number in range(3):
        snapshot.alloc((60 + 10 * number) * MIB, 8 * MIB, CAST, LINEAR, MODEL)
    snapshot.alloc(100 * MIB, 3 * MIB, CAST, LINEAR, MODEL)  # The input.
    analysis = analysed(snapshot, tmp_path)
    assert analysis.peak.by_category == {"earlier": 48 * MIB, "autocast": 24 * MIB, "activations": 3 * MIB}
    assert analysis.peak.by_inference == {"by its cast": 3 * MIB}
    (advice,) = [each for each in analysis.remedies if each.parts == ("autocast",)]
    assert advice.saved_bytes == 24 * MIB and advice.remedy.ours.startswith("train.precision=bf16")
    assert not any(each.remedy == GRAD_CKPT for each in analysis.remedies)


@pytest.mark.parametrize("function", ["eager_attention_forward", "forward"])
def test_scores_of_attention_advise_a_fused_kernel(tmp_path, function):
    """Checkpointing keeps one layer's scores, of length x length."""
    snapshot, own = Snapshot(), [frame("/home/me/attention.py", line, function) for line in (10, 11, 12, 20)]
    place = [[each, MODEL] if function != "forward" else [each] for each in own]
    snapshot.reserve(0, 200 * MIB)
    snapshot.alloc(0, 16 * MIB, *place[0])  # The product, in 16 bits.
    snapshot.alloc(16 * MIB, 32 * MIB, SOFTMAX, *place[1])
    snapshot.alloc(48 * MIB, 8 * MIB, frame(f"{SITE}torch/nn/functional.py", 1, "dropout"), *place[2])
    snapshot.alloc(56 * MIB, 5 * MIB, *place[3])
    snapshot.alloc(64 * MIB, 16 * MIB, frame(f"{SITE}torch/nn/functional.py", 2072, "silu"), MODEL)
    analysis = analysed(snapshot, tmp_path)
    assert analysis.peak.by_category == {"scores": 56 * MIB, "activations": 21 * MIB}
    (advice,) = [each for each in analysis.remedies if each.parts == ("scores",)]
    assert advice.remedy.ours == "train.attention=sdpa" and advice.saved_bytes == 56 * MIB


ROUTER = [SOFTMAX, frame("/home/me/moe.py", 5, "forward")]


def test_a_routers_softmax_is_no_attention(tmp_path):
    snapshot = Snapshot()
    snapshot.reserve(0, 20 * MIB)
    snapshot.alloc(0, 4 * MIB, *ROUTER)
    assert analysed(snapshot, tmp_path).peak.by_category == {"activations": 4 * MIB}


def test_compiled_code_is_named_by_the_line_that_calls_it():
    """A line of a generated file for each tensor, which nobody has written."""
    generated = Frame("/tmp/torchinductor_me/ab/cabcdefghijklmnopqrstuvwxyz0123.py", 321, "call")
    elsewhere = Frame("/scratch/compiled/xy/cxyabcdefghijklmnopqrstuvwxyz01.py", 5, "call")
    forward = [Frame(f"{SITE}torch/_functorch/_aot_autograd/runtime_wrappers.py", 1, "forward")]
    backward = [Frame(f"{SITE}torch/_functorch/_aot_autograd/runtime_wrappers.py", 2, "backward")]
    for inner in (generated, elsewhere):
        found = origin_of([inner, *forward, Frame("/home/me/model.py", 20, "forward")])
        assert (found.label, found.category) == ("me/model.py:20 forward", "activations")
        found = origin_of([inner, *backward])
        assert (found.label, found.category) == ("backward of code of torch.compile", "backward")


def test_a_line_is_listed_once(tmp_path):
    """Five rows of one line, for five operations; and five equal tensors, one by one."""
    snapshot = Snapshot()
    snapshot.reserve(0, 200 * MIB)
    for number, operation in enumerate(("silu", "linear", "silu", "dropout")):
        snapshot.alloc(20 * number * MIB, 16 * MIB, frame(f"{SITE}torch/nn/functional.py", 1, operation), MODEL)
    peak = analysed(snapshot, tmp_path).peak
    assert [(each.where, each.bytes // MIB, each.blocks) for each in peak.lines] == [
        ("me/model.py:20 forward (silu, linear, dropout)", 64, 4)
    ]
    assert [(where, count) for where, _, _, count in peak.largest] == [
        ("me/model.py:20 forward (silu)", 2),
        ("me/model.py:20 forward (linear)", 1),
        ("me/model.py:20 forward (dropout)", 1),
    ]


def test_what_saves_most_comes_first_and_segments_that_expand_are_among_it(tmp_path):
    """6.7 of 58.5 GiB for nothing were the fourth remedy, and three were printed."""
    snapshot = Snapshot(recording=False)
    snapshot.reserve(0, 400 * MIB)
    snapshot.alloc(0, 100 * MIB)
    snapshot.recording = True
    snapshot.alloc(100 * MIB, 40 * MIB, MODEL)
    snapshot.alloc(140 * MIB, 60 * MIB, LOSS)
    snapshot.alloc(200 * MIB, 48 * MIB, UPDATE)
    analysis = analysed(snapshot, tmp_path)
    assert [each.parts[0] for each in analysis.remedies] == [
        "reserved but unused", "earlier", "logits", "activations", "optimizer",
    ]  # fmt: skip
    sizes = [each.saved_bytes for each in analysis.remedies]
    assert sizes == [152 * MIB, 70 * MIB, 60 * MIB, 40 * MIB, 36 * MIB]
    expanding = replayed(analysis.remedies, analysis.recording, 400 * MIB, 345 * MIB)[2]
    assert (expanding.remedy, expanding.saved_bytes, expanding.basis) == (EXPANDABLE, 55 * MIB, "replayed")
    assert len(replayed(analysis.remedies, analysis.recording, 400 * MIB, 398 * MIB)) == 4


def test_a_leak_is_found_and_named(tmp_path):
    steps = analysed(training(24, leak=MIB), tmp_path).steps
    assert len(steps.rows) == 23 and steps.growth[0].cause == "leak" and steps.growth[0].slope_bytes_per_step == MIB
    assert steps.grown == (("me/metrics.py:4 log", 22 * MIB, 22),)


def test_steps_without_growth_are_steady(tmp_path):
    steps = analysed(training(20), tmp_path).steps
    assert [growth.cause for growth in steps.growth] == ["steady"] and steps.grown == ()


def test_steps_are_found_by_named_ranges(tmp_path):
    snapshot = training(4)
    ends = [event["time_us"] for event in snapshot.trace if event["size"] == MIB and event["action"] == "alloc"]
    snapshot.annotations = [
        {"device": 0, "name": "Optimizer.step#AdamW.step", "stage": "END", "time_us": time} for time in ends
    ]
    steps = analysed(snapshot, tmp_path).steps
    assert "optimizer steps" in steps.found_by and len(steps.rows) == 3


def test_a_failure_says_what_would_have_been_enough(tmp_path):
    """24 MiB are unused, but in pieces of 16 and 8 MiB: the request needs a new segment of 22 MiB."""
    snapshot = Snapshot()
    snapshot.reserve(0, 40 * MIB)
    snapshot.alloc(0, 8 * MIB, MODEL)
    snapshot.alloc(8 * MIB, 16 * MIB, MODEL)
    snapshot.alloc(24 * MIB, 8 * MIB, MODEL)
    snapshot.free(8 * MIB)
    snapshot.fail(21 * MIB, 20 * MIB, MODEL)
    analysis = analysed(snapshot, tmp_path)
    (failure,) = analysis.failures
    assert (failure.requested_bytes, failure.device_free_bytes) == (21 * MIB, 20 * MIB)
    assert (failure.unused_bytes, failure.largest_unused_bytes) == (24 * MIB, 16 * MIB)
    assert failure.is_fragmentation and failure.missing_bytes == 2 * MIB and failure.where == "me/model.py:20 forward"
    assert analysis.peak.allocated_bytes == 16 * MIB  # At the failure, not at the highest instant.
    assert analysis.remedies[0].remedy == EXPANDABLE and analysis.remedies[0].saved_bytes == 24 * MIB


def test_unused_ranges_of_segments_that_touch_are_not_joined(tmp_path):
    """A block cannot span two segments of fixed size."""
    for expandable, sizes in ((False, [20, 20]), (True, [40])):
        snapshot = Snapshot(expandable=expandable)
        snapshot.reserve(0, 20 * MIB)
        snapshot.reserve(20 * MIB, 20 * MIB)
        (recording,) = read_snapshot(snapshot.write(tmp_path / "s.pickle"))
        assert [size // MIB for size in unused_ranges(recording, 2)] == sizes


def test_a_recording_without_stacks_claims_nothing(tmp_path):
    snapshot = Snapshot()
    snapshot.reserve(0, 20 * MIB)
    snapshot.alloc(0, MIB)
    analysis = analysed(snapshot, tmp_path)
    assert set(analysis.peak.by_category) == {"unknown"} and analysis.steps.rows == ()
    assert not failures_of(timeline_of(analysis.recording))


def test_a_snapshot_without_events_shows_what_is_live(tmp_path):
    analysis = analysed(training(1), tmp_path, keep=0)
    assert analysis.peak.allocated_bytes == 12 * MIB and analysis.peak.by_category["optimizer"] == 8 * MIB
    assert analysis.peak.holdings[-1].where == "no stack (recorded without history)"  # Not "before the recording".


@pytest.mark.slow
def test_impossible_recordings_are_analysed_and_replayed_or_not(tmp_path):
    """Snapshots with changed numbers, actions and order: no crash, no hang, and replay only where it is possible."""
    rng, replayed, refused = random.Random(17), 0, 0
    sources = [training(3), training(2, leak=MIB), expandable_training()]
    for _ in range(1500):
        content = copy.deepcopy(rng.choice(sources).content())
        damage(content, rng)
        (tmp_path / "s.pickle").write_bytes(pickle.dumps(content))
        started = time.monotonic()
        try:
            for recording in read_snapshot(tmp_path / "s.pickle"):
                json.dumps(analyse(recording).as_json())
                if contradiction(recording) is None:
                    what_if(recording)
                    replayed += 1
        except UserError:
            refused += 1
        assert time.monotonic() - started < 10
    assert replayed > 50 and refused > 50


def expandable_training() -> Snapshot:
    """Two steps in memory that is mapped and unmapped."""
    snapshot = Snapshot(expandable=True)
    for number in range(6):
        snapshot.reserve(20 * number * MIB, 20 * MIB)
        snapshot.alloc(20 * number * MIB, 15 * MIB, MODEL)
    for number in (1, 2, 4):
        snapshot.free(20 * number * MIB)
        snapshot.release(20 * number * MIB)
    snapshot.fail(60 * MIB, 5 * MIB, MODEL)
    return snapshot


def damage(value, rng):
    """Change numbers, texts and flags, and drop, repeat or move items."""
    if isinstance(value, dict):
        for key, old in value.items():
            if rng.random() < 0.01 and type(old) is int:
                value[key] = rng.choice([0, 1, 2**40, 2**47, old + 1, old + 512, 2 * old])
            elif rng.random() < 0.01 and isinstance(old, str):
                value[key] = rng.choice(ACTIONS)
            elif rng.random() < 0.01 and isinstance(old, bool):
                value[key] = not old
            else:
                damage(old, rng)
    elif isinstance(value, list):
        if value and rng.random() < 0.1:
            place, moved = rng.randrange(len(value)), value[rng.randrange(len(value))]
            value[place : place + rng.randrange(2)] = [moved] * rng.randrange(2)
        for each in value:
            damage(each, rng)


def test_every_name_of_another_tool_is_in_its_table():
    """A parameter that the Trainer does not have: load_in_4bit is TRL's."""
    by_tool = {table["tool"]: table for table in tables()}
    for remedy in (each for remedies in REMEDIES.values() for each in remedies):
        for tool, text in remedy.elsewhere.items():
            if tool in (TRAINER, "PyTorch"):  # Calls of Python: the Trainer's arguments are in those of TRL.
                continue
            table = by_tool["TRL" if tool == TRAINER_AND_TRL else tool]
            known = {*table["keys"], *(key for keys in table["ignored"].values() for key in keys)}
            for setting in text.split(", "):
                key, _, value = setting.partition(": ")
                key = key.removeprefix("halve ").removeprefix("double ")
                assert key in known, (tool, key)
                assert tool != TRAINER_AND_TRL or key in TrainingArguments.__dataclass_fields__, key
                assert not key.startswith("optim") or shared()["optimizers"][value] == "adamw_8bit"


@pytest.mark.skipif(not QLORA_TABLE.exists(), reason="the recording is not part of this repository")
def test_what_fills_a_real_qlora_step():
    """By hand: 44 products' outputs of 1000 tokens, 945 MiB; silu 473 MiB; dropout's masks and results 430 MiB."""
    analysis = analyse(read_table(QLORA_TABLE))
    found = {(each.where, each.blocks): round(each.bytes / MIB) for each in analysis.peak.holdings}
    assert found["autograd/_functions.py:509 forward", 44] == 945
    assert found["nn/functional.py:2072 silu", 22] == 473 and found["nn/functional.py:1266 dropout", 88] == 430
    assert round(analysis.peak.by_category["logits"] / MIB) == 244
    assert [each.parts for each in analysis.remedies] == [("activations",)]
    (_, expanding) = analysis.checked_by(what_if(analysis.recording)).remedies
    assert expanding.remedy == EXPANDABLE and round(expanding.saved_bytes / MIB) == 530
