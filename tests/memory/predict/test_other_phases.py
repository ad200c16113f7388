"""Phases outside of the step: against measured loading and measured losses without gradients."""

import gc
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from lean_finetune.evaluate.generate import Prompt, batch_rows, greedy_answers
from lean_finetune.evaluate.reference_run import row_logps
from lean_finetune.images.attachment import ImageAttachment, sizes_of
from lean_finetune.memory.predict.evaluation_phases import GenerationShape, peak_of_answers
from lean_finetune.memory.predict.other_phases import (
    OtherPhases,
    evaluation_note,
    generation_shapes,
    loading_note,
    other_phases,
    reference_note,
    reference_shape,
    shapes_carried,
)
from lean_finetune.memory.predict.traced_step import TracedModel
from lean_finetune.memory.trace.memory_trace import Peak
from lean_finetune.memory.trace.setting import Setting
from lean_finetune.model.adapters import load_adapter
from lean_finetune.model.model_config import read_config
from lean_finetune.model.trained_rows import with_rows
from lean_finetune.step.batches import Batch, BatchShape
from lean_finetune.step.evaluation_limits import EvaluationLimits
from lean_finetune.step.loss import summed_loss, token_losses
from lean_finetune.step.run_optimizer import build_optimizer
from lean_finetune.step.step_loss import TokenLoss
from lean_finetune.train.heldout_loss import batch_bounds
from lean_finetune.train.monitor.measured_peak import make_meter
from tests.kit.estimate_cpu import SMALL, make_code_books, save_small
from tests.kit.loaded import load_base, load_model
from tests.memory.common import CPU_TARGET, gpu_target, setting_of, shape
from tests.small_model import CPU, VOCABULARY, moved_adapter, save_small_llama, spec_of
from tests.step.common import slow
from tests.token_files import heldout

TRAINING, EVALUATION, CHUNK = shape(2, 96, 150), shape(3, 80, 200), 64
ANSWERS = GenerationShape(rows=5, prompt_tokens=90, new_tokens=40)
NOTHING = Peak(bytes=0, by_category={})
"""The update's peak, which runs on one GPU do not need."""
AROUND = OtherPhases(
    stored_dtype=torch.bfloat16,
    in_training=(TRAINING,),
    evaluation=(EVALUATION,),
    logits_chunk=CHUNK,
    generation=(ANSWERS,),
    merged=False,
)
NUMBERS = spec_of(optimizer="adamw", lr=1.0, weight_decay=0.0, schedule="constant", warmup_fraction=0.0)


def batch_of(wanted: BatchShape) -> Batch:
    """A batch of this shape in PyTorch's memory, the first `supervised` positions trained."""
    ids_BT = torch.randint(VOCABULARY, (wanted.rows, wanted.length))
    index_N = torch.arange(wanted.supervised)
    return Batch(input_ids_BT=ids_BT, targets_BT=ids_BT.clone(), supervised_index_N=index_N, packed_rows=None)


