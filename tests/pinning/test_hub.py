"""Hub ids through the real huggingface_hub client, against a server on this machine, and without any network."""

import gzip
import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save

from lean_finetune.core.atomic_files import read_json
from lean_finetune.core.errors import UserError
from lean_finetune.data.read.decode_rows import decode
from lean_finetune.data.read.source_blocks import read_blocks
from lean_finetune.pinning.locate import EXAMPLE_CONFIGS, files_directory, find_model, verify_files
from stages.pin import main as pin
from stages.tokenize import main as tokenize
from tests.data.read.common import parquet
from tests.pinning.hub_server import COMMIT, Hub, blob, serve, use_hub
from tests.workspace import invoke, lay_out

ROWS = [
    {"messages": [{"role": "user", "content": f"Say {n}"}, {"role": "assistant", "content": str(n)}]} for n in range(40)
]
CARD = b"""---
configs:
- config_name: small
  default: true
  data_files: a/*.jsonl
- config_name: large
  data_files:
  - split: train
    path: a/*.jsonl
  - split: rest
    path: b/*
---
"""


LINES = "".join(json.dumps(row) + "\n" for row in ROWS).encode()


def adapter_of(base: str) -> dict[str, bytes]:
    """The files of an adapter of a hub model."""
    layer = "base_model.model.model.layers.0.self_attn.q_proj"
    tensors = {f"{layer}.lora_{side}.weight": np.ones((4, 4), np.float32) for side in "AB"}
    config = {"base_model_name_or_path": base, "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]}
    return {"adapter_config.json": json.dumps(config).encode(), "adapter_model.safetensors": save(tensors)}


@pytest.fixture(scope="module")
def hub(tiny_dir):
    """A hub with the shipped model, two variants that must be refused, and two data sets."""
    files = {path.name: path.read_bytes() for path in tiny_dir.iterdir()}
    config = json.loads(files["config.json"])
    pickled = {name: content for name, content in files.items() if name != "model.safetensors"}
    repositories = {
        "models/org/model": files | {"onnx/model.safetensors": b"other"},
        "models/org/pickled": pickled | {"pytorch_model.bin": b"pickle"},
        "models/org/code": files
        | {"config.json": json.dumps(config | {"auto_map": {}, "architectures": ["Own"]}).encode()},
        "models/org/adapter": adapter_of("org/model"),
        "models/org/foreign": adapter_of("org/base"),
        "models/org/bin": {"adapter_config.json": b"{}", "adapter_model.bin": b"pickle"},
        "datasets/org/rows": {"data/b.json": json.dumps(ROWS[:9]).encode(), "data/a.jsonl": LINES, "README.md": b"#"},
        "datasets/org/columns": {
            "data/train-0.parquet": parquet(ROWS[:30]),
            "data/train-1.parquet": parquet(ROWS[30:]),
            "data/test-0.parquet": parquet(ROWS[:1]),
        },
        "datasets/org/configs": {"README.md": CARD, "a/x.jsonl": LINES, "b/y.jsonl.gz": gzip.compress(LINES * 3)},
        "datasets/org/images": {"train/cat.png": b"PNG"},
        "datasets/org/script": {"script.py": b"import os"},
    }
    with serve(repositories) as served:
        yield served


NOWHERE = Hub({}, url="http://127.0.0.1:9")
COMMANDS = {"pin": pin, "tokenize": tokenize}


def read() -> list[str] | str:
    """The first message of each pinned row, or the refusal."""
    try:
        blocks = read_blocks(read_json(Path("locks/data.json")), max_rows=1000, progress=lambda n: None)
        return [(row.value or {})["messages"][0]["content"] for block in blocks for row in decode(block)]
    except UserError as error:
        return str(error)


def call(directory: Path, hub: Hub, *calls: tuple[str, dict]) -> list:
    """Run stages that know only this hub; each result is the refusal, empty on success."""
    results: list = []
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(directory)
        use_hub(patch, hub, directory / "cache")
        patch.setattr("datasets.config.HF_ENDPOINT", hub.url)
        for command, values in calls:
            if command == "read":
                results.append(read())
                continue
            lay_out(directory, **values)
            module, *arguments = command.split()
            result = invoke(COMMANDS[module], *arguments)
            [*_, line] = ["", *result.stderr.splitlines()]
            results.append(line.removeprefix("error: ") if result.exit_code else "")
    return results


def test_hub_model_and_data_are_pinned_by_commit_and_tokenized(hub, tmp_path):
    values: dict = {"model__name": "org/model", "model__revision": "v1", "data__source": "hf://org/rows"}
    values |= {"data__heldout_fraction": 0.2, "run__tokenizer_engine": "tokenizers"}
    assert call(tmp_path, hub, ("pin model", values), ("pin data", values), ("tokenize", values)) == [""] * 3
    files = hub.repositories["models/org/model"]
    lock = read_json(tmp_path / "locks/model.json")
    assert (lock["kind"], lock["name"], lock["revision"]) == ("hub", "org/model", COMMIT)
    assert lock["files"]["model.safetensors"] == hashlib.sha256(files["model.safetensors"]).hexdigest()
    assert lock["files"]["config.json"] == blob(files["config.json"])["oid"]
    assert "onnx/model.safetensors" not in lock["files"]
    [source] = read_json(tmp_path / "locks/data.json")["sources"]
    assert (source["kind"], source["revision"], source["split"]) == ("hub", COMMIT, "train")
    array = json.dumps(ROWS[:9]).encode()
    assert source["files"] == [
        {"path": "data/a.jsonl", "bytes": len(LINES), "blob_id": blob(LINES)["oid"]},
        {"path": "data/b.json", "bytes": len(array), "blob_id": blob(array)["oid"]},
    ]
    metrics = read_json(tmp_path / "data/tokens/figures.json")
    assert metrics["train_rows"] + metrics["heldout_rows"] == 49
    assert not any("safetensors" in path for path in hub.requests), "neither pinning nor tokenizing needs weights"
    assert not list((tmp_path / "cache").rglob("a.jsonl")), "rows are streamed, not stored"
    [refusal] = call(tmp_path, NOWHERE, ("tokenize", values))
    assert refusal.startswith("data.source: the Hugging Face Hub cannot be reached for org/rows")
    (tmp_path / "cache").rename(tmp_path / "moved")
    [refusal] = call(tmp_path, NOWHERE, ("tokenize", values))
    assert refusal.startswith("model.name: the Hugging Face Hub cannot be reached for org/model")


def test_an_adapter_on_the_hub_is_pinned_by_commit_and_belongs_to_its_base(hub, tmp_path):
    """An adapter that changes with its branch, or one of another model."""
    calls = [
        ("pin model", {"model__name": "org/model", "model__adapter": name, "model__adapter_revision": revision})
        for name, revision in (("org/foreign", None), ("org/bin", None), ("org/adapter", "v9"), ("org/adapter", "v1"))
    ]
    other, pickled, revision, found = call(tmp_path, hub, *calls)
    assert other.startswith("model.adapter: ") and "is of org/base; got model.name=org/model; set model.name" in other
    assert "has no adapter_model.safetensors (only adapter_model.bin, a pickle" in pickled
    assert "name a branch, tag or commit of it in model.adapter_revision" in revision
    assert found == ""
    lock = read_json(tmp_path / "locks/model.json")["adapter"]
    assert (lock["kind"], lock["name"], lock["revision"]) == ("hub", "org/adapter", COMMIT)
    with pytest.MonkeyPatch.context() as patch:
        use_hub(patch, hub, tmp_path / "cache")
        directory = files_directory(lock, "model.adapter")
    verify_files(directory, lock["files"], "model.adapter")


REFUSED = {
    "unknown model": ("model", {"model__name": "org/other"}, "model.name: the hub has no org/other that you may read"),
    "gated": ("model", {"model__name": "gated/model"}, "model.name: gated/model is gated; accept its licence at "),
    "revision": ("model", {"model__name": "org/model", "model__revision": "v9"}, "model.name: org/model has no su"),
    "pickle": ("model", {"model__name": "org/pickled"}, "model.name: org/pickled at 0123456789ab has no model.safe"),
    "custom code": ("model", {"model__name": "org/code"}, "requires its own code (auto_map)"),
    "unknown data": ("data", {"data__source": "hf://org/none"}, "data.source: the hub has no org/none that you may"),
    "split": ("data", {"data__source": "hf://org/configs", "data__split": "rest"}, "data.split: hf://org/configs"),
    "configuration": ("data", {"data__source": "hf://org/configs", "data__config": "middle"}, "data.config: org/c"),
    "images": ("data", {"data__source": "hf://org/images"}, "data.source: hf://org/images at 0123456789ab h"),
    "own code": ("data", {"data__source": "hf://org/script"}, "which is never run"),
}


@pytest.fixture(scope="module")
def refusals(hub, tmp_path_factory) -> dict[str, str]:
    """The refusal of each case of REFUSED."""
    directory = tmp_path_factory.mktemp("refused")
    lines = call(directory, hub, *((f"pin {what}", values) for what, values, _ in REFUSED.values()))
    assert not (directory / "locks").exists()
    return dict(zip(REFUSED, lines, strict=True))


@pytest.mark.parametrize("name", REFUSED)
def test_what_the_hub_refuses_is_one_line_with_a_remedy(refusals, name):
    assert REFUSED[name][2] in refusals[name]


def test_without_a_network_one_line_names_the_remedy(tmp_path):
    values = {"model__name": "org/model", "data__source": "hf://org/rows"}
    for refusal in call(tmp_path, NOWHERE, ("pin model", values), ("pin data", values)):
        assert "the Hugging Face Hub cannot be reached for org/" in refusal and "name a local path instead" in refusal
    assert not (tmp_path / "locks").exists()


def test_a_model_whose_configuration_is_in_the_package_is_predicted_without_access(tmp_path, monkeypatch, capsys):
    """`fit --model meta-llama/Llama-3.1-8B` was refused without a network, though its sizes are in the package."""
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    for name, config in (("meta-llama/Llama-3.1-8B-Instruct", "llama-3.1-8b"), ("Qwen/Qwen2.5-14B", "qwen2.5-14b")):
        assert find_model(name) == find_model(name) == EXAMPLE_CONFIGS / config
        assert capsys.readouterr().err.count(f"note: the hub gives no access to {name}") == 1
    for name, revision in (("Qwen/Qwen3-8B", None), ("someone/Llama-3.1-8B", None), ("Qwen/Qwen2.5-14B", "v2")):
        with pytest.raises(UserError, match="cannot be reached"):
            find_model(name, revision)
    with pytest.raises(UserError, match=r"got '\./gone/model', which does not exist"):
        find_model("./gone/model")


def test_a_cache_that_cannot_be_written_is_not_blamed_on_the_network(hub, tmp_path):
    (tmp_path / "cache").write_text("a file where the cache's directory should be")
    [refusal] = call(tmp_path, hub, ("pin model", {"model__name": "org/model"}))
    assert refusal.startswith("model.name: org/model cannot be stored (") and "HF_HOME" in refusal


def test_compressed_lines_and_parquet_are_read_from_the_hub_and_checked(hub, tmp_path):
    questions = [row["messages"][0]["content"] for row in ROWS]
    columns = {"data__source": "hf://org/columns"}
    rest = {"data__source": "hf://org/configs", "data__config": "large", "data__split": "rest"}
    results = call(tmp_path, hub, ("pin data", columns), ("read", {}), ("pin data", rest), ("read", {}))
    assert results == ["", questions, "", questions * 3]
    [source] = read_json(tmp_path / "locks/data.json")["sources"]
    assert ([file["path"] for file in source["files"]], source["split"]) == (["b/y.jsonl.gz"], "rest")
    route = f"datasets/org/configs/resolve/{COMMIT}/b/y.jsonl.gz"
    hub.sends[route] = gzip.compress(LINES * 4)
    try:
        default = {"data__source": "hf://org/configs"}
        refusal, pinned = call(tmp_path, hub, ("read", {}), ("pin data", default))
    finally:
        del hub.sends[route]
    assert refusal.startswith("hf://org/configs/b/y.jsonl.gz: the hub sent other bytes than were pinned (")
    [source] = read_json(tmp_path / "locks/data.json")["sources"]
    assert pinned == "" and [file["path"] for file in source["files"]] == ["a/x.jsonl"]
