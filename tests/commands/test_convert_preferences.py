"""Configurations of preference tuning of other tools: the same objective here, and what its keys become."""

import json
from pathlib import Path
from typing import Any

import pytest

from lean_finetune.commands.convert.conversions import Converted
from lean_finetune.commands.convert.read_config import read_config_of_tool
from lean_finetune.config.load import COMMON_PARAMS, load_params, with_flags
from lean_finetune.core.errors import UserError
from tests.commands.tool_configs import AXOLOTL, LLAMA_FACTORY, LLAMA_FACTORY_V1, SWIFT_SHELL, TORCHTUNE, TRL

LF_DPO = LLAMA_FACTORY.replace("stage: sft", "stage: dpo")
TORCHTUNE_DPO = TORCHTUNE + "loss._component_: torchtune.rlhf.loss.DPOLoss\nloss.beta: 0.05\n"
SWIFT_RLHF = SWIFT_SHELL.replace("swift sft", "swift rlhf --beta 0.3")
CASES: dict[str, tuple[str, str, dict[str, float]]] = {
    "LLaMA-Factory, DPO": (LF_DPO + "pref_beta: 0.2\npref_ftx: 0.1\n", "dpo", {"beta": 0.2, "sft_weight": 0.1}),
    "LLaMA-Factory, SimPO": (LF_DPO + "pref_loss: simpo\n", "simpo", {"beta": 0.1, "gamma": 0.5}),
    "LLaMA-Factory, ORPO": (LF_DPO + "pref_loss: orpo\npref_beta: 0.3\n", "orpo", {"beta": 0.3}),
    "LLaMA-Factory v1": (LLAMA_FACTORY_V1 + "pref_loss: orpo\n", "orpo", {}),
    "LLaMA-Factory, KTO": (
        LLAMA_FACTORY.replace("stage: sft", "stage: kto") + "kto_rejected_weight: 0.5\n",
        "kto",
        {"undesirable_weight": 0.5},
    ),
    "LLaMA-Factory, reward model": (LLAMA_FACTORY.replace("stage: sft", "stage: rm"), "reward", {}),
    "Axolotl, reward model": (AXOLOTL + "reward_model: true\nnum_labels: 1\n", "reward", {}),
    "ms-swift, reward model": (SWIFT_RLHF.replace("rlhf ", "rlhf --rlhf_type rm "), "reward", {}),
    "Axolotl, IPO": (AXOLOTL + "rl: ipo\nrl_beta: 0.4\n", "ipo", {"beta": 0.4}),
    "Axolotl, ORPO": (AXOLOTL + "rl: orpo\norpo_alpha: 0.3\n", "orpo", {"beta": 0.3}),
    "Axolotl, SimPO": (AXOLOTL + "rl: simpo\n", "simpo", {"beta": 0.1, "gamma": 0.5, "sft_weight": 1.0}),
    "TRL, DPO": (TRL + "beta: 0.01\n", "dpo", {"beta": 0.01}),
    "TRL, CPO": (TRL + "beta: 0.01\ncpo_alpha: 0.5\n", "cpo", {"beta": 0.01, "sft_weight": 0.5}),
    "TRL, SimPO": (TRL + "loss_type: simpo\ncpo_alpha: 0.0\n", "simpo", {"beta": 0.1, "gamma": 0.5, "sft_weight": 0.0}),
    "TRL, IPO": (TRL + "loss_type: [ipo]\nbeta: 0.5\n", "ipo", {"beta": 0.5}),
    "ms-swift, DPO": (SWIFT_RLHF, "dpo", {"beta": 0.3}),
    "ms-swift, CPO": (SWIFT_RLHF.replace("rlhf ", "rlhf --rlhf_type cpo "), "cpo", {"beta": 0.3}),
    "torchtune, DPO": (TORCHTUNE_DPO, "dpo", {"beta": 0.05}),
}


def read(tmp_path: Path, text: str, name: str = "run") -> Converted:
    """What becomes of a configuration."""
    path = tmp_path / (f"{name}.sh" if "swift rlhf" in text else f"{name}.yaml")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return read_config_of_tool(path, gpus=1, with_data=False)


@pytest.mark.parametrize("case", CASES)
def test_the_objective_and_its_parameters_are_the_tools(case: str, tmp_path: Path):
    """DPO answered as supervised fine-tuning, or trained with another beta or margin than there."""
    text, objective, expected = CASES[case]
    converted = read(tmp_path, text)
    found = {key: value for key, value in converted.values.items() if key.startswith("train.preference.")}
    assert converted.values["train.objective"] == objective
    assert found == {f"train.preference.{key}": value for key, value in expected.items()}
    params = with_flags(load_params(COMMON_PARAMS), ["model.name=org/model", *converted.flags()])
    assert params.train.objective == objective and params.train.lora.dropout == 0.0


def test_a_pair_counts_as_two_rows(tmp_path: Path):
    """Half of the memory: these tools count a pair as one row, and run both answers."""
    rows, pairs = read(tmp_path, LLAMA_FACTORY), read(tmp_path, LF_DPO)
    labelled = read(tmp_path, LLAMA_FACTORY.replace("stage: sft", "stage: kto"))
    for key in ("bucket.max_tokens", "train.tokens_per_step"):
        assert pairs.values[key] == 2 * rows.values[key] and labelled.values[key] == rows.values[key]
    assert any("2 pairs of 2 x 1000 tokens" in line for line in pairs.differs)


