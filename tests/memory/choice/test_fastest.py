"""`memory/choice`: the fastest set that fits by the verdict, the least harmful to learning first."""

import dataclasses
from functools import cache
from pathlib import Path

import pytest

from cuda_memory.gpus import GPUS
from cuda_memory.units import MIB
from lean_finetune.config.load import COMMON_PARAMS, load_params, with_flags
from lean_finetune.images.image_family import Size
from lean_finetune.memory.advice import search
from lean_finetune.memory.choice import choose as choose_module
from lean_finetune.memory.choice.choose import Chosen, choose, faster_with_bf16_updates, lighter_that_fits
from lean_finetune.memory.choice.fastest import MOST_CHOICES
from lean_finetune.memory.predict.assumed_images import AssumedImages
from lean_finetune.model.model_config import read_config
from lean_finetune.pinning.locate import find_model
from tests.kit.specs import llama

GPU = next(gpu for gpu in GPUS if gpu.name == "RTX-4090")
PARAMS = with_flags(
    load_params(COMMON_PARAMS),
    [
        "model.name=tiny",
        "data.max_length=512",
        "bucket.max_tokens=512",
        "train.tokens_per_step=4096",
        "run.progress=false",
    ],
)


@cache
def chosen_on(mib: int, *methods: str, fixed: tuple[str, ...] = ()) -> Chosen:
    """The answer for the tiny model on a GPU with this much memory for tensors; as much is left free for blocks."""
    device = dataclasses.replace(GPU, memory_bytes=GPU.context.max_bytes + 2 * mib * MIB)
    headroom_percent = 100 * (1 - mib * MIB / device.memory_bytes)
    p = with_flags(PARAMS, [f"estimate.headroom_percent={headroom_percent}", *fixed])
    keys = {text.partition("=")[0] for text in fixed}
    return choose(p, read_config(find_model("tiny")), device, methods, keys, None)  # type: ignore[arg-type]


def settings(chosen: Chosen) -> dict[str, str]:
    return chosen.settings(chosen.choices[0])


def test_a_roomy_gpu_gets_no_switch_and_whole_steps():
    """Checkpointing or small micro-batches where memory is plenty: a third of the time for nothing."""
    found = settings(chosen_on(4096, "qlora"))
    assert (found["train.grad_ckpt"], found["bucket.max_tokens"]) == ("false", "4096")


@pytest.mark.parametrize("mib", [80, pytest.param(70, marks=pytest.mark.slow)])
def test_no_traced_set_that_fits_is_faster(mib: int):
    """A search that stops at the first set that fits, or that trusts a bound which is none."""
    chosen = chosen_on(mib, "lora")
    best, sets = chosen.choices[0], chosen.sets
    assert best.prediction.peak.bytes <= best.run.fitting_bytes
    same = [one for one in sets.candidates(0) if one.slowdown < 0.995 * best.slowdown]
    assert same, "the case must have faster sets that do not fit"
    for one in same:
        assert one.run.predict().peak.bytes > sets.most_bytes(one), f"{one.flags} fits and is faster"


def test_each_method_is_searched_for_as_many_sets(monkeypatch: pytest.MonkeyPatch):
    """After a method that does not fit, the bytes that it would need were the number of sets to find."""
    asked = []
    monkeypatch.setattr(choose_module.FastestSets, "find", lambda self, effect, most: asked.append(most))
    monkeypatch.setattr(choose_module, "least_needed", lambda sets: (2**40, 2**30))
    assert not chosen_on(71, "full", "lora").choices
    assert asked == [MOST_CHOICES] * 3  # Both on the device, and the lighter one with offload.


