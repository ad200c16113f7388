"""Hub ids through the real huggingface_hub client, against a server on this machine, and without any network."""

import hashlib
import json
from pathlib import Path

import pytest

from stages.files import read_json
from tests.pin.hub_server import COMMIT, blob, serve
from tests.workspace import lay_out, run_module

ROWS = [
    {"messages": [{"role": "user", "content": f"Say {n}"}, {"role": "assistant", "content": str(n)}]} for n in range(40)
]
LINES = "".join(json.dumps(row) + "\n" for row in ROWS).encode()


@pytest.fixture(scope="module")
def hub(tiny_dir):
    """A hub with the shipped model, two variants that must be refused, and two data sets."""
    files = {path.name: path.read_bytes() for path in tiny_dir.iterdir()}
    config = json.loads(files["config.json"])
    pickled = {name: content for name, content in files.items() if name != "model.safetensors"}
    repositories = {
        "models/org/model": files | {"onnx/model.safetensors": b"other"},
        "models/org/pickled": pickled | {"pytorch_model.bin": b"pickle"},
        "models/org/code": files | {"config.json": json.dumps(config | {"auto_map": {}}).encode()},
        "datasets/org/rows": {"data/b.json": json.dumps(ROWS[:9]).encode(), "data/a.jsonl": LINES, "README.md": b"#"},
        "datasets/org/columns": {"data/train.parquet": b"PAR1", "README.md": b"#"},
    }
    with serve(repositories) as served:
        yield served


@pytest.fixture
def run(tmp_path):
    """A function that sets values and runs a stage as a process that knows only the given hub."""

    def run_stage(module, *arguments, url, **values):
        lay_out(tmp_path, **values)
        environment = {"HF_ENDPOINT": url, "HF_HOME": str(tmp_path / "cache"), "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
        environment |= {"NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1"}
        return run_module(module, *arguments, cwd=tmp_path, env=environment)

    return run_stage


def told(process) -> str:
    assert process.returncode == 1, process.stdout + process.stderr
    [line] = process.stderr.splitlines()
    return line.removeprefix("error: ")


NOWHERE = "http://127.0.0.1:9"


def test_a_hub_model_and_data_set_are_pinned_by_commit_and_tokenized_from_the_pin(run, hub, tmp_path):
    named = {"model__name": "org/model", "model__revision": "v1", "data__source": "hf://org/rows"}
    for what in ("model", "data"):
        process = run("stages.pin", what, url=hub.url, data__heldout_fraction=0.2, **named)
        assert process.returncode == 0, process.stderr
    files = hub.repositories["models/org/model"]
    lock = read_json(tmp_path / "locks/model.json")
    assert (lock["kind"], lock["name"], lock["revision"]) == ("hub", "org/model", COMMIT)
    assert lock["files"]["model.safetensors"] == hashlib.sha256(files["model.safetensors"]).hexdigest()
    assert lock["files"]["config.json"] == blob(files["config.json"])["oid"]
    assert "onnx/model.safetensors" not in lock["files"]
    assert read_json(tmp_path / "locks/data.json")["files"] == [
        {"path": "data/a.jsonl", "bytes": len(LINES), "blob_id": blob(LINES)["oid"]},
        {
            "path": "data/b.json",
            "bytes": len(json.dumps(ROWS[:9])),
            "blob_id": blob(json.dumps(ROWS[:9]).encode())["oid"],
        },
    ]
    assert not any("safetensors" in path for path in hub.asked), "pinning needs no weights"
    # Data comes from the hub on the first run; then everything is here, and no network is needed.
    for url in (hub.url, NOWHERE):
        process = run("stages.tokenize", url=url, data__heldout_fraction=0.2, **named)
        assert process.returncode == 0, process.stderr
    metrics = read_json(tmp_path / "metrics/tokenize.json")
    assert metrics["train_rows"] + metrics["heldout_rows"] == 49
    assert not any("safetensors" in path for path in hub.asked), "tokenizing needs no weights"


REFUSED = {
    "unknown model": ("model", {"model__name": "org/other"}, "model.name: the hub has no org/other that you may read"),
    "gated": ("model", {"model__name": "gated/model"}, "model.name: gated/model asks for consent; accept its terms"),
    "revision": (
        "model",
        {"model__name": "org/model", "model__revision": "v9"},
        "model.name: org/model has no such revision; name a branch, tag or commit of it in model.revision",
    ),
    "pickle": ("model", {"model__name": "org/pickled"}, "model.name: org/pickled at 0123456789ab has no model.safe"),
    "custom code": ("model", {"model__name": "org/code"}, "asks for code of its own (auto_map)"),
    "unknown data": ("data", {"data__source": "hf://org/none"}, "data.source: the hub has no org/none that you may"),
    "parquet": (
        "data",
        {"data__source": "hf://org/columns"},
        "data.source: hf://org/columns at 0123456789ab holds no .jsonl or .json file (only .md, .parquet)",
    ),
}


@pytest.mark.parametrize("what, values, rule", REFUSED.values(), ids=REFUSED)
def test_what_the_hub_cannot_give_is_told_in_one_line(run, hub, tmp_path, what, values, rule):
    line = told(run("stages.pin", what, url=hub.url, **values))
    assert rule in line
    assert not (tmp_path / "locks").exists()


@pytest.mark.parametrize(
    "what, values", [("model", {"model__name": "org/model"}), ("data", {"data__source": "hf://org/rows"})]
)
def test_without_a_network_one_line_names_the_remedy(run, tmp_path, what, values):
    line = told(run("stages.pin", what, url=NOWHERE, **values))
    assert "the Hugging Face Hub cannot be reached for org/" in line and "name a local path instead" in line
    assert not (tmp_path / "locks").exists()


def test_a_pinned_model_that_is_not_here_is_told_without_a_network(run, hub, tmp_path):
    values = {"model__name": "org/model", "data__source": "rows.jsonl", "data__heldout_fraction": 0.2}
    (tmp_path / "rows.jsonl").write_bytes(LINES)
    for what in ("model", "data"):
        assert run("stages.pin", what, url=hub.url, **values).returncode == 0
    (tmp_path / "cache").rename(tmp_path / "moved")
    line = told(run("stages.tokenize", url=NOWHERE, **values))
    assert line.startswith("model.name: the Hugging Face Hub cannot be reached for org/model")
    assert not Path(tmp_path / "data").exists()


def test_a_cache_that_cannot_be_written_is_not_blamed_on_the_network(run, hub, tmp_path):
    (tmp_path / "cache").write_text("a file where the cache's directory should be")
    line = told(run("stages.pin", "model", url=hub.url, model__name="org/model"))
    assert line.startswith("model.name: org/model cannot be stored (") and "HF_HOME" in line
