"""`lean-finetune plan` as users see it: the sets, params.yaml, and one line for each error."""

import json
import re
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from PIL import Image

from data.synth import images
from lean_finetune.cli import main
from lean_finetune.commands.choose.sampled_rows import sampled_rows
from lean_finetune.commands.row_lengths import row_index
from lean_finetune.config.load import COMMON_PARAMS, load_params, with_flags
from lean_finetune.core.errors import UserError
from lean_finetune.images.attachment import images_of
from lean_finetune.images.image_family import Size
from lean_finetune.memory.predict.assumed_images import most_images
from lean_finetune.model.model_config import read_config
from tests.conftest import ROOT
from tests.small_vision import vision_model

SAMPLE = ROOT / "data/raw/sample.jsonl"
FEWER = ("--set", "train.grad_ckpt=false", "--set", "train.loss_chunk=256")
"""Switches that are not searched for: a third of the traces."""


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
    assert lines[0].startswith("plan                 fits: needs ") and max(map(len, lines)) <= 80
    text = " ".join(result.output.split())
    assert "all 200 rows" in text and f"data.max_length {p.data.max_length}" in text
    found = re.search(r"optimizer steps about (\d+): 2 epochs of [\d,]+ tokens, 2,048 a step", text)
    assert found is not None
    steps = int(found[1])
    assert (steps < 100) == ("most fine-tunings take 100 or more: lower train.tokens_per_step" in text)
    again = plan("--json", "--dry-run", *FEWER)
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


def test_tokens_that_are_trained_by_their_text_are_counted_and_stay_text(project: Path):
    """A traceback: the step adds rows by ids, which the tokenizer knows."""
    words = ("--length", "64", "--gpu", "1GiB", "--method", "lora", "--set", "bucket.max_tokens=1024", "--json", *FEWER)
    results = plan(*words, "--dry-run"), plan(*words, "--set", 'train.lora.trainable_tokens=["<|im_start|>"]')
    without, counted = (json.loads(one.output)["sets"][0]["peak_bytes"] for one in results)
    assert counted > without
    assert load_params(project / "params.yaml").train.lora.trainable_tokens == ["<|im_start|>"]


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Drawn images, of which one is larger and one row is of text, and a small Qwen2.5-VL."""
    root = tmp_path_factory.mktemp("drawn")
    vision_model(root / "model", "qwen2_5_vl")
    images.write(root, train=4, heldout=1, seed=0)
    shown = sorted((root / "images").glob("*.png"))[0]
    Image.new("RGB", (112, 84)).save(root / "images/large.png")
    answered = {"role": "assistant", "content": "Grey."}
    asked = [{"role": "user", "content": f"{places}What?"} for places in ("<image><image>", "")]
    rows = [
        {"messages": [asked[0], answered], "images": ["images/large.png", f"images/{shown.name}"]},
        {"messages": [asked[1], answered]},
    ]
    with (root / "train.jsonl").open("a") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
    return root


def test_images_of_the_rows_are_those_of_the_set(drawn: Path):
    """A traceback; or a set that is predicted for text of the same length."""
    p = with_flags(load_params(COMMON_PARAMS), [f"model.name={drawn / 'model'}", f"data.source={drawn}/train.jsonl"])
    index = sampled_rows("--data", p).index
    shown = images_of(index.attached)
    assert shown is not None and len(shown.patches) == len(index.lengths) == 14
    assert shown.patches[-1] == 0 and shown.worst[0] == (84, 112)
    config = read_config(drawn / "model", whole=True)
    assumed = most_images(shown, config, drawn / "model", p.data)
    assert (assumed.size, assumed.count) == (Size(height=84, width=112), 2)
    assert assumed.made(config, p.data).row_patches >= shown.patches.max()
    with pytest.raises(UserError, match="--lengths: .* has rows with images.* run `lean-finetune plan --data "):
        row_index(str(drawn / "train.jsonl"), p, truncates=True)


@pytest.mark.slow
def test_a_set_for_rows_with_images_trains_them(drawn: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Packed rows, which stage bucket refuses; a tower that nobody counted."""
    monkeypatch.chdir(tmp_path)
    shutil.copy(ROOT / "params.yaml", tmp_path)
    result = plan("--data", f"{drawn}/train.jsonl", "--model", str(drawn / "model"), "--gpu", "RTX-4090", "--json")
    assert result.exit_code == 0, result.output
    p = load_params(tmp_path / "params.yaml")
    assert (p.bucket.mode, p.train.attention) == ("bucketed", "auto")
    text = plan("--length", "64", "--dry-run", "--json")
    assert text.stderr == "note: rows of text are assumed; --data names rows, whose images are counted\n"
    with_tower, without = (json.loads(one.stdout)["sets"][0]["peak_bytes"] for one in (result, text))
    assert with_tower > without


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (("--data", "rows.jsonl"), "the tokens of the longest row"),
        (("--lengths", "lengths.txt"), "the most that gives 100 optimizer steps"),
    ],
)
def test_auto_steps_are_those_of_all_rows(project: Path, words: tuple[str, str], reason: str):
    """65,536 tokens a step for 200 short rows; or a number that other rows would lead to."""
    (project / "lengths.txt").write_text("".join(f"{20 + n % 100}\n" for n in range(200)))
    auto = ("--gpu", "T4", "--set", "train.tokens_per_step=auto", *words, *FEWER)
    text = " ".join(plan(*auto, "--out", "planned.yaml").output.split())
    found = re.search(rf"tokens a step auto: ([\d,]+), {reason}: about (\d+) steps", text)
    assert found is not None, text
    assert f"optimizer steps about {found[2]}: 2 epochs of" in text and f"as given {found[1]} tokens a step" in text
    assert ("100 or more" in text) == (int(found[2]) < 100)
    assert load_params(project / "planned.yaml").train.tokens_per_step == "auto"
