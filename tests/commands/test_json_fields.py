"""`--json`: commands print what json_fields.py lists, errors included, and no field that scripts read goes away."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from lean_finetune.cli import main
from lean_finetune.commands.json_fields import ANSWER_FIELDS, EVENTS, VERDICT, Field
from tests.conftest import ROOT
from tests.cuda_memory.snapshots import Snapshot
from tests.cuda_memory.test_diagnosis import MODEL, training
from tests.json_answers import PAGE, check_answer, check_event, promises, with_tables, wrong_fields
from tests.memory.common import card_for
from tests.small_vision import vision_model

PROMISED = Path(__file__).with_name("promised_json_fields.txt")
MIB = 2**20
UNITS = re.compile(r"(bytes|seconds|percent|gib|tokens(_per_\w+)?|tokens_per_second)(_|\b)|exit_code")
COUNTS = set(
    "layers value limit rows per_row patches tokenized total traces number of event events blocks retries step device "
    "left_out first_step last_step failed_event planned_steps settled_step".split()
)
"""Fields that count things, or number them."""
RATIOS = {"slowdown", "confidence", "share"} | {
    f"{model}_{what}" for model in ("base", "tuned") for what in ("loss", "reward_accuracy", "reward_margin")
}


def answer(*words: str, exit_code: int = 0) -> tuple[Any, Result]:
    """What a command prints as JSON, and its result."""
    result = CliRunner().invoke(main, [*words, "--json"], catch_exceptions=False)
    assert result.exit_code == exit_code, result.output
    return json.loads(result.stdout), result


# What is promised.


def test_no_promised_field_is_removed_or_gets_another_type():
    """A script that reads `peak_bytes`, after an upgrade. Added fields are appended to the file for the next change."""
    promised = set(PROMISED.read_text(encoding="utf-8").splitlines())
    assert promised - promises(ANSWER_FIELDS) == set(), "these fields are gone, or have another type"
    missing = promises(ANSWER_FIELDS) - promised
    assert missing == set(), f"new fields: append these lines to {PROMISED.name}"


def test_a_removed_a_renamed_and_a_changed_field_are_found():
    fields = ANSWER_FIELDS["error"]
    promised = promises({"error": fields})
    assert promised - promises({"error": [*fields, Field("more", "string")]}) == set()
    assert promised - promises({"error": fields[1:]})
    assert promised - promises({"error": [replace(fields[0], path="message"), *fields[1:]]})
    assert promised - promises({"error": [replace(fields[0], type="string or null"), *fields[1:]]})
    assert promised - promises({"error": [replace(fields[0], only="errors"), *fields[1:]]})


def test_a_wrong_answer_is_found():
    fields = {field.path: field for field in ANSWER_FIELDS["error"]}
    right: dict[str, Any] = {"error": "x", "details": ["y"], "exit_code": 1}
    assert list(wrong_fields(right, "", fields)) == []
    for wrong in ({"error": 1}, {"details": [1]}, {"exit_code": 1.5}, {"more": 1}, {"details": None}):
        assert list(wrong_fields({**right, **wrong}, "", fields)), wrong
    assert list(wrong_fields({"error": "x", "details": []}, "", fields)) == ["exit_code: is missing"]


def test_numbers_have_their_unit_in_their_name_or_their_meaning():
    """A size of which a script must guess whether it is in bytes or GiB."""
    without = []  # Of them `devices`, whose items are numbers of GPUs.
    for name, fields in ANSWER_FIELDS.items():
        for field in fields:
            own = field.path.removesuffix(".*").split(".")[-1].removesuffix("[]")
            if not {"integer", "number"} & set(field.type.split(" or ")) or own in COUNTS | RATIOS:
                continue
            if not UNITS.search(field.path) and not re.search(
                r"\b(bytes|tokens|pixels|from the commit)\b", field.meaning
            ):
                without.append(f"{name}: {field.path}")
    assert without == ["snapshot: devices[]"]


def test_the_page_for_scripts_lists_all_fields():
    page = PAGE.read_text(encoding="utf-8")
    assert page == with_tables(page), "run `python -m tests.json_answers`, which writes them"


# What is printed.


def test_fit(small_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    found, _ = answer("fit", "--model", str(small_llama), "--length", "128", "--gpu", "T4")
    check_answer("fit", found)
    assert found["verdict"] == "fits" and {field.path for field in VERDICT if "." not in field.path} < found.keys()


@pytest.mark.slow
def test_fit_of_a_run_that_does_not_fit(small_llama: Path):
    run = ("fit", "--model", str(small_llama), "--length", "128", "--set", "bucket.max_tokens=8192")
    alone, _ = answer(*run, "--gpu", "T4", "--verdict")
    assert alone.keys() == {field.path for field in VERDICT if "." not in field.path}
    too_large, _ = answer(*run, "--gpu", card_for(0.7 * alone["peak_bytes"]), exit_code=3)
    check_answer("fit", too_large)
    assert too_large["would_fit"] and "error" not in too_large


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        ["--lengths", "p50=20,p99=90,max=128"],
        ["--gpus", "2"],
        ["--gpus", "2", "--set", "train.pipeline_stages=2"],
        ["--gpu", "auto"],
        ["--method", "full", "--gpu", "24GiB"],
        ["--set", "train.offload_activations=cpu", "--set", "train.optimizer=adamw_8bit"],
    ],
)
def test_fit_of_other_runs(small_llama: Path, options: list[str]):
    gpu = () if "--gpu" in options else ("--gpu", "T4")
    found, _ = answer("fit", "--model", str(small_llama), "--length", "128", *gpu, *options)
    check_answer("fit", found)


@pytest.mark.slow
def test_fit_of_images_and_of_another_tool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Parts for images were printed as "set()", and the size of images as "Size(height=112, width=196)"."""
    monkeypatch.chdir(tmp_path)
    vision_model(tmp_path / "model", "qwen2_5_vl")
    found, _ = answer("fit", "--model", "model", "--gpu", "T4", "--image", "196x112", "--length", "512")
    check_answer("fit", found)
    assert found["images"]["width"] == 196
    trl = "model_name_or_path: tiny\ndataset_name: a/b\nuse_peft: true\nper_device_train_batch_size: 2\n"
    for more, known in (("", True), ("dtype: [bfloat16]\n", False)):
        (tmp_path / "trl.yaml").write_text(trl + more)
        found, _ = answer("fit", "--from", "trl.yaml", "--gpu", "A100-40GB")
        check_answer("fit", found)
        assert ("peak_bytes" in found["as_tool"]) == known and found["from"]["adapted_parts"] == ["vision"]