def test_no_batch_of_heldout_images_has_more_patches_than_the_predicted_one():
    """A large held-out image, or many small ones beside a long text, for which training has no like."""
    generator = np.random.default_rng(0)
    for _ in range(20):
        patches = generator.integers(0, 200, 50).astype(np.int32)
        lengths = (patches // 4 + generator.integers(5, 300, 50)).astype(np.int32)
        sizes = np.stack([np.full(50, 14), 14 * patches], axis=1).astype(np.int32)
        images = ImageAttachment(sizes=sizes, bounds=np.arange(51), patches=patches, max_pixels=None, min_pixels=None)
        [found] = shapes_carried(lengths, [images], 600)
        predicted = sum(width // 14 for ((_, width),) in sizes_of(found.attached))
        assert max(patches[batch].sum() for batch in batch_rows(lengths, range(50), 600)) <= predicted
        assert found.rows * found.length <= max(600, lengths.max())
        order = np.argsort(lengths)
        sorted_patches = patches[order].tolist()
        bounds = [*batch_bounds(lengths[order].tolist(), 600, [(sorted_patches, 250)])]
        of_batches = [sum(sorted_patches[start:end]) for start, end in bounds]
        assert max(of_batches) <= 250 and sum(end - start for start, end in bounds) == 50
        [limited] = shapes_carried(lengths, [images], 600, {"max_patches": 250})
        assert max(of_batches) <= sum(width // 14 for ((_, width),) in sizes_of(limited.attached)) <= 250 + max(patches)


@pytest.mark.parametrize("method", ["full", slow("lora"), "qlora", slow("int8_lora")])
def test_losses_without_gradients_take_what_is_predicted(small_llama, method):
    """Activations counted as saved for a backward pass that never runs, or the optimizer forgotten."""
    setting = setting_of(method=method)
    predicted = other_phases(TracedModel(read_config(small_llama), setting, CPU_TARGET), AROUND, NOTHING)
    gc.collect()
    meter = make_meter(CPU)
    with meter.window("all"):
        model = load_model(small_llama, setting.train, CPU)
        with meter.phase("evaluate"):
            token_losses(model.eval(), batch_of(EVALUATION), CHUNK)
        optimizer = build_optimizer(model, NUMBERS)
        with meter.phase("heldout"), torch.no_grad():
            summed_loss(model, batch_of(TRAINING), TokenLoss(setting.train.loss_chunk))
    measured = meter.result().peak_bytes_by_phase
    assert optimizer.state
    assert predicted["evaluate"].bytes == pytest.approx(measured["evaluate"], rel=0.02)
    assert predicted["heldout"].bytes == pytest.approx(measured["heldout"], rel=0.02)


@pytest.mark.parametrize(
    ("method", "continued"),
    [("full", False), slow("lora", False), ("qlora", True), slow("qlora", False), slow("int8_lora", False)],
)
def test_the_reference_takes_what_is_predicted(small_llama, tmp_path, method, continued):
    """Adapters that this model does not have, an optimizer, activations, or all of the logits."""
    setting = setting_of(method=method, objective="dpo")
    around = replace(AROUND, reference=reference_shape(96), continued=continued)
    predicted = other_phases(TracedModel(read_config(small_llama), setting, CPU_TARGET), around, NOTHING)["reference"]
    rows = heldout(tmp_path, [([7] * 96, [0, 96], None)] * 2)
    start = moved_adapter(small_llama, tmp_path / "start", setting.train) if continued else None
    make_code_books()
    gc.collect()
    meter = make_meter(CPU)
    with meter.window("all"):
        loaded = load_base(small_llama, setting.train, CPU)
        model = (loaded if start is None else load_adapter(loaded, start, setting.train)).eval()
        with meter.phase("reference"):
            row_logps(model, setting.train, rows, [0, 1], 0, CPU)
    in_numpy = 3 * 8 * 2 * 96  # Tokens, targets and their positions, which the meter does not count.
    expected = predicted.bytes - in_numpy
    assert meter.result().peak_bytes_by_phase["reference"] == pytest.approx(expected, rel=0.001)


def test_only_objectives_with_a_reference_have_its_phase(small_llama):
    traced = TracedModel(read_config(small_llama), setting_of(method="qlora"), CPU_TARGET)
    assert "reference" not in other_phases(traced, replace(AROUND, generation=()), NOTHING)


KINDS_OF_ANSWERS = [
    ("full", 1, 90, 5),
    ("full", 4, 90, 1),
    ("lora", 40, 90, 5),
    ("qlora", 60, 8, 5),
    ("qlora", 8, 40, 1),
]
FAST_ANSWERS = [("Gemma 3", "full", 1, 90, 5), ("GPT-OSS", "full", 4, 90, 1), ("Gemma 3", "qlora", 60, 8, 5)]
ALL_ANSWERS = [(family, *answers) for family, answers in product(("Llama", "Gemma 3", "GPT-OSS"), KINDS_OF_ANSWERS)]


@pytest.mark.parametrize(
    ("family", "method", "new_tokens", "prompt_tokens", "rows"),
    [case if case in FAST_ANSWERS else slow(*case) for case in ALL_ANSWERS],
)
def test_answers_take_what_is_predicted(family, method, new_tokens, prompt_tokens, rows, tmp_path):
    """A KV cache left out, logits of every prompt token, windowed layers that cache every token, or a mask."""
    save_small(family, tmp_path)
    setting, limits = setting_of(method=method), limits_of(1024, new_tokens, rows)
    shape = GenerationShape(rows=rows, prompt_tokens=prompt_tokens, new_tokens=new_tokens)
    predicted = peak_of_answers(TracedModel(read_config(tmp_path), setting, CPU_TARGET), shape)
    prompts = [Prompt(family="all", ids=[7] * (prompt_tokens - row), answer_ids=[]) for row in range(rows)]
    gc.collect()
    meter = make_meter(CPU)
    with meter.window("all"):
        model = load_model(tmp_path, setting.train, CPU).eval()
        with meter.phase("generate"):
            greedy_answers(model, setting.train, prompts, stops=(), limits=limits, pad_id=0, device=CPU)
    assert predicted.bytes == pytest.approx(meter.result().peak_bytes_by_phase["generate"], rel=0.005)
    assert predicted.by_category["kv_cache"] > 0


def limits_of(max_tokens: int, new_tokens: int, rows: int) -> EvaluationLimits:
    return EvaluationLimits(
        max_tokens=max_tokens, logits_chunk=CHUNK, max_new_tokens=new_tokens, generate_batch_rows=rows
    )


def test_prompts_leave_room_for_their_answers():
    """A prompt longer than the model's positions, or answers where none are generated."""
    assert generation_shapes(limits_of(999, 8, 4), prompts=0, longest=90, positions=None) == ()
    assert generation_shapes(limits_of(999, 64, 4), prompts=4, longest=90, positions=64) == ()
    shapes = generation_shapes(limits_of(999, 8, 4), prompts=5, longest=90, positions=64)
    assert shapes == (GenerationShape(rows=4, prompt_tokens=56, new_tokens=8),)


@pytest.mark.parametrize("max_tokens", [60, 150, 200, 310, 500])
def test_no_batch_of_prompts_is_larger_than_one_that_is_traced(max_tokens):
    """Shorter prompts of which more fit, whose scores are larger: the longest alone are traced."""
    limits, longest = limits_of(max_tokens, 10, 4), 100
    shapes = generation_shapes(limits, prompts=9, longest=longest, positions=None)
    for prompt_tokens in range(1, longest + 1):
        rows = limits.prompts_at_once(prompt_tokens)
        masked = rows * prompt_tokens**2 if rows > 1 else 0
        assert masked <= max([s.rows * s.prompt_tokens**2 for s in shapes if s.rows > 1], default=0)
        assert rows * prompt_tokens <= max(s.rows * s.prompt_tokens for s in shapes)


FAST_LOADS: list[dict[str, Any]] = [
    {"method": "full", "precision": "fp32"},
    {"method": "qlora", "precision": "bf16"},
    {"method": "int8_lora", "precision": "bf16"},
    {"method": "lora", "precision": "fp32", "lora_dora": True},
]
SLOW_LOADS: list[dict[str, Any]] = [
    {"method": method, "precision": precision, **changes}
    for method in ("full", "lora", "qlora", "int8_lora")
    for precision in ("fp32", "bf16", "fp16")
    for changes in ({}, {"lora_dora": True})
    if not changes or method in ("lora", "qlora")
]


@pytest.mark.parametrize(
    "changes", [*FAST_LOADS, *(pytest.param(changes, marks=pytest.mark.slow) for changes in SLOW_LOADS)], ids=str
)
def test_loading_takes_what_is_predicted(small_llama, changes):
    """A model that trains but cannot be loaded; with DoRA, the norms of every adapted weight.

    Scales and code books are not predicted: 0.5 percent of a model of 90,000 values.
    """
    check_load(small_llama, setting_of(**changes))


def test_the_initialisation_of_dora_on_the_head_is_predicted(tmp_path):
    """No quantisable layer has an adapter."""
    AutoModelForCausalLM.from_config(LlamaConfig(**SMALL, tie_word_embeddings=False)).save_pretrained(tmp_path)
    check_load(tmp_path, setting_of(method="lora", lora_dora=True, lora_targets=("lm_head",)))


@pytest.mark.parametrize(("method", "init"), [("lora", "pissa"), ("qlora", "loftq")])
def test_the_initialisation_from_weights_is_predicted(small_llama, method, init):
    """PiSSA and LoftQ, without the singular vectors, whose bytes grow with the sum of a weight's sides."""
    check_load(small_llama, setting_of(method=method, precision="bf16", lora_init=init, lora_rank=1), rel=0.08)


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(
    ("tied", "changes"),
    [
        (False, {"lora_modules_to_save": ["embed_tokens", "lm_head"]}),
        (False, {"lora_trainable_tokens": [5, VOCABULARY]}),
        (True, {"lora_trainable_tokens": [5, VOCABULARY]}),
    ],
)
def test_copies_and_new_rows_of_the_embedding_are_predicted(tmp_path, tied, precision, changes):
    """The old embedding beside the new one, or a copy in two types."""
    directory = save_small_llama(tmp_path, tie_word_embeddings=tied, vocab_size=VOCABULARY)
    for method in ("lora", "qlora"):
        setting = setting_of(method=method, precision=precision, **changes)
        check_load(directory, setting)
        check_load(directory, replace(setting, train=setting.train.model_copy(update={"offload": "optimizer"})))


def check_load(model: Path, setting: Setting, rel: float = 0.005) -> None:
    """Load the model, and compare the prediction with what the allocator counted."""
    around = replace(AROUND, generation=())
    config = with_rows(read_config(model), setting.train)
    predicted = other_phases(TracedModel(config, setting, CPU_TARGET), around, NOTHING)["load"]
    make_code_books()
    gc.collect()
    meter = make_meter(CPU)
    with meter.window("load"), meter.phase("load"):
        loaded = load_model(model, setting.train, CPU)
        if setting.train.offload == "none":
            build_optimizer(loaded, NUMBERS)
    assert predicted.bytes == pytest.approx(meter.result().peak_bytes_by_phase["load"], rel=rel)


def test_a_gpu_has_one_full_size_weight_while_it_packs(small_llama):
    """4-bit loading planned as if all of the full-size weights were on the GPU at once, or none."""
    setting = setting_of(method="qlora", precision="bf16", optimizer="sgd", lora_targets=("v_proj",), lora_rank=1)
    found = other_phases(TracedModel(read_config(small_llama), setting, gpu_target("H100")), AROUND, NOTHING)
    # A layer's larger weights are loaded before attention's, while less memory is in use.
    assert found["load"].by_category["loading"] == 64 * 64 * 2
    assert found["save"].bytes < found["load"].bytes


def peaks_of(**sizes: int) -> dict[str, Peak]:
    return {
        phase: Peak(bytes=size, by_category={"weights": 100, "optimizer": 100, "activations": size - 200})
        for phase, size in sizes.items()
    }


def test_loading_that_needs_more_than_training_is_noted():
    """A run whose verdict is "fits" ends before its first step."""
    assert loading_note(1024, 1024) is None
    assert (
        reference_note(peaks_of(reference=900), 1000) is None and reference_note(peaks_of(heldout=9000), 1000) is None
    )
    note = reference_note(peaks_of(reference=2048), 1024)
    assert note is not None and note.startswith("stage reference is predicted to take 2 KiB, training 1 KiB; a lower")
    assert loading_note(2048, 1024) == "loading is predicted to take 2 KiB, training 1 KiB"


def test_evaluation_that_needs_more_than_training_is_noted_with_a_remedy():
    """Out of memory after training, in stage evaluate."""
    fits = peaks_of(heldout=500, evaluate=900, generate=1000)
    assert evaluation_note(fits, 1000, 4096, 100) is None
    above = evaluation_note({**fits, **peaks_of(generate=1800)}, 1000, 4096, 100)
    assert above is not None and above.startswith("generate is predicted to take 1.758 KiB, training 0.9766 KiB; ")
    assert above.endswith("with -S evaluate.max_tokens=2048 it takes no more")
    for beyond in (evaluation_note(peaks_of(heldout=1800), 1000, 4096, 100), evaluation_note(fits, 210, 4096, 100)):
        assert beyond is not None and "do not help: rows are up to 100 long" in beyond
