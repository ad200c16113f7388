"""The predicted memory of rows with images against PyTorch's own count of every allocation."""

import gc
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from lean_finetune.images.attachment import ImageShape, sizes_of
from lean_finetune.images.image_inputs import ImageInputs, ImagePart
from lean_finetune.images.processor import ImageProcessor
from lean_finetune.memory.predict.peak import predict
from lean_finetune.memory.predict.traced_step import TracedModel, TracedSteps
from lean_finetune.memory.trace.known_images import KnownImages
from lean_finetune.model.model_config import read_config
from lean_finetune.step.batches import Batch, BatchShape
from lean_finetune.train.monitor.measured_peak import make_meter
from tests.kit.loaded import load_model
from tests.kit.specs import Trainer, padded, random_batch
from tests.memory.common import CPU_TARGET, setting_of
from tests.memory.predict.test_measured import TOLERATED_BYTES, TOLERATED_SHARE
from tests.small_vision import FAMILIES, adapted_parts, vision_model

CPU = torch.device("cpu")
# An image, two images, none; then a step without images, and one with a large one.
STEPS: TracedSteps = (
    (
        replace(padded(3, 160, 200), attached=(ImageShape(sizes=(((100, 200),), ((60, 60), (112, 56)), ())),)),
        replace(padded(2, 128, 100), attached=(ImageShape(sizes=(((120, 90),), ())),)),
    ),
    (padded(3, 96, 150),),
    (replace(padded(1, 200, 60), attached=(ImageShape(sizes=(((280, 280),),)),)),),
)
EXPERTS: list[tuple[str, dict[str, Any]]] = [
    ("qwen3_vl_moe", {"method": "lora", "lora_experts": "all", "vision": "lora"}),
    ("qwen3_vl_moe", {"method": "qlora", "lora_experts": "all", "grad_ckpt": True}),
    ("qwen3_vl_moe", {"method": "full", "router": "trained", "vision": "full"}),
]
CASES: list[tuple[str, dict[str, Any]]] = [
    (family, {"method": "lora", "grad_ckpt": True}) for family in ("qwen2_5_vl", "mistral3", "llava_next", "smolvlm")
]
TRAINED: list[dict[str, Any]] = [
    {"method": "full", "vision": "full", "projector": "full"},
    {"method": "full", "projector": "full", "grad_ckpt": True},
    *(
        {"method": method, "vision": "lora", "projector": "lora", "grad_ckpt": grad_ckpt}
        for method in ("lora", "qlora", "int8_lora")
        for grad_ckpt in (False, True)
        if not (method == "int8_lora" and grad_ckpt)  # Refused.
    ),
    {"method": "lora", "vision": "lora"},
    *({"method": method, "projector": "full", "grad_ckpt": True} for method in ("lora", "qlora", "int8_lora")),
    {"method": "lora", "vision": "lora", "projector": "full"},
    *(
        {"method": method, "vision": "full", "projector": projector, "grad_ckpt": projector != "full"}
        for method in ("lora", "qlora", "int8_lora")
        for projector in ("frozen", "lora", "full")
        if (method, projector) != ("int8_lora", "lora")
    ),
    {"method": "lora", "vision": "full", "lora_init": "pissa"},
]
SLOW = [
    (family, {"method": method, "grad_ckpt": grad_ckpt})
    for family in FAMILIES
    for method in ("full", "lora", "qlora", "int8_lora")
    for grad_ckpt in (False, True)
    if (family, {"method": method, "grad_ckpt": grad_ckpt}) not in CASES
] + [(family, adapted_parts(family, changes)) for family in FAMILIES for changes in TRAINED]
SLOW += EXPERTS
# The statistics of layer norms have the type of weights.
SLOW += [("smolvlm", {"method": "lora", "vision": "full", "precision": "bf16"})]


def batch_of(inputs: ImageInputs, shape: BatchShape) -> Batch:
    """A random batch with black images; its tensors are counted by the meter, as those of a trace are."""
    batch = random_batch(shape, 256)
    if not (sizes := sizes_of(shape.attached)):
        return batch
    ids_BT = batch.input_ids_BT
    made = inputs.of_shapes(ids_BT, sizes)
    return replace(batch, parts=(ImagePart(shown={name: value.clone() for name, value in made.items()}),))


def counted(directory: Path, changes: Mapping[str, Any], inputs: ImageInputs) -> dict[str, int]:
    """The peak of each phase of a real run."""
    gc.collect()
    setting = setting_of(**changes)
    meter = make_meter(CPU)
    with meter.window("run"):
        with meter.phase("load"):
            model = load_model(directory, setting.train, CPU, images=True)
            trainer = Trainer.of(model, setting, CPU, scratch=directory, lr=1e-3, weight_decay=0.01)
        for shapes in STEPS:
            trainer.step((batch_of(inputs, shape) for shape in shapes), 300, meter.phase, iter(()))
    return dict(meter.result().peak_bytes_by_phase)


@pytest.mark.parametrize(
    ("family", "changes"), [*CASES, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)], ids=str
)
def test_the_prediction_equals_what_the_allocator_counted(tmp_path, family, changes):
    directory = vision_model(tmp_path / family, family)
    config = read_config(directory, whole=True)
    inputs = ImageInputs(ImageProcessor(directory), config)
    inputs.of_shapes(torch.zeros(1, 200, dtype=torch.int64), [[(60, 60)]])  # Caches of the processor.
    predicted = predict(TracedModel(config, setting_of(**changes), CPU_TARGET, KnownImages(inputs)), STEPS)
    measured = counted(directory, changes, inputs)
    for phase, peak in predicted.by_phase.items():
        difference = abs(peak.bytes - measured[phase])
        assert difference <= max(TOLERATED_SHARE * measured[phase], TOLERATED_BYTES), (phase, peak, measured)
