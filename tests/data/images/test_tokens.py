"""Rows with images as tokens: which tokens stand for an image, what is trained, and what the index says."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from lean_finetune.data.format.format_base import SourceFormat
from lean_finetune.data.shards.shard_files import BlockTokens
from lean_finetune.data.shards.tokenize_block import BlockTokenizer, TokenSettings
from lean_finetune.data.shards.tokenize_job import token_inputs
from lean_finetune.images.columns import ImageColumns
from lean_finetune.images.image_files import image_file
from tests.data.shards.test_tokenize_block import SETTINGS, block_of, both_sides, counted
from tests.small_vision import vision_model

SIDE = 56
"""Pixels of an edge: 16 patches, 4 tokens."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return vision_model(tmp_path_factory.mktemp("vision"))


@pytest.fixture
def images(tmp_path: Path) -> Path:
    """A directory with a wide and a square image."""
    Image.new("RGB", (2 * SIDE, SIDE), "red").save(tmp_path / "wide.png")
    Image.new("RGB", (SIDE, SIDE), "blue").save(tmp_path / "square.jpg")
    return tmp_path


def tokens_of(model: Path, directory: Path, rows: list[Any], **values: Any) -> tuple[BlockTokens, BlockTokenizer]:
    sources = (SourceFormat(format="messages", columns={}, takes_others=True),)
    own = {name: values.pop(name) for name in ("patch", "max_pixels", "min_pixels") if name in values}
    given = {**SETTINGS, "sources": sources, "heldout_fraction": 0.0, **values, "attached": (ImageColumns(**own),)}
    settings = TokenSettings(tokenizer_directory=model, **given)
    worker = BlockTokenizer(settings, store=directory / "work", directories=[directory] * 8)
    return worker(block_of(rows)), worker


def index_columns(tokens: BlockTokens) -> list[list[Any]]:
    return [column.to_pylist() for _, column in tokens.train.carried]


def row(question: str, answer: str, *images: str) -> dict[str, Any]:
    turns = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return {"messages": turns, "images": list(images)}


def texts(tokens: BlockTokens, worker: BlockTokenizer) -> list[tuple[str, str]]:
    """Each row's text, and its trained text."""
    decode = worker.tokenizer._tokenizer.decode
    found = []
    for one in both_sides(tokens):
        ids, spans = one["input_ids"], np.array(one["loss_spans"]).reshape(-1, 2)
        trained = "".join(decode(ids[start:end], skip_special_tokens=False) for start, end in spans.tolist())
        found.append((decode(ids, skip_special_tokens=False), trained))
    return found


def test_an_image_fills_as_many_tokens_as_the_processor_says_and_none_is_trained(model, images):
    rows = [
        row("<image>What is this?", "Red.", "wide.png"),
        row("Is <image> like <image>?", "No.", "square.jpg", "wide.png"),
        row("Say hello.", "Hello."),
    ]
    tokens, worker = tokens_of(model, images, rows)
    shown = [f"<|vision_start|>{'<|image_pad|>' * count}<|vision_end|>" for count in (8, 4)]
    first, second, third = texts(tokens, worker)
    end = "<|im_end|>\n"
    assert first == (
        f"<|im_start|>user\n{shown[0]}What is this?{end}<|im_start|>assistant\nRed.<|im_end|>",
        "Red.<|im_end|>",
    )
    assert second[0].startswith(f"<|im_start|>user\nIs {shown[1]} like {shown[0]}?{end}")
    assert third[1] == "Hello.<|im_end|>"
    sizes, patches, frames = index_columns(tokens)
    assert sizes == [[SIDE, 2 * SIDE], [SIDE, SIDE, SIDE, 2 * SIDE], []] and patches == [32, 48, 0]
    assert frames == [[], [], []]  # Qwen's images are not padded.


def test_the_index_knows_the_size_to_which_images_are_padded(images, tmp_path):
    model = vision_model(tmp_path / "mistral3", "mistral3")
    rows = [row("<image><image>Two?", "Yes.", "wide.png", "square.jpg"), row("Hello.", "Hi.")]
    tokens, _ = tokens_of(model, images, rows)
    assert index_columns(tokens)[1:] == [[8 * 4 + 16, 0], [[SIDE, 112], []]]


@pytest.mark.parametrize(("patch", "patches"), [(None, 64), ((28, 14), 8)])
def test_the_index_counts_the_patches_that_are_pinned(images, tmp_path, patch, patches):
    """The processor of Gemma 3 does not know them, and config.json of a hub model may not be here."""
    model = vision_model(tmp_path / "gemma3", "gemma3")  # Images of 56 x 56 pixels, and patches of 7 x 7.
    tokens, _ = tokens_of(model, images, [row("<image>Hi?", "Red.", "wide.png")], patch=patch)
    assert index_columns(tokens)[1] == [patches]


def test_with_train_on_all_the_text_is_trained_and_images_are_not(model, images):
    tokens, worker = tokens_of(model, images, [row("<image>Hi?", "Red.", "wide.png")], train_on="all")
    [(text, trained)] = texts(tokens, worker)
    assert "<|image_pad|>" in text and trained == text.replace("<|image_pad|>", "")