def test_where_only_the_command_names_the_trainer_the_answer_says_what_is_assumed(tmp_path: Path):
    """An ORPO recipe answered as DPO without a word."""
    by_path = read(tmp_path, TRL + "beta: 0.05\n", "recipes/orpo/config_full")
    assert by_path.values["train.objective"] == "orpo"
    assert any("by its path, train.objective=orpo" in line for line in by_path.differs)
    assert any("by its keys, train.objective=dpo" in line for line in read(tmp_path, TRL + "beta: 0.05\n").differs)


def test_supervised_fine_tuning_reads_no_key_of_preferences(tmp_path: Path):
    """A run refused for a key that the tool does not read either."""
    converted = read(tmp_path, LLAMA_FACTORY + "pref_beta: 0.1\npref_loss: simpo\n")
    assert "train.objective" not in converted.values and "train.preference.beta" not in converted.values
    assert converted.ignored["not read by objective sft"] == ["pref_beta", "pref_loss"]


def test_an_adapter_that_goes_on_and_modules_to_save_are_read(tmp_path: Path):
    """A run of supervised fine-tuning trained again from the base, without a word."""
    (tmp_path / "sft").mkdir()
    text = f"adapter_name_or_path: {tmp_path}/sft/\nadditional_target: embed_tokens, lm_head\n"
    found = read(tmp_path, LF_DPO + text)
    assert found.values["model.adapter"] == f"{tmp_path}/sft"
    assert found.values["train.lora.modules_to_save"] == ["embed_tokens", "lm_head"]
    assert any("the reference is the adapter's start here" in line for line in found.differs)
    scored = read(
        tmp_path, LLAMA_FACTORY.replace("stage: sft", "stage: rm") + "additional_target: embed_tokens,score\n"
    )
    assert scored.values["train.lora.modules_to_save"] == ["embed_tokens"]  # The head is trained anyway.
    absent = read(tmp_path, AXOLOTL + "lora_model_dir: gone\nlora_modules_to_save: [lm_head]\n")
    assert "model.adapter" not in absent.values and absent.values["train.lora.modules_to_save"] == ["lm_head"]
    assert "adapter gone is no directory here: set model.adapter to it" in absent.differs


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (LF_DPO + "adapter_name_or_path: a,b\n", "adapter_name_or_path: must be one adapter; got 'a,b'; correct it"),
        (LF_DPO + "pref_loss: hinge\n", "pref_loss: this loss of pairs is not done here; got hinge"),
        (LF_DPO + "ref_model: org/other\n", "ref_model: the reference is the model before training here"),
        (LLAMA_FACTORY.replace("sft", "ppo"), "stage: this stage is not done here; got ppo"),
        (AXOLOTL + "rl: grpo\n", "rl: this kind of training is not done here; got grpo"),
        (AXOLOTL + "num_labels: 1\n", "num_labels: classification is not done here"),
        (TRL + "beta: 0.1\nloss_type: [sigmoid, sft]\n", "loss_type: another loss is not done here"),
        (TRL + "cpo_alpha: 1.0\nloss_type: ipo\n", "loss ipo of objective cpo is not done here"),
    ],
)
def test_other_kinds_of_training_are_refused_in_one_line(text: str, expected: str, tmp_path: Path):
    """Another loss than the one that the tool would use."""
    with pytest.raises(UserError) as caught:
        read(tmp_path, text)
    assert expected in str(caught.value) and "\n" not in str(caught.value)


def test_labelled_rows_of_dataset_info_are_read(tmp_path: Path):
    """A KTO configuration that import refuses, though its rows are read here."""
    labels = {
        "hf_hub_url": "org/rows",
        "formatting": "sharegpt",
        "columns": {"messages": "messages", "kto_tag": "label"},
    }
    (tmp_path / "data").mkdir()
    (tmp_path / "data/dataset_info.json").write_text(json.dumps({"rows": labels}))
    path = tmp_path / "run.yaml"
    path.write_text(LLAMA_FACTORY.replace("stage: sft", "stage: kto").replace("dataset: org/rows", "dataset: rows"))
    [rows] = read_config_of_tool(path, gpus=1).values["data.source"]
    assert rows == {"source": "hf://org/rows", "format": "sharegpt", "columns": {"conversations": "messages"}}


def test_pairs_of_dataset_info_are_read_with_the_same_columns(tmp_path: Path):
    """Rows of a preference set that import refuses, or whose prompt is left out."""
    info: dict[str, Any] = {
        "pairs": {
            "hf_hub_url": "org/pairs",
            "ranking": True,
            "columns": {"prompt": "q", "chosen": "c", "rejected": "r"},
        },
        "chats": {
            "hf_hub_url": "org/chats",
            "ranking": True,
            "formatting": "sharegpt",
            "columns": {"messages": "conversations", "chosen": "chosen", "rejected": "rejected"},
        },
    }
    (tmp_path / "data").mkdir()
    (tmp_path / "data/dataset_info.json").write_text(json.dumps(info))
    path = tmp_path / "run.yaml"
    path.write_text(LF_DPO.replace("dataset: org/rows", "dataset: pairs,chats"))
    pairs, chats = read_config_of_tool(path, gpus=1).values["data.source"]
    columns = {"instruction": "q", "chosen": "c", "rejected": "r"}
    assert pairs == {"source": "hf://org/pairs", "format": "alpaca_preference", "columns": columns}
    assert chats == {"source": "hf://org/chats", "format": "sharegpt_preference"}