def test_only_as_many_layers_are_recomputed_as_the_gpu_needs(monkeypatch: pytest.MonkeyPatch):
    """All layers recomputed where the GPU has room for the activations of some: time for memory that stays unused."""
    mib, layers = 112, 8  # Recomputing none of the layers takes 161 MiB, and all of them 71 MiB.
    device = dataclasses.replace(GPU, memory_bytes=GPU.context.max_bytes + 2 * mib * MIB)
    headroom = f"estimate.headroom_percent={100 * (1 - mib * MIB / device.memory_bytes)}"
    p = with_flags(PARAMS, [headroom, "data.max_length=2048", "bucket.max_tokens=2048", "train.loss_chunk=128"])
    config = llama(256, 704, layers=layers, heads=4, kv_heads=4, vocabulary=4096)
    sized = {"bucket.max_tokens", "train.loss_chunk", "bucket.mode"}
    best = choose(p, config, device, ("lora",), sized, None, most=1).choices[0]
    train, most_bytes = best.run.setting.train, best.run.fitting_bytes
    assert train.grad_ckpt_policy == "first_n" and train.grad_ckpt_layers is not None
    assert 2 < train.grad_ckpt_layers < layers
    assert best.prediction.peak.bytes <= most_bytes
    two_fewer = best.run.setting.with_train(grad_ckpt_layers=train.grad_ckpt_layers - 2)
    assert dataclasses.replace(best.run, setting=two_fewer).predict().peak.bytes > most_bytes
    monkeypatch.setattr(search, "fewer_recomputed", lambda search, one: ())
    plain = choose(p, config, device, ("lora",), sized, None, most=1).choices[0]
    assert plain.run.setting.train.grad_ckpt_policy != "first_n" and best.slowdown < plain.slowdown
    fixed = choose(p, config, device, ("lora",), {*sized, "train.grad_ckpt_policy"}, None, most=1).choices[0]
    assert fixed.run.setting.train.grad_ckpt_policy == "full"


def test_what_the_user_set_stays():
    """--set train.grad_ckpt=true that the search overrides."""
    found = chosen_on(4096, "qlora", fixed=("train.grad_ckpt=true", "train.loss_chunk=256", "bucket.max_tokens=1024"))
    assert found.start.run.setting.train.grad_ckpt and found.choices[0].run.setting.train.loss_chunk == 256


def test_updates_of_bf16_weights_stand_beside_updates_on_the_host():
    """An 8B on 80 GB was only offered fp32 master weights on the host, a tenth as fast as users' usual set."""
    mib, fixed = 900, ("train.optimizer=adamw",)
    device = dataclasses.replace(GPU, memory_bytes=GPU.context.max_bytes + 2 * mib * MIB)
    p = with_flags(PARAMS, [f"estimate.headroom_percent={100 * (1 - mib * MIB / device.memory_bytes)}"])
    config = llama(1024, 2816, layers=2, heads=8, kv_heads=8, vocabulary=32000)
    chosen = choose(p, config, device, ("full",), (), None, most=1)
    best = chosen.choices[0].run.setting.train
    assert best.master_weights and best.offload == "optimizer"
    faster = faster_with_bf16_updates(chosen, (), None)
    assert faster is not None
    train = faster.choices[0].run.setting.train
    assert (train.master_weights, train.optimizer, train.offload) == (False, "adamw_8bit", "none")
    slow, _ = chosen.start.tokens_per_second(chosen.choices[0].slowdown) or (0.0, 0.0)
    fast, _ = faster.start.tokens_per_second(faster.choices[0].slowdown) or (0.0, 0.0)
    assert fast > 2 * slow
    assert faster_with_bf16_updates(chosen, {text.partition("=")[0] for text in fixed}, None) is None
    roomy = chosen_on(4096, "full")
    assert faster_with_bf16_updates(roomy, (), None) is None, "fp32 master weights fit on the GPU"


def test_other_sets_are_predicted_with_the_images_of_the_rows(monkeypatch: pytest.MonkeyPatch):
    """A method with less memory, or updates of bf16 weights, that were said to fit without the rows' images."""
    size = Size(height=84, width=112)
    images = AssumedImages(size=size, count=2, directory=Path(), beside_text=False)
    given: list[object] = []
    chosen = dataclasses.replace(chosen_on(4096, "full"), assumed=images)
    nothing = dataclasses.replace(chosen, choices=())
    on_host = chosen.start.run.setting.with_train(master_weights=True, offload="optimizer")
    best = dataclasses.replace(chosen.choices[0], run=dataclasses.replace(chosen.choices[0].run, setting=on_host))

    def noted(*args: object, **options: object) -> Chosen:
        given.append(options["assumed"])
        return nothing

    monkeypatch.setattr(choose_module, "choose", noted)
    assert lighter_that_fits(nothing, (), None) is None
    assert faster_with_bf16_updates(dataclasses.replace(chosen, choices=(best,)), (), None) is None
    assert len(given) > 1 and set(given) == {images}
