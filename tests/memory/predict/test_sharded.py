"""Runs on several GPUs: predictions per GPU compared with real processes, and the savings of sharding."""

from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from lean_finetune.memory.predict.peak import predict
from lean_finetune.memory.predict.process_memory import closed_form
from lean_finetune.memory.predict.state_formulas import model_shapes
from lean_finetune.memory.predict.traced_step import TracedModel, trace_steps
from lean_finetune.memory.trace.memory_trace import MemoryTrace
from lean_finetune.model.model_config import read_config
from tests.distributed.group import Group, group_of
from tests.kit.estimate_cpu import save_small
from tests.memory.common import CPU_TARGET, ONEDNN_SCRATCH_BYTES, llama
from tests.memory.predict.test_preferences import of_kind
from tests.memory.ranks import IN_FLIGHT, STEPS, do_peaks, do_peaks_by_rank, pipeline_setting, shared_setting
from tests.small_model import save_small_llama
from tests.step.common import slow

TOLERATED_SHARE, TOLERATED_BYTES = 1e-3, 1536
MODES = ("ddp", "zero1", "zero2", "zero3")


@pytest.fixture(scope="module")
def pair() -> Iterator[Group]:
    """Two processes."""
    with group_of(2) as group:
        yield group


@pytest.fixture(scope="module")
def four() -> Iterator[Group]:
    """Four processes."""
    with group_of(4) as group:
        yield group


def check(group: Group, size: int, directory: Path, mode: str, steps: str, **changes: Any) -> None:
    """Every phase of the step, within the bound of one process."""
    setting = shared_setting(mode, size, steps, **changes)
    shapes, config = of_kind(setting.train.objective, STEPS[steps]), read_config(directory, scores=setting.train.scores)
    predicted = predict(TracedModel(config, setting, CPU_TARGET), shapes)
    counted = group.ask(do_peaks, directory, setting, shapes)
    for phase, peak in predicted.by_phase.items():
        allowed = max(TOLERATED_SHARE * counted[phase], TOLERATED_BYTES)
        assert abs(peak.bytes - counted[phase]) <= allowed, (phase, peak.bytes - counted[phase], peak)


FAST = [("zero1", "lora"), ("zero3", "qlora")]
ALL = list(product(MODES, ("full", "lora", "qlora"), ("one turn", "two turns")))


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    ("mode", "method", "steps"),
    [
        case if case[:2] in FAST and case[2] == "two turns" else pytest.param(*case, marks=pytest.mark.slow)
        for case in ALL
    ],
)
def test_prediction_equals_what_processes_count(small_llama: Path, pair: Group, mode, method, steps):
    """A buffer of DDP or FSDP2 traced wrong, or a shard counted as the full tensor."""
    check(pair, 2, small_llama, mode, steps, method=method)


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.parametrize(
    ("mode", "method"), [("ddp", "full"), ("zero2", "lora"), ("zero3", "full"), ("zero3", "qlora")]
)
def test_fused_kernels_are_predicted_as_processes_count_them(small_llama: Path, pair: Group, mode, method):
    """Weights of norms that Liger saves for backward, counted twice or beyond their layer."""
    pytest.importorskip("liger_kernel", reason="needs liger-kernel: pip install -e .[liger]", exc_type=ImportError)
    check(pair, 2, small_llama, mode, "two turns", method=method, grad_ckpt=method == "qlora", fused_kernels="liger")


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.parametrize("steps", ["two turns", "joined"])
@pytest.mark.parametrize(
    ("mode", "changes"),
    [
        ("ddp", {"method": "lora", "compress_activations": "int8"}),
        ("zero3", {"method": "full", "compress_activations": "int8"}),
        ("zero3", {"method": "qlora", "compress_activations": "fp8", "grad_ckpt": True}),
    ],
)
def test_compressed_activations_are_predicted_as_processes_count_them(small_llama, pair: Group, mode, changes, steps):
    """Gathered weights of a layer that are compressed, or codes that outlive their layer."""
    check(pair, 2, small_llama, mode, steps, **changes)


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    ("mode", "changes"),
    [
        ("zero3", {"method": "qlora", "lora_experts": "all"}),
        pytest.param("zero3", {"method": "full"}, marks=pytest.mark.slow),
        pytest.param("zero2", {"method": "lora", "lora_experts": "all"}, marks=pytest.mark.slow),
    ],
)
def test_experts_are_predicted_as_processes_count_them(tmp_path, pair: Group, mode, changes):
    """Scales of packed experts, which every process has, counted as shards."""
    check(pair, 2, save_small("Qwen3-MoE", tmp_path), mode, "two turns", **changes)


