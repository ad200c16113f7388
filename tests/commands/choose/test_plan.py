"""`lean-finetune plan` as users see it: the sets, params.yaml, and one line for each error."""

import json
import re
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from lean_finetune.cli import main
from lean_finetune.config.load import load_params
from tests.conftest import ROOT

SAMPLE = ROOT / "data/raw/sample.jsonl"


def plan(*words: str) -> Result:
    return CliRunner().invoke(main, ["plan", *words], catch_exceptions=False)


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with the repository's params.yaml and some rows."""
    monkeypatch.chdir(tmp_path)
    shutil.copy(ROOT / "params.yaml", tmp_path)
    lines = SAMPLE.read_text(encoding="utf-8").splitlines(keepends=True)[:200]
    (tmp_path / "rows.jsonl").write_text("".join(lines), encoding="utf-8")
    return tmp_path


def test_the_set_is_written_with_comments(project: Path):
    """A set that is printed and not written; comments that are lost; a run that the printed one is not."""
    before = (project / "params.yaml").read_text(encoding="utf-8")
    result = plan("--data", "rows.jsonl", "--gpu", "T4")
    assert result.exit_code == 0, result.output
    p = load_params(project / "params.yaml")
    assert (p.data.source, p.hardware.gpu, p.train.precision, p.train.method) == ("rows.jsonl", "T4", "fp16", "qlora")
    assert p.bucket.mode == "bucketed" and "T4 has no kernel for packed rows" in " ".join(result.output.split())
    comments = [line for line in before.splitlines() if line.strip().startswith("#")]
    after = (project / "params.yaml").read_text(encoding="utf-8").splitlines()
    assert all(line in after for line in comments)
    lines = result.output.splitlines()
    assert lines[0].startswith("plan                 fits: tensor peak ") and max(map(len, lines)) <= 80
    text = " ".join(result.output.split())
    assert "all 200 rows" in text and f"data.max_length {p.data.max_length}" in text
    found = re.search(r"optimizer steps about (\d+): 2 epochs of [\d,]+ tokens, 2,048 a step", text)
    assert found is not None
    steps = int(found[1])
    assert (steps < 100) == ("most fine-tunings take 100 or more: lower train.tokens_per_step" in text)
    again = plan("--json", "--dry-run")
    answer = json.loads(again.output)
    assert answer["sets"][0]["peak_bytes"] > 0 and answer["rows"]["total"] == 200 and answer["written"] is None


@pytest.mark.parametrize(
    ("words", "code", "expected"),
    [
        (["--gpu", "T5"], 2, "error: hardware.gpu: must be"),
        (["--data", "absent.jsonl"], 1, "error: --data: no such file or directory; got 'absent.jsonl'"),
        (["--lengths", "p50=9,p99=20", "--data", "rows.jsonl"], 2, "error: --lengths: stands in for rows"),
        (
            ["--gpu", "530MiB", "--length", "512"],
            3,
            "error: hardware.gpu: nothing fits 530MiB: with every memory switch qlora needs ",
        ),
        (
            ["--set", "train.method=lora", "--method", "full"],
            2,
            "error: train.method: is given by --set and by an option",
        ),
        (["--set", "data.max_length=64", "--length", "128"], 2, "error: data.max_length: is given by --set and by an"),
        (
            ["--set", "bucket.max_tokens=3", "--length", "64"],
            2,
            "error: bucket.max_tokens: a micro-batch must have room for a row",
        ),
        (["--length", "1"], 2, "error: data.max_length: must be greater than or equal to 8; got 1"),
        (["--out", "other.yaml"], 2, "error: --out: other.yaml exists; name a new file, or start from it by --params"),
        (["--out", "."], 2, "error: --out: . exists; name a new file"),
        (["--set", "train.rank=3"], 2, "error: train.rank: unknown parameter"),
    ],
)
def test_errors_are_one_line_and_write_nothing(project: Path, words: list[str], code: int, expected: str):
    """A traceback, or half a params.yaml."""
    before = (project / "params.yaml").read_bytes()
    (project / "other.yaml").write_bytes(before.replace(b"rank: 16", b"rank: 256"))
    result = plan(*words)
    assert (result.exit_code, result.output.startswith(expected)) == (code, True), result.output
    assert result.output.count("\n") == 1 and (project / "params.yaml").read_bytes() == before
