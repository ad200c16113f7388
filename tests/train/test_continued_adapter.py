"""Training that goes on from an adapter: what it starts from, what it is compared with, and what is refused."""

import csv
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import AutoPeftModelForCausalLM, PeftModel
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Tokenizer
from transformers import AutoModelForCausalLM

from lean_finetune.core.atomic_files import read_json
from lean_finetune.core.errors import UserError
from lean_finetune.model.adapters import load_adapter, save_adapter
from lean_finetune.model.continued_adapter import refuse_other_adapter
from lean_finetune.model.model_config import read_config
from stages.bucket import main as bucket
from stages.estimate import main as estimate
from stages.evaluate import main as evaluate
from stages.pin import main as pin
from stages.reference import main as reference
from stages.tokenize import main as tokenize
from stages.train import main as train
from tests.kit.loaded import load_base, load_model
from tests.small_model import CPU, moved_adapter, save_small_llama, spec_of
from tests.train.interrupted import finish, in_parts, small_job
from tests.workspace import error, invoke, lay_out, write_rows, write_verdict

pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")  # In peft.

SMALL: dict[str, Any] = {
    "data__source": "rows.jsonl",
    "data__heldout_fraction": 0.3,
    "data__max_length": 128,
    "bucket__max_tokens": 256,
    "train__tokens_per_step": 256,
    "train__epochs": 1,
    "train__method": "lora",
    "train__precision": "fp32",
    "train__lr": 1e-2,
    "train__lora__rank": 4,
    "train__lora__alpha": 8,
    "evaluate__loss_rows": 4,
    "evaluate__generate_rows": 0,
    "run__cpu_threads": 1,
    "run__data_workers": 1,
    "run__tokenizer_engine": "tokenizers",
}
ROWS = [{"instruction": f"add {n} and {n}", "output": str(2 * n)} for n in range(24)]
PAIRS = [{"prompt": f"add {n} and {n}", "chosen": str(2 * n), "rejected": f"{n} or so"} for n in range(24)]
BEFORE = (tokenize, bucket)
START = "sft"
"""Name of the directory of the adapter that goes on."""


def run(place: Path, stages: Any, rows: list[dict[str, str]] = ROWS, **changes: Any) -> None:
    """Run the stages in a directory; those before `train` have a fixed verdict instead of an estimate."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        patch.delenv("DVC_STAGE", raising=False)
        write_rows(place / "rows.jsonl", rows)
        lay_out(place, **{**SMALL, **changes})
        write_verdict(place)
        for what in ("data", "model"):
            assert invoke(pin, what).exit_code == 0
        for stage in (*BEFORE, *stages):
            result = invoke(stage)
            assert result.exit_code == 0, result.output


@pytest.fixture(scope="module")
def sft(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An adapter of the tiny model as supervised fine-tuning writes it."""
    place = tmp_path_factory.mktemp("sft")
    run(place, (reference, train))
    return place / "data/tuned"


@pytest.fixture
def place(tmp_path: Path, sft: Path) -> Path:
    """A new project beside that adapter."""
    shutil.copytree(sft, tmp_path / START)
    return tmp_path


def first_step(place: Path) -> dict[str, float]:
    """The losses and rewards in the first row of curves.csv."""
    with (place / "data/train/curves.csv").open() as file:
        row = next(csv.DictReader(file))
    return {name: float(value) for name, value in row.items() if name == "loss" or name.startswith("reward")}


