"""Rows with images from their file to tokens: the same tokens in every form, and faults with file and line."""

import base64
import hashlib
import json
import shutil
from io import BytesIO
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from stages.tokenize import main as tokenize
from tests.data.common import read_tokens, spans_of
from tests.data.images.test_image_files import with_broken_exif
from tests.small_vision import tokenizer, vision_model
from tests.workspace import error, invoke, write_rows

QUESTION, ANSWER = "What is it?", {"role": "assistant", "content": "A red field."}
NO_HELDOUT = {"data__heldout_fraction": 0, "train__heldout_every_steps": None, "evaluate__generate_rows": 0}
WIDTH, HEIGHT, TOKENS = 112, 84, 12
"""An image of 8 × 6 patches of 14 pixels, of which the model merges 2 × 2 to a token."""


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    return str(vision_model(tmp_path_factory.mktemp("model") / "qwen"))


def png(colour: str = "red", width: int = WIDTH, height: int = HEIGHT) -> bytes:
    stream = BytesIO()
    Image.new("RGB", (width, height), colour).save(stream, "PNG")
    return stream.getvalue()


def drawn(path: Path, colour: str = "red", **size: int) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(png(colour, **size))
    return path


def row(content: Any, **others: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content}, ANSWER], **others}


def parts(image: dict[str, Any]) -> list[dict[str, Any]]:
    return [image, {"type": "text", "text": QUESTION}]


def rows_of_tokens() -> list[dict[str, Any]]:
    return read_tokens(Path("data/tokens/train"))


def test_every_form_of_a_row_gives_the_same_tokens_and_trains_no_part_of_an_image(run, model, tmp_path):
    """Loss on the tokens of an image teaches nothing; a form that is read otherwise trains another prompt."""
    drawn(tmp_path / "rows/images/a.png")
    base64_text = base64.b64encode(png()).decode()
    uri = f"data:image/png;base64,{base64_text}"
    text = f"<image>{QUESTION}"
    rows = [
        row(text, images=["images/a.png"]),
        row(text, image=str(tmp_path / "rows/images/a.png")),
        row(text, images=[uri]),
        row(QUESTION, images=["images/a.png"]),
        row(parts({"type": "image"}), images=["images/a.png"]),
        row(parts({"type": "image", "image": "images/a.png"})),
        row(parts({"type": "image", "base64": base64_text})),
        row(parts({"type": "image_url", "image_url": {"url": uri}})),
        row(parts({"type": "image_url", "value": "images/a.png"})),
        row(parts({"type": "image", "index": 0, "text": None}), images=["images/a.png"]),
        row(f"<img>images/a.png</img>{QUESTION}"),
        row(f"<|image_1|>{QUESTION}", images=["images/a.png"]),
    ]
    sources: list[dict[str, Any]] = [{"source": str(write_rows(tmp_path / "rows/messages.jsonl", rows))}]
    turns = [{"from": "human", "value": text}, {"from": "gpt", "value": ANSWER["content"]}]
    tagged = {"query": f"<img>images/a.png</img>{QUESTION}", "response": ANSWER["content"]}
    others = {
        "query": tagged,  # The word image is nowhere in the file.
        "sharegpt": {"conversations": turns, "images": ["images/a.png"]},
        "alpaca": {"instruction": text, "output": ANSWER["content"], "images": ["images/a.png"]},
        "prompt": {"prompt": row(text)["messages"][:1], "completion": [ANSWER], "images": ["images/a.png"]},
    }
    for name, one in others.items():
        sources.append({"source": str(write_rows(tmp_path / f"rows/{name}.jsonl", [one]))})
    pq.write_table(
        pa.Table.from_pylist([row(text, images=[{"bytes": png(), "path": "was.png"}])]), tmp_path / "rows/a.parquet"
    )
    (tmp_path / "rows/a.csv").write_text(f'instruction,output,photo\n{text},{ANSWER["content"]},"[""images/a.png""]"\n')
    sources.append({"source": str(tmp_path / "rows/a.parquet")})
    sources.append({"source": str(tmp_path / "rows/a.csv"), "columns": {"images": "photo"}})
    result = run(sources, model__name=model, data__drop_duplicates=False, **NO_HELDOUT)
    assert result.exit_code == 0, result.output
    found = rows_of_tokens()
    assert len(found) == 18
    words = tokenizer()
    fill = words.convert_tokens_to_ids("<|image_pad|>")
    for one in found:
        assert one["input_ids"] == found[0]["input_ids"] and one["images"] == [hashlib.sha256(png()).digest()]
        [(start, end)] = spans_of(one)
        assert words.decode(one["input_ids"][start:end]) == "A red field.<|im_end|>"
        assert one["input_ids"].count(fill) == one["input_ids"][:start].count(fill) == TOKENS
    pins = [one.get("images", {}).get("files") for one in json.loads(Path("locks/data.json").read_text())["sources"]]
    assert pins == [2, 1, 1, 1, 1, None, 1]  # One file by its relative and its absolute path; bytes within rows.


