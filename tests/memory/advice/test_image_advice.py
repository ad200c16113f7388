"""Advice for rows with images: fewer patches, frozen parts, and smaller images, which change the data."""

import json
from pathlib import Path

import pytest

from lean_finetune.config.load import COMMON_PARAMS, load_params, with_flags
from lean_finetune.images.image_family import Size
from lean_finetune.memory.advice.full_rows import fit_run
from lean_finetune.memory.advice.run import Run
from lean_finetune.memory.advice.search import advise
from lean_finetune.memory.advice.search_space import MICRO_BATCH, Candidate, Space, budgets_of
from lean_finetune.memory.advice.step_cost import Costs
from lean_finetune.memory.advice.what_fits import single_changes
from lean_finetune.memory.predict.assumed_images import AssumedImages
from lean_finetune.memory.predict.peak import Prediction
from lean_finetune.memory.switches.switch import EFFECTS, OTHER_WEIGHTS, SMALLER_PARTS, Support
from tests.memory.common import card_for, setting_of
from tests.small_vision import vision_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """config.json alone."""
    root = tmp_path_factory.mktemp("model")
    content = json.loads((vision_model(root / "whole") / "config.json").read_text())
    (root / "config.json").write_text(json.dumps(content))
    return root


def run_of(model: Path, *flags: str, gpu: str = "24GiB", shorten: bool = False) -> Run:
    named = [f"model.name={model}", f"hardware.gpu={gpu}", "data.max_length=512", "estimate.headroom_percent=0"]
    fixed = ["bucket.max_tokens=2048", "run.progress=false"]
    p = with_flags(load_params(COMMON_PARAMS), [*named, *fixed, *flags])
    return fit_run(p, shorten=shorten, assumed=AssumedImages(size=Size(280, 560), count=2))


def test_patches_are_halved_before_tokens_and_images_shrink_last(model: Path):
    """A row of text in smaller micro-batches than needed, or changed data offered as the same result."""
    run = run_of(model)
    options = list(budgets_of(run))
    assert [option.level for option in options] == list(range(1, len(options) + 1))
    names = [option.flags[0] for option in options]
    patches = 4 * 2 * 800
    assert names[:4] == [
        *(f"bucket.max_patches={patches // 2}", "bucket.max_tokens=1024"),
        *(f"bucket.max_patches={patches // 4}", "bucket.max_tokens=512"),
    ]
    assert names[4:6] == ["data.image_max_pixels=78400", "data.image_max_pixels=39200"]
    assert all(option.effect == SMALLER_PARTS for option in options[4:])
    assert EFFECTS[SMALLER_PARTS].startswith("changes the data")
    fewer, smaller = options[0].run, options[4].run
    assert fewer.steps[0][-1].rows == 2 and fewer.micro_batches_per_step == 2 * run.micro_batches_per_step
    assert 0 < smaller.full_row.size < 420
    # A row whose text is given gets shorter, and its step takes less time.
    shorter = next(option for option in budgets_of(run_of(model, shorten=True)) if option.effect == SMALLER_PARTS)
    assert shorter.work < 1


def test_trained_parts_are_offered_frozen(model: Path):
    run = run_of(model, "train.vision=lora", "train.projector=lora")
    found = [candidate.flags for candidate in Space(run, Costs(run)).of_effect(OTHER_WEIGHTS)]
    assert ("train.vision=frozen",) in found and ("train.vision=frozen", "train.projector=frozen") in found
    run = run_of(model, "train.method=lora", "train.vision=full")
    found = [candidate.flags for candidate in Space(run, Costs(run)).of_effect(OTHER_WEIGHTS)]
    assert ("train.vision=lora",) in found and ("train.vision=frozen",) in found
    swept = [
        flags
        for flags, _ in single_changes(setting_of(method="lora", vision="lora"), Support(cuda=True, native_bf16=True))
    ]
    assert ("train.vision=frozen",) in swept


def test_switches_that_rows_with_images_exclude_are_not_tried(model: Path):
    """Traces spent on what training refuses."""
    run = run_of(model)
    candidates = [one for effect in range(len(EFFECTS)) for one in Space(run, Costs(run)).of_effect(effect)]
    assert candidates and not any("train.sequence_tiles=8" in one.flags for one in candidates)
    assert not any("train.offload=parameters" in one.flags for one in candidates)
    assert MICRO_BATCH == "micro_batch"


@pytest.mark.slow
def test_advice_for_images_fits(model: Path):
    """Overrides that do not fit in the run that they lead to."""
    flags = ["train.loss_chunk=512", "train.vision=lora", "train.method=lora"]
    peak_bytes = run_of(model, *flags, gpu="800GiB").predict().peak.bytes
    gpu = card_for(int(0.6 * peak_bytes))
    run = run_of(model, *flags, gpu=gpu)

    def by_tensors(candidate: Candidate, traced_bytes: int) -> Prediction | None:
        prediction = candidate.run.predict()
        return prediction if prediction.peak.bytes <= run.fitting_bytes else None

    found = advise(run, Costs(run), peak=run.predict().peak, usable_bytes=run.fitting_bytes, confirm=by_tensors)
    assert any("bucket.max_patches" in flag for remedy in found for flag in remedy.flags)
    for remedy in found:
        changed = run_of(model, *flags, *remedy.flags, gpu=gpu)
        assert changed.predict().peak.bytes <= changed.fitting_bytes, remedy.flags