def test_dpo_after_sft_starts_at_ln_2_and_is_compared_with_the_start(place: Path, sft: Path, tiny_dir: Path):
    """A reference without the adapter, an adapter that is not loaded, or an evaluation against the bare base."""
    more = {"train__objective": "dpo", "train__lr": 1e-3}
    run(place, (reference, train, evaluate), PAIRS, model__adapter=START, **more)
    first = first_step(place)
    assert first["loss"] == pytest.approx(0.693147, abs=2e-5) and first["reward_margin"] == pytest.approx(0, abs=1e-4)
    lock = read_json(place / "locks/model.json")
    assert lock["adapter"]["kind"] == "directory" and set(lock["adapter"]["files"]) == {
        "adapter_config.json",
        "adapter_model.safetensors",
    }
    started, ended = (load_file(path / "adapter_model.safetensors") for path in (sft, place / "data/tuned"))
    assert started.keys() == ended.keys()
    assert all(0 < (ended[name] - started[name]).abs().max() < 0.1 for name in started)
    # The result loads alone: no file of the first adapter is needed.
    shutil.rmtree(place / START)
    base = AutoModelForCausalLM.from_pretrained(tiny_dir, dtype=torch.float32)
    PeftModel.from_pretrained(base, str(place / "data/tuned"))
    found = read_json(place / "metrics/evaluate.json")
    assert abs(found["base_reward_margin"]) < 1e-4 < found["tuned_reward_margin"]
    run(place, (reference, evaluate), PAIRS, **more)  # Without model.adapter: the base alone.
    alone = read_json(place / "metrics/evaluate.json")
    assert found["tuned_loss"] == alone["tuned_loss"] and found["base_loss"] != alone["base_loss"]


@pytest.mark.parametrize("start", [None, START])
def test_a_reward_model_is_compared_with_the_head_that_it_started_from(place: Path, start: str | None):
    """Figures "before" of another random head, or of the base without the adapter that went on."""
    more = {"train__objective": "reward", "train__loss_chunk": None, "train__lr": 1e-12, "seed": 29}
    run(place, (reference, train, evaluate), PAIRS, model__adapter=start, **more)
    found = read_json(place / "metrics/evaluate.json")
    for name in ("reward_chosen", "reward_rejected", "reward_margin"):
        assert found[f"base_{name}"] == pytest.approx(found[f"tuned_{name}"], abs=1e-6) != 0


def test_the_reference_belongs_to_the_adapter(place: Path):
    """Log-probabilities of another start, with which every reward would be wrong."""
    run(place, (reference,), PAIRS, train__objective="dpo")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        lay_out(place, **{**SMALL, "train__objective": "dpo", "model__adapter": START})
        assert invoke(pin, "model").exit_code == 0
        assert "was computed from other weights or tokens" in error(invoke(train))


@pytest.mark.slow
@pytest.mark.parametrize("method", ["lora", "qlora", "int8_lora"])
def test_a_continued_run_is_repeatable_and_resumes_from_its_own_checkpoint(small_llama: Path, tmp_path: Path, method):
    """A resumed run that starts from the first adapter again."""
    spec = spec_of(method=method)
    start = moved_adapter(small_llama, tmp_path / "start", spec)
    job = small_job(small_llama, tmp_path / "tokens", method=method, adapter=start)
    whole = finish(job)
    whole.check_equal(finish(job))
    whole.check_equal(in_parts(job, tmp_path / "checkpoints", [1, 3]))


FORMS: dict[str, dict[str, Any]] = {
    "lora": {},
    "rslora": {"lora_rslora": True},
    "dora": {"lora_dora": True},
    "two layers": {"lora_targets": ["q_proj", "down_proj"]},
    "nf4": {"method": "qlora"},
}


@pytest.mark.parametrize("form", FORMS)
def test_a_model_starts_as_the_adapter_ended(small_llama: Path, tmp_path: Path, form: str):
    """Tensors that are left as they were initialised."""
    spec = spec_of(**FORMS[form])
    start = moved_adapter(small_llama, tmp_path / "start", spec)
    config = read_config(small_llama)
    refuse_other_adapter(start, spec, config)
    model: Any = load_model(small_llama, spec, CPU, adapter=start)
    save_adapter(model, tmp_path, str(small_llama))
    before, after = (load_file(path / "adapter_model.safetensors") for path in (start, tmp_path))
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)


def config_with(directory: Path, **values: Any) -> None:
    path = directory / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def weights_with(directory: Path, change: Any) -> None:
    path = directory / "adapter_model.safetensors"
    save_file(change(load_file(path)), path)