def test_text_rows_beside_rows_with_images_have_the_tokens_that_they_have_alone(run, model, tmp_path):
    drawn(tmp_path / "a.png")
    text = [row(f"Question {number}?") for number in range(4)]
    alone = write_rows(tmp_path / "alone.jsonl", text)
    mixed = write_rows(tmp_path / "mixed.jsonl", [text[0], row("<image>Q", image="a.png"), *text[1:]])
    assert run(alone, model__name=model, **NO_HELDOUT).exit_code == 0
    wanted = [one["input_ids"] for one in rows_of_tokens()]
    assert run(mixed, model__name=model, **NO_HELDOUT).exit_code == 0
    found = rows_of_tokens()
    assert [one["input_ids"] for one in found if not one["images"]] == wanted and len(found) == 5


def test_one_question_about_two_images_is_no_duplicate(run, model, tmp_path):
    for name, colour in (("a", "red"), ("b", "blue"), ("copy", "red")):
        drawn(tmp_path / f"{name}.png", colour)
    rows = [row(f"<image>{QUESTION}", image=f"{name}.png") for name in ("a", "b", "copy")]
    assert (
        run(
            write_rows(tmp_path / "rows.jsonl", rows), model__name=model, data__drop_duplicates=True, **NO_HELDOUT
        ).exit_code
        == 0
    )
    figures = json.loads(Path("data/tokens/figures.json").read_text())
    assert (figures["train_rows"], figures["duplicate_rows"]) == (2, 1)


FAULTS: dict[str, tuple[dict[str, Any], str]] = {
    "missing": (row("<image>Q", image="gone.png"), "gone.png cannot be read (No such file or directory)"),
    "outside": (row("<image>Q", image="../secret.png"), "image ../secret.png is outside of "),
    "text": (row("<image>Q", image="text.png"), "image text.png is damaged, or of no format that is decoded"),
    "truncated": (row("<image>Q", image="half.png"), "image half.png is damaged or truncated"),
    "bomb": (row("<image>Q", image="large.png"), "image large.png has more than 89,478,485 pixels"),
    "thin": (row("<image>Q", image="thin.png"), "image thin.png: the image processor refuses"),
    "url": (row("<image>Q", image="https://a.b/c.png"), "images are not fetched"),
    "number": (row("<image><image>Q", image="a.png"), "the row has 2 places for images"),
    "video": (row("Q", video="a.mp4"), "'video' holds images, video or audio; only text and images can be trained"),
}


def test_faults_name_file_and_line_and_are_skipped_on_request(run, model, tmp_path):
    """`PIL.UnidentifiedImageError: <_io.BytesIO>` in a worker, an hour into the run."""
    directory = tmp_path / "rows"
    drawn(directory / "a.png")
    drawn(tmp_path / "secret.png")
    drawn(directory / "thin.png", width=3000, height=2)
    (directory / "text.png").write_text("no image")
    (directory / "half.png").write_bytes(png()[:100])
    Image.new("1", (9_500, 9_500)).save(directory / "large.png")
    path = write_rows(directory / "rows.jsonl", [row("<image>Q", image="a.png"), *(bad for bad, _ in FAULTS.values())])
    message = error(run(path, model__name=model, **NO_HELDOUT))
    assert message.startswith(f"{path}:2: ") and FAULTS["missing"][1] in message
    result = run(path, model__name=model, data__on_bad_row="skip", **NO_HELDOUT)
    assert result.exit_code == 0, result.output
    rejects = [json.loads(line) for line in Path("data/tokens/rejects.jsonl").read_text().splitlines()]
    assert [one["line"] for one in rejects] == list(range(2, 2 + len(FAULTS)))
    for one, (_, says) in zip(rejects, FAULTS.values(), strict=True):
        assert says in one["reason"]
    assert len(rows_of_tokens()) == 1


