"""Margins: how much more than predicted a run may need, and what the verdict makes of it."""

from dataclasses import replace

import pytest
from transformers import LlamaConfig

from cuda_memory.units import GIB
from lean_finetune.config.load import COMMON_PARAMS, load_params, with_flags
from lean_finetune.memory.advice.full_rows import full_rows_run
from lean_finetune.memory.advice.margins import MARGINS, judge_bytes, margin_of
from lean_finetune.memory.advice.search import Remedy
from lean_finetune.memory.advice.verdict import Verdict, answer, judge, judge_run
from lean_finetune.memory.devices import cpu_device, resolve_gpu
from lean_finetune.memory.predict.peak import Prediction
from lean_finetune.memory.trace.memory_trace import Peak
from tests.conftest import ROOT
from tests.memory.common import card, llama, setting_of, shape

CARD = card(100 * GIB, "card")
LLAMA_2_70B = LlamaConfig(
    hidden_size=8192,
    intermediate_size=28672,
    num_hidden_layers=80,
    num_attention_heads=64,
    num_key_value_heads=8,
    vocab_size=32000,
    max_position_embeddings=4096,
    tie_word_embeddings=False,
    dtype="bfloat16",
)


def verdict_on(gib: float, remedies: tuple[Remedy, ...] = (), **setting: object) -> Verdict:
    peak = Peak(bytes=int(gib * GIB), by_category={"weights": int(gib * GIB)})
    run = Prediction(
        setting=setting_of(**setting),
        by_phase={"forward": peak},
        steps_of_peak=((shape(2, 128, 100),),),
        layers_traced="all",
    )
    return judge(run, CARD, remedies, headroom_percent=10.0, enforce=True)


@pytest.mark.parametrize(
    ("sharding", "percent"), [("zero3", MARGINS["sharded"].percent), ("ddp", MARGINS["replicated"].percent)]
)
def test_a_run_on_several_gpus_fits_only_with_its_margin(sharding, percent):
    """A prediction that no GPU has confirmed taken for exact: a 70B run was said to fit, and ran out of memory."""
    edge = 90 / (1 + percent / 100)
    assert verdict_on(edge - 0.1, sharding=sharding, gpus=2).fits
    found = verdict_on(edge + 0.1, sharding=sharding, gpus=2)
    assert found.state == "tight" and f"{percent:g} %, not yet measured on a GPU" in str(found.why_tight)
    assert verdict_on(89.9, sharding=sharding, gpus=2).state == "tight"
    assert verdict_on(99.9, sharding=sharding, gpus=2).state == "does not fit"


def test_train_starts_a_run_that_only_lacks_the_margin():
    """Most runs on several GPUs refused until a GPU has measured one."""
    tight = verdict_on(60, gpus=2, sharding="zero3")
    assert tight.state == "tight" and tight.as_json()["refusal"] is None
    assert tight.as_json()["note"] == (
        "training starts, though the GPU may have too little memory: the run is within the margin of sharded runs, "
        "60 %, not yet measured on a GPU"
    )
    assert "note" not in verdict_on(50, gpus=2, sharding="zero3").as_json()
    without_headroom = verdict_on(95, gpus=2, sharding="zero3")
    assert without_headroom.state == "tight" and without_headroom.as_json()["refusal"] is not None


def test_a_refusal_names_the_margin_what_the_run_may_need_and_how_to_train_nevertheless():
    remedy = Remedy(flags=("train.optimizer=adamw_8bit",), peak_bytes=20 * GIB, slowdown=1.0, effect="none")
    assert verdict_on(60, (remedy,), sharding="zero3", gpus=2).refusal == (
        "hardware.gpu: predicted peak 60 GiB is within the margin of sharded runs, 60 %, not yet measured on a GPU: it "
        "may need up to 96 GiB of the 90 GiB usable on card; would fit: -S train.optimizer=adamw_8bit (20 GiB, 1.00x "
        "time); train starts it nevertheless"
    )


def test_one_gpu_and_cpus_add_no_margin():
    """Verdicts whose predictions were measured made stricter."""
    assert margin_of(setting_of(), CARD) is None and verdict_on(89.9).fits
    assert margin_of(setting_of(sharding="zero3", gpus=2), cpu_device(2**34)) is None


def test_dimensions_without_any_published_run_have_the_largest_margin():
    for parallel in ({"tensor_parallel": 2}, {"context_parallel": 2}, {"pipeline_stages": 2}):
        assert margin_of(setting_of(gpus=2, sharding="zero3", **parallel), CARD) is MARGINS["divided"]
    assert MARGINS["divided"].percent == max(margin.percent for margin in MARGINS.values())


@pytest.mark.parametrize(
    ("tier", "gib", "state"),
    [
        ("tensors", 71, "fits"),
        ("tensors", 73, "tight"),
        ("reserved", 79, "fits"),
        ("reserved", 81, "tight"),
        ("process", 79.9, "fits"),
        ("process", 100.1, "does not fit"),
    ],
)
def test_each_tier_has_its_own_room(tier, gib, state):
    """A predicted size of the process compared with what tensors may take."""
    margin = replace(MARGINS["sharded"], percent=25)
    assert judge_bytes(int(gib * GIB), CARD, tier, margin, headroom_percent=10.0) == state


def test_the_70b_run_that_ran_out_of_memory_is_not_said_to_fit():
    """QLoRA of Llama-2-70B on 2 x A100-80GB, 4 x 4096 tokens: 83 GB, by fms-acceleration."""
    flags = ["hardware.num_gpus=2", "train.sharding=zero3", "train.method=qlora", "train.grad_ckpt=true"]
    flags += ["data.max_length=4096", "bucket.max_tokens=16384", "train.tokens_per_step=32768", "train.loss_chunk=null"]
    flags += [
        "train.lora.targets=[q_proj,k_proj,v_proj,o_proj]",
        "train.lora.rank=16",
    ]  # With dropout 0.1 it needs more.
    run = full_rows_run(with_flags(load_params(COMMON_PARAMS), flags), LLAMA_2_70B, resolve_gpu("A100-80GB")[0])
    assert judge_run(run, run.predict()).state == "tight"


@pytest.mark.slow
def test_offers_for_a_tight_run_fit_with_the_margin_of_their_own_kind():
    """Settings offered that the next answer calls tight, or none because all were held to the largest margin."""
    flags = ["hardware.num_gpus=2", "train.sharding=zero3", "train.method=full", "data.max_length=512"]
    flags += ["bucket.max_tokens=4096", "train.tokens_per_step=8192", "estimate.headroom_percent=0"]
    params = with_flags(load_params(COMMON_PARAMS), [*flags, "train.loss_chunk=null"])
    config = llama(hidden_size=256, vocab_size=8192, max_position_embeddings=512)
    whole = full_rows_run(params, config, CARD)
    prediction = whole.predict()
    device = card(int(1.3 * prediction.peak.bytes) + CARD.context.max_bytes)
    run = full_rows_run(params, config, device)
    found = answer(run, prediction)
    assert found.verdict.state == "tight" and found.remedies
    for remedy in found.remedies:
        margin = margin_of(full_rows_run(with_flags(params, remedy.flags), config, device).setting, device)
        assert margin is not None and margin.with_margin(remedy.peak_bytes) <= run.usable_bytes


def test_docs_have_the_table_of_margins():
    rows = [
        line
        for line in (ROOT / "docs/many-gpus.md").read_text().splitlines()
        if line in {m.row for m in MARGINS.values()}
    ]
    assert rows == [margin.row for margin in MARGINS.values()]