COPY: dict[str, Any] = {"lora_modules_to_save": ["embed_tokens"]}
ROWS: dict[str, Any] = {"lora_trainable_tokens": [9, 3]}
PREFERENCES: list[tuple[str, str, dict[str, Any]]] = [
    ("reward", "zero3", {"method": "lora", **COPY}),
    *(("dpo", mode, {"method": "qlora", "grad_ckpt": True}) for mode in ("ddp", "zero3")),
    *((name, mode, {"method": "full"}) for name, mode in product(("dpo", "kto", "reward"), ("ddp", "zero3"))),
    *(("reward", mode, {"method": "lora"}) for mode in ("zero1", "zero2")),
    *(("reward", mode, {"method": "qlora", **more}) for mode, more in product(("ddp", "zero3"), (COPY, ROWS))),
]


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    ("name", "mode", "changes"), [PREFERENCES[0], *(slow(*case) for case in PREFERENCES[1:])], ids=str
)
def test_preferences_are_predicted_as_processes_count_them(small_llama, pair: Group, name, mode, changes):
    """Scores, mismatched answers or a copy of the embedding that a process is not predicted to have."""
    for steps in ("one turn", "two turns"):
        check(pair, 2, small_llama, mode, steps, objective=name, **changes)


PIPELINE_CHANGES: list[dict[str, Any]] = [
    {},
    {"grad_ckpt": True, "loss_chunk": 64},
    {"precision": "fp16", "grad_ckpt": True},
    {"precision": "bf16"},
    {"precision": "bf16", "grad_ckpt": True, "loss_chunk": 64},
    {"offload_activations": "disk"},
]
MASTER_WEIGHTS = {"method": "full", "precision": "bf16", "master_weights": True}


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.parametrize(
    ("processes", "layers", "changes"),
    [
        *(("pair", (2, 3), {"method": m, **one}) for m, one in product(("full", "lora", "qlora"), PIPELINE_CHANGES)),
        ("four", (1, 2, 1, 1), {"method": "full"}),
    ],
    ids=str,
)
def test_every_stage_of_a_pipeline_counts_what_is_predicted(request, tmp_path, processes, layers, changes):
    """Micro-batches in flight that are not counted, or a hidden state that is kept after it was sent."""
    directory = save_small_llama(tmp_path, num_hidden_layers=5, tie_word_embeddings=False)
    setting = pipeline_setting(layers, **changes)
    config = read_config(directory)
    counted = request.getfixturevalue(processes).ask(do_peaks_by_rank, directory, setting, IN_FLIGHT)
    for stage, found in enumerate(counted):
        own = setting.of_stage(stage, layers)
        predicted = trace_steps(MemoryTrace, TracedModel(config, own, CPU_TARGET), IN_FLIGHT)[0].peaks()
        for phase, peak in predicted.items():
            allowed = max(TOLERATED_SHARE * found[phase], TOLERATED_BYTES)
            assert abs(peak.bytes - found[phase]) <= allowed, (stage, phase, peak.bytes - found[phase], peak)
    prediction = predict(TracedModel(config, setting, CPU_TARGET), IN_FLIGHT)
    assert max(found["backward"] for found in counted) == pytest.approx(prediction.by_phase["backward"].bytes, rel=1e-3)


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.parametrize(
    ("mode", "method", "context"),
    [
        *product(("hsdp",), ("full", "lora", "qlora"), (1,)),
        *(("hsdp", "full", 2), ("hsdp", "qlora", 2), ("hsdp", "lora", 4)),
        *(("ddp", "full", 1), ("zero1", "lora", 1), ("zero2", "full", 1), ("zero3", "qlora", 1), ("ddp", "lora", 2)),
    ],
)
def test_the_prediction_holds_for_four_processes(small_llama: Path, four: Group, mode, method, context):
    """Untraced buffers of reductions between groups, or a part of two processes counted in four."""
    for steps in ("one turn", "two turns"):
        check(four, 4, small_llama, mode, steps, method=method, context=context)


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.parametrize("steps", STEPS)
@pytest.mark.parametrize(
    ("mode", "changes"),
    [
        ("ddp", {"method": "full"}),
        ("zero1", {"method": "lora", "grad_ckpt": True}),
        ("zero2", {"method": "qlora"}),
        ("zero3", {"method": "qlora", "grad_ckpt": True}),
        ("ddp", {"method": "int8_lora"}),
        ("zero1", {"method": "int8_lora", "grad_ckpt": True}),
        ("zero3", {"method": "full", "precision": "fp16"}),
        ("zero3", {"method": "full", "precision": "bf16"}),
        ("zero1", {"method": "lora", "precision": "bf16"}),
        ("ddp", {"method": "lora", "precision": "bf16", "grad_ckpt": True}),
        ("zero3", {"method": "full", "offload_activations": "disk"}),
        ("ddp", {"method": "lora", "grad_ckpt": True, "offload_activations": "disk"}),
    ],
)
def test_the_prediction_holds_where_rows_are_divided(small_llama: Path, pair: Group, mode, changes, steps):
    """Heads of complete rows counted as those of a part, or what is exchanged counted nowhere."""
    check(pair, 2, small_llama, mode, steps, context=2, **changes)


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.parametrize(
    "setting",
    [
        setting
        for changes in ({"method": "full"}, {"method": "lora", "grad_ckpt": True})
        for setting in (
            pipeline_setting((1, 1), precision="bf16", **changes),
            shared_setting("zero3", 2, "joined", context=2, precision="bf16", **changes),
        )
    ],
    ids=["full, stages", "full, rows", "lora, stages", "lora, rows"],
)
def test_onednn_adds_at_most_the_scratch_of_one_product(small_llama: Path, pair: Group, setting):
    """In bf16, memory that oneDNN keeps, or a part of the step that only its kernels need."""
    plain, counted = (pair.ask(do_peaks, small_llama, setting, STEPS["joined"], onednn) for onednn in (False, True))
    for phase, size in counted.items():
        assert -TOLERATED_BYTES <= size - plain[phase] <= ONEDNN_SCRATCH_BYTES, phase


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.parametrize(
    ("mode", "gpus", "changes"),
    [
        ("none", 2, {"method": "full"}),
        ("none", 2, {"method": "lora", "grad_ckpt": True, "grad_ckpt_policy": "selective"}),
        ("none", 2, {"method": "qlora", "grad_ckpt": True}),
        ("none", 2, MASTER_WEIGHTS),
        ("none", 2, {"method": "qlora", "precision": "fp16"}),
        ("none", 2, {"method": "lora", "precision": "bf16", "offload_activations": "disk"}),
        ("zero3", 4, {"method": "full", "grad_ckpt": True}),
        ("zero3", 4, {"method": "qlora"}),
        ("ddp", 4, {"method": "lora"}),
        ("zero3", 4, {"method": "lora"}),
        ("none", 4, {"method": "full", "tensor": 4}),
    ],
)
def test_the_prediction_holds_where_products_are_divided(request, tmp_path, mode, gpus, changes):
    """A whole weight counted as a part, or buffers of sums counted nowhere; the closed form follows the parts."""
    directory = save_small_llama(tmp_path, hidden_size=128, intermediate_size=256, num_key_value_heads=4)
    changes = {"tensor": 2, **changes}
    for steps in ("one turn", "two turns"):
        check(request.getfixturevalue({2: "pair", 4: "four"}[gpus]), gpus, directory, mode, steps, **changes)
    setting = shared_setting(mode, gpus, "one turn", **changes)
    config = read_config(directory)
    traced = predict(TracedModel(config, setting, CPU_TARGET), STEPS["one turn"]).by_phase["clip"].by_category
    closed: dict[str, int] = {}
    for line in closed_form(TracedModel(config, setting, CPU_TARGET)):
        closed[line["category"]] = closed.get(line["category"], 0) + line["bytes"]
    for category in ("weights", "adapters", "optimizer", "quantisation_state"):
        assert closed.get(category, 0) == traced.get(category, 0), category