@pytest.mark.filterwarnings("ignore::UserWarning")  # Pillow's, of which pytest makes errors in this process.
def test_images_with_damaged_exif_data_are_counted(run, model, tmp_path):
    """Pillow's warnings for each, or images that may lie on their side without a word."""
    drawn(tmp_path / "rows/a.png")
    (tmp_path / "rows/b.jpg").write_bytes(with_broken_exif())
    path = write_rows(tmp_path / "rows/rows.jsonl", [row("<image>Q", image=name) for name in ("a.png", "b.jpg")])
    result = run(path, model__name=model, **NO_HELDOUT)
    assert f"note: 1 of 2 rows (50.0 %) have an image with damaged EXIF data (first at {path}:2)" in result.stderr


def test_an_image_that_changed_since_it_was_pinned_is_refused(run, model, tmp_path):
    """Tokens of one image under the hash of another, which DVC would restore when the first one is back."""
    path = write_rows(tmp_path / "rows.jsonl", [row("<image>Q", image="a.png")])
    drawn(tmp_path / "a.png")
    assert run(path, model__name=model, **NO_HELDOUT).exit_code == 0
    shutil.rmtree("data/tokens")
    drawn(tmp_path / "a.png", "blue")
    assert error(invoke(tokenize)).startswith(f"data.source: images that rows of {path} name changed since they were")
    assert not Path("data/tokens").exists() and not list(Path("scratch/tokenize").glob("*/*"))
    drawn(tmp_path / "a.png")
    assert invoke(tokenize).exit_code == 0


def test_without_their_column_a_place_for_an_image_is_text(run, model, tmp_path):
    """Rows about HTML, of which a multimodal model could not learn."""
    rows = [row("What is <image> in SVG?"), row("Q", images=["gone.png"])]
    path = write_rows(tmp_path / "rows.jsonl", rows)
    message = error(run(path, model__name=model, **NO_HELDOUT))
    assert (
        message.startswith(f"{path}:1: ") and "where <image> is text, name 'images' in data.ignore_columns" in message
    )
    result = run(path, model__name=model, data__ignore_columns=["images"], **NO_HELDOUT)
    assert result.exit_code == 0, result.output
    found = rows_of_tokens()
    assert len(found) == 2 and "images" not in found[0]
    assert "<image>" in tokenizer().decode(found[0]["input_ids"])


def test_heldout_images_need_some_in_training(run, model, tmp_path):
    """An AssertionError after the last step of training, whose model has no tower."""
    drawn(tmp_path / "a.png")
    train = write_rows(tmp_path / "train.jsonl", [row("Q", images=[])])
    heldout = write_rows(tmp_path / "heldout.jsonl", [row("<image>Q", image="a.png"), row("R")])
    values = {"model__name": model, "data__heldout_source": str(heldout), "data__heldout_fraction": 0.0}
    message = error(run(train, **values))
    assert message.startswith("data.source: has no training row with an image") and "and 1 held-out row with" in message
    assert not Path("data/tokens").exists()
    write_rows(tmp_path / "train.jsonl", [row("<image>Q?", image="a.png")])
    assert run(train, **values).exit_code == 0


def test_limits_of_images_without_any_are_refused(run, model, tmp_path):
    """A limit that changes nothing, of a run whose images were left out by mistake."""
    path = write_rows(tmp_path / "rows.jsonl", [row("Q"), row("R")])
    for name in ("image_max_pixels", "image_min_pixels"):
        message = error(run(path, model__name=model, **{f"data__{name}": 50000}, **NO_HELDOUT))
        assert message == f"data.{name}: has an effect only on rows with images; got 50000; leave it blank"


def test_pairs_with_images_are_refused_by_the_objective(run, model, tmp_path):
    drawn(tmp_path / "a.png")
    pair = {"prompt": row("<image>Q")["messages"][:1], "chosen": [ANSWER], "rejected": [{**ANSWER, "content": "B"}]}
    path = write_rows(tmp_path / "rows.jsonl", [pair | {"images": ["a.png"]}])
    message = error(run(path, model__name=model, train__objective="dpo", **NO_HELDOUT))
    assert message == (
        f"{path}:1: train.objective trains preference pairs, which cannot have images; set train.objective=sft, or "
        "remove the row"
    )


def test_a_model_of_text_refuses_images(run, tmp_path):
    path = write_rows(tmp_path / "rows.jsonl", [row("<image>Q", image="a.png")])
    assert "only text can be trained" in error(run(path, **NO_HELDOUT))