def without_one(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    layer = next(iter(tensors)).partition(".lora_")[0]
    return {name: tensor for name, tensor in tensors.items() if not name.startswith(layer)}


@pytest.mark.parametrize(
    ("changes", "damage", "message"),
    [
        (
            {"lora_rank": 8},
            None,
            r"train\.lora\.rank: must be 4, as in model\.adapter=.*; got 8; set train\.lora\.r",
        ),
        (
            {"lora_rank": 8, "lora_alpha": 2, "lora_rslora": True},
            None,
            r"set train\.lora\.rank=4 train\.lora\.alpha=32 train\.lora\.rslora=false$",
        ),
        (
            {"lora_dora": True},
            None,
            r"train\.lora\.dora: must be false, as in .*; got true; set train\.lora\.dora=f",
        ),
        (
            {"lora_targets": ["q_proj"]},
            None,
            r"train\.lora\.targets: must be \[down_proj,.*\], as in .*; got \[q_proj\]; set train\.lora\.targets=\[",
        ),
        (
            {},
            lambda path: config_with(path, bias="all"),
            r"config\.json has bias=all, which is not trained here",
        ),
        ({}, lambda path: config_with(path, init_lora_weights="pissa_niter_4"), "which changed its base; merge it"),
        ({}, lambda path: config_with(path, alpha_pattern={"q_proj": 2}), "has another rank or scale for q_proj"),
        ({}, lambda path: config_with(path, peft_type="IA3"), r"model\.adapter: .* is not one of a LoRA adapter"),
        (
            {},
            lambda path: weights_with(path, without_one),
            r"has no tensors of model\.layers\.0\..*, which",
        ),
        (
            {},
            lambda path: (path / "adapter_model.safetensors").rename(path / "adapter_model.bin"),
            "a pickle",
        ),
    ],
)
def test_an_adapter_that_is_not_what_training_would_build_is_refused(
    small_llama: Path, tmp_path: Path, changes: dict[str, Any], damage: Any, message: str
):
    """A rank that is not the predicted one, or weights that stay as they were initialised."""
    start = moved_adapter(small_llama, tmp_path / "start", spec_of(lora_alpha=32))
    if damage is not None:
        damage(start)
    with pytest.raises(UserError, match=message):
        refuse_other_adapter(start, spec_of(**{"lora_alpha": 32, **changes}), read_config(small_llama))


def test_an_adapter_with_nan_is_named(small_llama: Path, tmp_path: Path):
    """Training would blame the model or the learning rate, and stage reference the precision."""
    spec, start = spec_of(), moved_adapter(small_llama, tmp_path / "start", spec_of())
    weights = load_file(start / "adapter_model.safetensors")
    weights[min(weights)][0, 0] = torch.nan
    save_file(weights, start / "adapter_model.safetensors")
    base = load_base(small_llama, spec, CPU)
    with pytest.raises(UserError, match="lora_A.* has values that are not finite"):
        load_adapter(base, start, spec)
    with pytest.raises(UserError, match="lora_A.* has values that are not finite"):
        load_model(small_llama, spec, CPU, seed=1, adapter=start)


def test_an_adapter_of_another_base_is_refused(small_llama: Path, tmp_path: Path):
    """By its shapes, or by layers that the model or the adapter lacks; the line names both models."""
    spec = spec_of()
    other: dict[str, dict[str, Any]] = {
        "wider": {"intermediate_size": 192},
        "deeper": {"num_hidden_layers": 3},
        "shallower": {"num_hidden_layers": 1},
    }
    for name, sizes in other.items():
        start = moved_adapter(save_small_llama(tmp_path / name, **sizes), tmp_path / f"{name} start", spec)
        config_with(start, base_model_name_or_path="org/other")
        both = rf"it is an adapter of org/other, and the model is {small_llama}: name the adapter's base in model\.name"
        with pytest.raises(UserError, match=rf"model\.adapter: .*(shape|adapts).*{both}$"):
            refuse_other_adapter(start, spec, read_config(small_llama))


def pinned(place: Path, **values: Any) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        lay_out(place, **{**SMALL, **values})
        return invoke(pin, "model")


def test_what_cannot_be_pinned_is_refused_in_a_line_and_nothing_is_written(place: Path, tiny_dir: Path):
    """A lock that names another model's adapter."""
    shutil.copytree(tiny_dir, place / "other")
    (place / "other/generation_config.json").write_text("{}")
    config_with(place / START, base_model_name_or_path=str(place / "other"))
    assert "whose generation_config.json differs; got model.name=tiny" in error(pinned(place, model__adapter=START))
    assert not (place / "locks/model.json").exists()
    for values, message in (
        ({"model__adapter": "./gone"}, "model.adapter: must be an existing directory, or a hub id"),
        ({"model__adapter": START, "model__adapter_revision": "main"}, "model.adapter_revision: only an adapter on"),
        ({"model__adapter_revision": "main"}, "model.adapter_revision: has an effect only with model.adapter"),
        ({"model__adapter": START, "train__method": "full"}, "model.adapter: needs adapters, and train.method=full"),
        ({"model__adapter": START, "train__lora__init": "pissa"}, "train.lora.init: an adapter that goes on has its"),
    ):
        assert message in error(pinned(place, **values))
    (place / "data").mkdir()
    (place / START).rename(place / "data/tuned")
    assert "is where training writes" in error(pinned(place, model__adapter="data/tuned"))


def test_a_change_of_the_adapter_is_another_lock(place: Path):
    """Stages that would keep what they computed from the adapter before."""
    locks = []
    for change in (lambda path: None, lambda path: weights_with(path, lambda all: {k: v + 1 for k, v in all.items()})):
        change(place / START)
        assert pinned(place, model__adapter=START).exit_code == 0
        locks.append((place / "locks/model.json").read_bytes())
        assert (place / "locks/watched-adapter").resolve() == place / START
    assert locks[0] != locks[1]
    assert pinned(place).exit_code == 0 and "adapter" not in read_json(place / "locks/model.json")


@pytest.fixture(scope="module")
def with_tool(tmp_path_factory: pytest.TempPathFactory, tiny_dir: Path) -> Path:
    """The tiny model with a tokenizer that has two tokens more than the model has embeddings."""
    base = shutil.copytree(tiny_dir, tmp_path_factory.mktemp("base") / "base")
    tokenizer = Tokenizer.from_file(str(base / "tokenizer.json"))
    assert tokenizer.add_tokens([AddedToken("<tool>", special=False), AddedToken("<done>", special=False)]) == 2
    tokenizer.save(str(base / "tokenizer.json"))
    return base


NEW = ["<done>", "<tool>"]
TOOL_ROWS = [{"instruction": f"add {n} and {n}", "output": f"<tool>{n}+{n}<done>{2 * n}"} for n in range(24)]


def test_new_tokens_of_a_tokenizer_get_rows_that_are_trained(with_tool: Path, tmp_path: Path):
    """From rows to an adapter that plain PEFT loads alone, and from that adapter to the next one."""
    more = {"model__name": str(with_tool), "train__lora__trainable_tokens": NEW}
    run(tmp_path, (reference, train, evaluate), TOOL_ROWS, **more)
    assert read_json(tmp_path / "locks/model.json")["trained_tokens"] == [1280, 1281]
    found = read_json(tmp_path / "metrics/evaluate.json")
    assert found["tuned_loss"] < found["base_loss"]
    tuned = tmp_path / "data/tuned"
    saved = load_file(tuned / "adapter_model.safetensors")
    [name] = [name for name in saved if "token_adapter" in name]  # The head has the same weight.
    assert saved[name].shape == (2, 128) and not torch.equal(saved[name][0], saved[name][1])
    assert read_json(tuned / "adapter_config.json")["trainable_token_indices"] == {"embed_tokens": [1280, 1281]}
    # PEFT's class reads the tokenizer beside the adapter, and adds rows to the base for its tokens.
    ids = torch.tensor([[5, 1280, 17, 1281]])
    with torch.no_grad():
        alone = AutoPeftModelForCausalLM.from_pretrained(str(tuned), dtype=torch.float32)(ids).logits
        spec = spec_of(lora_trainable_tokens=[1280, 1281])
        ours = load_adapter(load_base(with_tool, spec, CPU), tuned, spec)(input_ids=ids).logits
    assert alone.shape == (1, 4, 1282)
    torch.testing.assert_close(alone, ours, rtol=0, atol=1e-4)

    shutil.copytree(tuned, tmp_path / START)
    pairs = [{"prompt": one["instruction"], "chosen": one["output"], "rejected": "no <done>"} for one in TOOL_ROWS]
    run(tmp_path, (reference, train), pairs, model__adapter=START, train__objective="dpo", **more)
    assert first_step(tmp_path)["loss"] == pytest.approx(0.693147, abs=2e-5)
    again = load_file(tuned / "adapter_model.safetensors")[name]
    assert 0 < (again - saved[name]).abs().max() < 0.2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {},
            "makes ids up to 1281 but config.json has vocab_size 1280; name new tokens in train.lora.trainable_tokens",
        ),
        ({"train__lora__trainable_tokens": ["<tool>"]}, "makes ids up to 1281 but config.json has vocab_size 1280"),
        ({"train__lora__trainable_tokens": ["<tol>"]}, "or their ids; got '<tol>'; add it to the tokenizer"),
        ({"train__lora__trainable_tokens": [1290]}, "or their ids; got 1290; add it to the tokenizer"),
        (
            {"train__lora__trainable_tokens": NEW, "train__lora__modules_to_save": ["embed_tokens"]},
            "train.lora.trainable_tokens: rows of the embedding are trained alone, or all of them; got",
        ),
        (
            {"train__lora__trainable_tokens": NEW, "hardware__num_gpus": 2, "train__tensor_parallel": 2},
            "train.tensor_parallel: divides the embedding and the head, which train.lora.trainable_tokens trains; got",
        ),
        ({"train__lora__trainable_tokens": NEW, "train__method": "full"}, "train.lora.trainable_tokens: has an effect"),
    ],
    ids=str,
)
def test_tokens_that_cannot_be_trained_are_refused(with_tool: Path, tmp_path: Path, changes, message: str):
    """New tokens without a row, or a row that no token has."""
    assert message in error(pinned(tmp_path, model__name=str(with_tool), **changes))
    assert not (tmp_path / "locks/model.json").exists()


@pytest.mark.slow
def test_the_peak_is_that_of_a_new_adapter_and_estimate_refuses_another_rank(place: Path):
    peaks = []
    for adapter in (None, START):
        run(place, (estimate,), model__adapter=adapter)
        peaks.append(read_json(place / "metrics/estimate.json"))
    assert peaks[0] == peaks[1]
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        lay_out(place, **{**SMALL, "model__adapter": START, "train__lora__rank": 8})
        assert "train.lora.rank: must be 4, as in model.adapter=sft; got 8; set" in error(invoke(estimate))


@pytest.mark.slow
@pytest.mark.parametrize("method", ["lora", "qlora"])
def test_estimate_and_train_agree_on_new_tokens(with_tool: Path, tmp_path: Path, method: str):
    """A verdict for the model without its new rows."""
    more = {"model__name": str(with_tool), "train__lora__trainable_tokens": NEW, "train__method": method}
    run(tmp_path, (estimate, reference, train, evaluate), TOOL_ROWS, **more, evaluate__generate_rows=2)
    predicted = read_json(tmp_path / "metrics/estimate.json")["peak_gib_predicted"]
    assert read_json(tmp_path / "metrics/train.json")["peak_gib_measured"] == pytest.approx(predicted, rel=1e-3)