DEEP = llama(num_hidden_layers=14)
"""Deep enough that a few layers are traced for all."""


@pytest.mark.parametrize(("mode", "method"), list(product((*MODES, "hsdp"), ("full", "lora", "qlora"))))
@pytest.mark.slow
def test_a_few_layers_represent_all(mode, method):
    """Gathers that a layer's window does not see, or differ with depth; owners by the few layers alone."""
    setting = shared_setting(mode, 4, "two turns", method=method, grad_ckpt=True)
    found = predict(TracedModel(DEEP, setting, CPU_TARGET), STEPS["two turns"])
    assert found.layers_traced.startswith("models of 3, 4, 5 layers")
    assert (
        found.by_phase
        == trace_steps(MemoryTrace, TracedModel(DEEP, setting, CPU_TARGET), STEPS["two turns"])[0].peaks()
    )


@pytest.mark.parametrize("mode", ["zero1", "zero2", "zero3"])
def test_the_closed_form_is_that_of_one_gpu(mode):
    """State of the full model reported for a GPU that has a shard of it."""
    setting = shared_setting(mode, 4, "one turn", method="full", grad_ckpt=True)
    traced = predict(TracedModel(DEEP, setting, CPU_TARGET), STEPS["one turn"]).by_phase["clip"].by_category
    closed: dict[str, int] = {}
    for line in closed_form(TracedModel(DEEP, setting, CPU_TARGET)):
        closed[line["category"]] = closed.get(line["category"], 0) + line["bytes"]
        divided = line["category"] == "optimizer" or (mode != "zero1" and line["why"] != "buffers")
        assert ("in 4 shards" in line["why"]) == divided
    whole_tensors = mode == "zero1"  # A GPU's tensors are more or less than an equal part.
    assert closed["optimizer"] == pytest.approx(traced["optimizer"], rel=0.05 if whole_tensors else 1e-9)
    assert closed["weights"] == traced["weights"]
    assert whole_tensors or closed["gradients"] == traced["gradients"]


