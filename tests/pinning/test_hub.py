"""Hub ids through the real huggingface_hub client, against a server on this machine, and without any network."""

import gzip
import hashlib
import json
import os
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from lean_finetune.core.atomic_files import read_json
from tests.conftest import ROOT
from tests.pinning.hub_server import COMMIT, blob, serve
from tests.processes import run_bounded
from tests.workspace import lay_out, run_module

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


def parquet(rows: list[dict]) -> bytes:
    sink = pa.BufferOutputStream()
    pq.write_table(pa.Table.from_pylist(rows), sink)
    return sink.getvalue().to_pybytes()


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
        "datasets/org/columns": {
            "data/train-0.parquet": parquet(ROWS[:30]),
            "data/train-1.parquet": parquet(ROWS[30:]),
            "data/test-0.parquet": parquet(ROWS[:1]),
        },
        "datasets/org/configs": {"README.md": CARD, "a/x.jsonl": LINES, "b/y.jsonl.gz": gzip.compress(LINES * 3)},
        "datasets/org/pictures": {"train/cat.png": b"PNG"},
        "datasets/org/script": {"script.py": b"import os"},
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
    [source] = read_json(tmp_path / "locks/data.json")["sources"]
    assert (source["kind"], source["revision"], source["split"]) == ("hub", COMMIT, "train")
    assert source["files"] == [
        {"path": "data/a.jsonl", "bytes": len(LINES), "blob_id": blob(LINES)["oid"]},
        {
            "path": "data/b.json",
            "bytes": len(json.dumps(ROWS[:9])),
            "blob_id": blob(json.dumps(ROWS[:9]).encode())["oid"],
        },
    ]
    assert not any("safetensors" in path for path in hub.asked), "pinning needs no weights"
    process = run("stages.tokenize", url=hub.url, data__heldout_fraction=0.2, **named)
    assert process.returncode == 0, process.stderr
    metrics = read_json(tmp_path / "data/tokens/figures.json")
    assert metrics["train_rows"] + metrics["heldout_rows"] == 49
    assert not any("safetensors" in path for path in hub.asked), "tokenizing needs no weights"
    assert not list((tmp_path / "cache").rglob("a.jsonl")), "rows are read as they come, and not stored"
    line = told(run("stages.tokenize", url=NOWHERE, data__heldout_fraction=0.2, **named))
    assert line.startswith("data.source: the Hugging Face Hub cannot be reached for org/rows")


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
    "split": (
        "data",
        {"data__source": "hf://org/configs", "data__split": "rest"},
        "data.split: hf://org/configs has no split 'rest'; name one of train",
    ),
    "configuration": (
        "data",
        {"data__source": "hf://org/configs", "data__config": "middle"},
        "data.config: org/configs: BuilderConfig 'middle' not found. Available: ['small', 'large']",
    ),
    "pictures": (
        "data",
        {"data__source": "hf://org/pictures"},
        "data.source: hf://org/pictures at 0123456789ab keeps split 'train' in train/cat.png, which is none of its",
    ),
    "code of its own": ("data", {"data__source": "hf://org/script"}, "which is never run"),
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


@pytest.mark.parametrize(
    "values, paths, split",
    [
        ({"data__source": "hf://org/columns", "data__split": "test"}, ["data/test-0.parquet"], "test"),
        ({"data__source": "hf://org/configs"}, ["a/x.jsonl"], "train"),
    ],
)
def test_a_configuration_and_a_split_choose_the_files(run, hub, tmp_path, values, paths, split):
    process = run("stages.pin", "data", url=hub.url, **values)
    assert process.returncode == 0, process.stderr
    [source] = read_json(tmp_path / "locks/data.json")["sources"]
    assert ([file["path"] for file in source["files"]], source["split"]) == (paths, split)
    assert not any(path in asked for asked in hub.asked for path in paths if "/resolve/" in asked), "nothing is fetched"


READ = """
import sys
from pathlib import Path
from lean_finetune.core.errors import UserError
from lean_finetune.core.atomic_files import read_json
from lean_finetune.data.read.source_blocks import read_blocks
from lean_finetune.data.read.decode_rows import decode
try:
    blocks = read_blocks(read_json(Path("locks/data.json")), max_rows=int(sys.argv[1]), progress=lambda n: None)
    print(*(row.value["messages"][0]["content"] for block in blocks for row in decode(block)), sep="|")
except UserError as error:
    sys.exit(f"error: {error}")
"""


@pytest.fixture
def read(tmp_path):
    """A function that reads the pinned rows as a process that knows only the given hub."""

    def run_reader(url, max_rows):
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "HF_ENDPOINT": url, "HF_HOME": str(tmp_path / "cache")}
        environment |= {"NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1"}
        arguments = [sys.executable, "-c", READ, str(max_rows)]
        return run_bounded(arguments, cwd=tmp_path, env=environment)

    return run_reader


def test_compressed_lines_and_parquet_are_read_from_the_hub_and_checked(run, read, hub, tmp_path):
    asked = [row["messages"][0]["content"] for row in ROWS]
    for values, expected in (
        ({"data__source": "hf://org/columns"}, asked),
        ({"data__source": "hf://org/configs", "data__config": "large", "data__split": "rest"}, asked * 3),
    ):
        assert run("stages.pin", "data", url=hub.url, **values).returncode == 0
        process = read(hub.url, 1000)
        assert process.stdout.rstrip("\n").split("|") == expected, process.stderr
    [source] = read_json(tmp_path / "locks/data.json")["sources"]
    assert ([file["path"] for file in source["files"]], source["split"]) == (["b/y.jsonl.gz"], "rest")
    route = f"datasets/org/configs/resolve/{COMMIT}/b/y.jsonl.gz"
    hub.sends[route] = gzip.compress(LINES * 4)
    try:
        line = told(read(hub.url, 1000))
    finally:
        del hub.sends[route]
    assert line.startswith("hf://org/configs/b/y.jsonl.gz: what the hub sent is not what was pinned (")
