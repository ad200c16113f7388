"""Data sets that LLaMA-Factory's dataset_info.json describes: the same rows and columns here."""

import json
from pathlib import Path
from typing import Any

import pytest

from lean_finetune.commands.convert.conversions import Converted
from lean_finetune.commands.convert.read_config import read_config_of_tool
from lean_finetune.config.load import COMMON_PARAMS, load_params, with_flags
from lean_finetune.core.errors import UserError
from lean_finetune.pinning.config_file import MOST_BYTES
from tests.commands.tool_configs import LLAMA_FACTORY


def import_data(
    tmp_path: Path, info: dict[str, Any] | str, names: str, more: str = "", stage: str = "sft"
) -> Converted:
    """What becomes of a LLaMA-Factory configuration with these data sets."""
    (tmp_path / "data").mkdir()
    (tmp_path / "data/dataset_info.json").write_text(info if isinstance(info, str) else json.dumps(info))
    (tmp_path / "data/rows.json").write_text("[]")
    (tmp_path / "examples").mkdir()
    text = LLAMA_FACTORY.replace("dataset: org/rows", f"dataset: {names}").replace("sft", stage) + more
    (tmp_path / "examples/run.yaml").write_text(text)
    return read_config_of_tool(tmp_path / "examples/run.yaml", gpus=1)


def test_data_sets_of_dataset_info_are_read_with_the_same_columns(tmp_path: Path):
    """Rows of other columns, a system prompt that the tool did not read, or held-out rows that are trained."""
    info = {
        "mine": {"file_name": "rows.json", "columns": {"prompt": "question", "response": "output", "system": "role"}},
        "chats": {
            "hf_hub_url": "org/chats",
            "formatting": "sharegpt",
            "subset": "en",
            "split": "train_sft",
            "num_samples": 100,
            "columns": {"messages": "messages"},
            "tags": {"role_tag": "role", "content_tag": "content", "user_tag": "user", "assistant_tag": "assistant"},
        },
        "test": {"file_name": "rows.json"},
    }
    found = import_data(tmp_path, info, "mine, chats", "eval_dataset: test\nmax_samples: 50\n").values
    rows = str(tmp_path / "data/rows.json")
    chats = {"source": "hf://org/chats", "config": "en", "split": "train_sft", "format": "sharegpt"}
    assert found["data.source"] == [
        {"source": rows, "format": "alpaca", "columns": {"instruction": "question", "system": "role"}, "rows": 50},
        {**chats, "columns": {"conversations": "messages"}, "rows": 50},
    ]
    assert found["data.heldout_source"] == [{"source": rows, "format": "alpaca"}]
    assert found["data.heldout_fraction"] == 0 and "data.max_rows" not in found
    assert found["data.ignore_columns"] == ["functions", "history", "loss_mask", "system", "tools"]
    flags = Converted(tool="", values=found).flags()
    assert with_flags(load_params(COMMON_PARAMS), flags).data.heldout_fraction == 0


@pytest.mark.parametrize(
    ("entry", "stage", "expected"),
    [
        (
            {"file_name": "rows.json", "ranking": True},
            "sft",
            "ranking: preferences need a stage that trains them (dpo, kto or rm)",
        ),
        ({"file_name": "rows.json"}, "dpo", "ranking: must be true, for pairs of dpo"),
        (
            {"file_name": "rows.json", "columns": {"videos": "i"}},
            "sft",
            "columns.videos: is not trained here",
        ),
        ({"file_name": "gone.json"}, "sft", "file_name: "),
        ({"script_url": "rows"}, "sft", "script_url: scripts that make data are not run"),
        ({"ms_hub_url": "org/rows"}, "sft", "must have hf_hub_url or file_name"),
        ({"hf_hub_url": "a/b", "tags": {"user_tag": "Q"}}, "sft", "tags.user_tag: must be human or user; got Q"),
        ({"hf_hub_url": "a/b"}, "pt", "stage pt trains the column of columns.prompt alone"),
    ],
)
def test_data_sets_that_cannot_be_read_here_are_refused_in_one_line(
    entry: dict[str, Any], stage: str, expected: str, tmp_path: Path
):
    """Rows with their images left out, or the worse of two answers trained."""
    with pytest.raises(UserError) as caught:
        import_data(tmp_path, {"rows": entry}, "rows", stage=stage)
    assert str(caught.value).startswith(f"{tmp_path}/data/dataset_info.json: rows: {expected}")


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ('{"rows": ' + "[" * 200_000 + "]" * 200_000 + "}", "is not JSON (nested too deeply)"),
        ('{"rows": "' + "x" * MOST_BYTES + '"}', f"has more than {MOST_BYTES} bytes"),
        ('{"rows": 1' + "0" * 5000 + "}", "is not JSON (Exceeds the limit"),
        ("{", "is not JSON (Expecting property name"),
        ("[]", "must be a JSON object; got list"),
        ('{"rows": []}', "must describe data sets as LLaMA-Factory does"),
        ("{}", "has no data set 'rows'"),
    ],
)
def test_a_dataset_info_that_is_no_such_file_is_refused_in_one_line(text: str, fault: str, tmp_path: Path):
    """A file of any size was read as a whole."""
    with pytest.raises(UserError) as caught:
        import_data(tmp_path, text, "rows")
    assert fault in str(caught.value) and str(caught.value).startswith(f"{tmp_path}/data/dataset_info.json: ")
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 400