def test_images_are_stored_once_with_their_own_bytes(model, images):
    rows = [row("<image>One?", "A.", "wide.png"), row("<image>Two?", "B.", "wide.png")]
    tokens, _ = tokens_of(model, images, rows)
    hashes = {one for made in both_sides(tokens) for one in made["images"]}
    [digest] = hashes
    stored = image_file(images / "work/images", digest)
    assert stored.read_bytes() == (images / "wide.png").read_bytes()
    assert [path for path in (images / "work").rglob("*") if path.is_file()] == [stored]


def test_a_row_whose_image_is_cut_by_the_longest_length_is_left_out(model, images):
    rows = [row("<image>" * 2, "Red.", "wide.png", "wide.png"), row("<image>", "Red.", "wide.png")]
    tokens, _ = tokens_of(model, images, rows, max_length=20)
    assert [len(one["images"]) for one in both_sides(tokens)] == [1]
    assert counted(tokens)["cut_image_rows"] == 1


def test_an_image_that_leaves_no_room_for_the_answer_is_named(model, images):
    """`no answer is left`, of a row with an answer: the reader looks for it in the file, and finds it."""
    rows = [row("<image><image>Two?", "Red.", "square.jpg", "wide.png"), row("x " * 30, "Blue."), row("Hi?", "Yes.")]
    tokens, _ = tokens_of(model, images, rows, max_length=16)
    cut, long = (one.reason for one in tokens.tally.rejects)
    assert cut == "image wide.png (112 x 56 pixels, 8 tokens) is cut by, or lies behind, data.max_length=16"
    assert long == "no answer is left within data.max_length=16"
    assert (counted(tokens)["cut_image_rows"], counted(tokens)["no_answer_rows"]) == (1, 1)


def test_the_characters_of_an_image_token_stand_for_no_image(model, images):
    tokens, worker = tokens_of(
        model, images, [row("What is <|image_pad|>?", "A token."), row("<image>", "R.", "wide.png")]
    )
    ids = [one["input_ids"] for one in both_sides(tokens)]
    pad = worker.tokenizer.id_of("<|image_pad|>")
    assert [one.count(pad) for one in ids] == [0, 8]
    assert "<|image_pad|>" in texts(tokens, worker)[0][0]


def test_a_template_that_shows_no_image_is_refused_with_the_remedy(model, images):
    template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.content is string %}{{ m.content }}{% endif %}"
        "<|im_end|>\n{% endfor %}"
    )
    tokens, _ = tokens_of(model, images, [row("<image>x", "R.", "wide.png")], chat_template=template)
    [reject] = tokens.tally.rejects
    assert "shows 0 of the row's 1 images; set data.chat_template to one that writes <|image_pad|>" in reject.reason


@pytest.mark.parametrize(
    ("question", "names", "message"),
    [
        ("<image>", [], "1 place"),
        ("<image>", ["wide.png", "square.jpg"], "1 place"),
        ("<image>", ["gone.png"], "gone.png cannot be read"),
        ("<image>", ["https://example.org/a.png"], "is a URL, and images are not fetched"),
        ("<image>", ["../wide.png"], "is outside of"),
        ("<image>", ["text.png"], "of no format that is decoded"),
        ("<image>", ["thin.png"], "the image processor refuses 3000 x 1 pixels"),
    ],
)
def test_a_row_with_an_unusable_image_is_counted_with_its_line(model, images, question, names, message):
    (images / "text.png").write_text("no image")
    Image.new("RGB", (3000, 1)).save(images / "thin.png")
    tokens, _ = tokens_of(model, images, [row(question, "A.", *names)])
    [reject] = tokens.tally.rejects
    assert (reject.line, counted(tokens)["bad_rows"]) == (11, 1) and message in reject.reason, reject


def test_limits_of_pixels_change_the_number_of_tokens(model, images):
    one = [row("<image>", "R.", "wide.png")]
    fewer, more = (
        tokens_of(model, images, one, **{name: value})[0]
        for name, value in (("max_pixels", 3200), ("min_pixels", 25000))
    )
    counts = [index_columns(made)[1][0] for made in (fewer, more)]
    assert counts == [8, 200] or counts[0] < 32 < counts[1], counts


def test_rows_with_images_are_refused_for_a_model_of_text(tiny_dir, images):
    settings = TokenSettings(
        tokenizer_directory=tiny_dir, **{**SETTINGS, "sources": (SourceFormat(format="messages", columns={}),)}
    )
    tokens = BlockTokenizer(settings)(block_of([json.dumps(row("<image>", "R.", "wide.png"))]))
    [reject] = tokens.tally.rejects
    assert "'images' holds images, video or audio; only text can be trained" in reject.reason


def test_tokens_of_images_depend_on_what_reads_them(model):
    """Unfinished work of another Pillow, whose pixels or sizes differ, would be taken up."""
    settings = TokenSettings(tokenizer_directory=model, **SETTINGS)
    lock: dict[str, Any] = {"files": {}}
    text, images = (
        token_inputs({}, lock, replace(settings, attached=attached), None)["libraries"]
        for attached in ((), (ImageColumns(),))
    )
    assert "pillow" not in text and "pillow" in images and "transformers" in images