@pytest.mark.parametrize(("mode", "method"), [("zero3", "full"), pytest.param("hsdp", "qlora", marks=pytest.mark.slow)])
@pytest.mark.slow
def test_shards_on_the_host_take_no_device_memory(mode, method):
    """Shards, gradients or state counted on the device; or a shard's copy on its way counted nowhere."""
    setting = shared_setting(mode, 4, "two turns", method=method, grad_ckpt=True)
    here = predict(TracedModel(DEEP, setting, CPU_TARGET), STEPS["two turns"]).by_phase
    there = predict(
        TracedModel(DEEP, setting.with_train(offload="parameters"), CPU_TARGET), STEPS["two turns"]
    ).by_phase
    stay = ("activations", "inputs", "logits", "quantisation_state", "sharding")
    for phase in ("forward", "clip", "optimizer"):
        traced, left = here[phase].by_category, there[phase].by_category
        assert [traced.get(name, 0) for name in stay] == pytest.approx([left.get(name, 0) for name in stay], abs=64)
        assert left.get("weights", 0) <= 0.001 * traced["weights"] and not {"adapters", "optimizer"} & left.keys()
    # Of gradients, those on their way.
    assert there["backward"].by_category["gradients"] <= here["backward"].by_category["gradients"]


def states(mode: str, gpus: int, steps: str = "one turn") -> dict[str, int]:
    """Bytes by category during the update."""
    setting = shared_setting(mode, gpus, steps, method="full", grad_ckpt=True)
    return dict(predict(TracedModel(DEEP, setting, CPU_TARGET), STEPS[steps]).by_phase["clip"].by_category)


@pytest.mark.slow
def test_states_of_a_gpu_fall_as_published():
    """Rajbhandari et al. 2020, arXiv 1910.02054: stage 1 divides optimizer state, stage 2 gradients, 3 weights too."""
    W, N = model_shapes(DEEP).values * 4, 8
    ddp = states("ddp", N)
    assert ddp["weights"] == pytest.approx(W, rel=1e-3) and ddp["optimizer"] == pytest.approx(2 * W, rel=1e-3)
    for traced in (ddp, states("ddp", N, "two turns")):  # Once, however many micro-batches add to them.
        assert traced["gradients"] == pytest.approx(W, rel=1e-3) and not traced.get("sharding")
    assert states("zero1", N)["optimizer"] == pytest.approx(2 * W / N, rel=0.05)
    for gpus in (N, 32):
        parts = states("zero3", gpus)
        states_of_part = sum(parts[category] for category in ("weights", "gradients", "optimizer"))
        assert states_of_part == pytest.approx(4 * W / gpus, rel=0.05)


@pytest.mark.slow
def test_the_model_is_never_whole_on_a_gpu_under_zero3():
    """ZeRO-3 has 1/n of the weights, one or two gathered layers, and embedding and head."""
    setting = shared_setting("zero3", 64, "one turn", method="full", grad_ckpt=True)
    peak = predict(TracedModel(DEEP, setting, CPU_TARGET), STEPS["one turn"]).by_phase["forward"].by_category
    shapes = model_shapes(DEEP).parameters
    ends = sum(p.values for p in shapes if ".layers." not in p.name) * 4
    layer = sum(p.values for p in shapes if ".layers.0." in p.name) * 4
    assert ends + layer <= peak["sharding"] <= 1.02 * (ends + 3 * layer)