@pytest.mark.slow
def test_plan_also_where_nothing_fits(small_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The sets, and the reason with what would fit, in one object each."""
    monkeypatch.chdir(tmp_path)
    run = ("plan", "--model", str(small_llama), "--method", "lora")
    found, _ = answer(*run, "--gpu", "T4", "--length", "64")
    check_answer("plan", found)
    found, result = answer(*run, "--gpu", "526MiB", "--length", "128", exit_code=3)
    check_answer("plan", found)
    assert result.stderr == f"error: {found['error']}\n" and found["would_do"]["gpu"] == "RTX-3070"
    assert found["exit_code"] == 3 and not found["sets"]


@pytest.mark.slow
def test_plan_of_rows(small_llama: Path, tmp_path: Path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join((ROOT / "data/raw/sample.jsonl").read_text().splitlines(keepends=True)[:40]))
    found, _ = answer("plan", "--model", "tiny", "--data", str(rows), "--gpu", "T4", "--dry-run")
    check_answer("plan", found)
    assert found["rows"]["total"] == 40 and found["sets"]


def test_explain(tmp_path: Path):
    (tmp_path / "curve.csv").write_text("step,live_mib\n" + "".join(f"{k},{1000 + 2 * k}\n" for k in range(100)))
    found, _ = answer("explain", str(tmp_path / "curve.csv"))
    check_answer("explain", found)
    [leak] = found["findings"]
    assert leak["cause"] == "leak" and leak["slope_bytes_per_step"] == 2 * MIB and leak["usual_causes"]
    (tmp_path / "short.csv").write_text("step,live_mib\n0,1\n")
    check_answer("explain", answer("explain", str(tmp_path / "short.csv"))[0])


def test_snapshot(tmp_path: Path):
    path = str(training(24, leak=MIB).write(tmp_path / "run.pickle"))
    for more in ((), ("--gpu", "24")):
        check_answer("snapshot", answer("snapshot", path, *more)[0])
    failed = Snapshot()
    failed.reserve(0, 40 * MIB)
    failed.alloc(0, 30 * MIB, MODEL)
    failed.fail(2048 * MIB, 300 * MIB, MODEL)
    found, _ = answer("snapshot", str(failed.write(tmp_path / "oom.pickle")), "--gpu", "24")
    check_answer("snapshot", found)
    assert found["failures"]


def test_events():
    assert set(EVENTS) >= {"end", "failed", "error"}
    check_event({"event": "stage_end", "stage": "train", "seconds": 3})
    with pytest.raises(AssertionError, match="seconds"):
        check_event({"event": "stage_end", "stage": "train"})


# Errors.


@pytest.mark.parametrize(
    ("words", "exit_code", "says"),
    [
        (["fit", "--model", "none/at/all", "--gpu", "T4"], 1, "none/at/all"),
        (["fit", "--gpu", "T5", "--model", "llama-3.1-8b"], 2, "hardware.gpu: must be"),
        (["fit", "--gpuu", "T4"], 2, "No such option"),
        (["fit", "--gpus", "0"], 2, "--gpus"),
        (["plan", "--length", "64"], 2, "--model: name a hub id"),
        (["explain", "none.csv"], 1, "none.csv: must be a CSV file"),
        (["explain"], 2, "Missing argument"),
        (["snapshot", "none.pickle"], 1, "none.pickle"),
        (["snapshot", "none.pickle", "--device", "x"], 2, "--device"),
        (["compare"], 1, "here is no project"),
        (["run", "--set", "train.epoch=3"], 2, "did you mean train.epochs?"),
        (["run", "--nope"], 2, "No such option"),
        (["chat", "--model", "none"], 2, "does not exist"),
        (["run", "none.txt/../x\0y"], 2, "DIRECTORY"),
    ],
)
def test_an_error_is_one_object_on_standard_output_too(
    words: list[str], exit_code: int, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """A script that parses standard output found nothing there, and had to parse the line on standard error."""
    monkeypatch.chdir(tmp_path)
    found, result = answer(*words, exit_code=exit_code)
    prints_events = words[0] in ("run", "chat")
    check_answer(f"{words[0]}: error" if prints_events else "error", found)
    assert says in found["error"] and found["exit_code"] == exit_code
    assert result.stderr == "".join([f"error: {found['error']}\n", *(f"  {line}\n" for line in found["details"])])
    assert result.stdout.count("\n") == 1 or not prints_events, "one line for each event"


def test_without_json_standard_output_stays_empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    for words in (["fit", "--gpus", "0"], ["explain", "none.csv"], ["run", "--nope"], ["init", "--json"]):
        result = CliRunner().invoke(main, words)
        assert result.exit_code and result.stdout == "" and result.stderr.startswith("error: ")
