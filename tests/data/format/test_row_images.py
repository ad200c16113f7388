"""What rows say about images, in each form that other tools write, and where the images stand in the text."""

import base64
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from lean_finetune.core.errors import RowFault, UserError
from lean_finetune.data.format.format_base import Conversation, SourceFormat, check_columns, detect_format, is_heldout
from lean_finetune.data.format.given_images import IMAGE, GivenImage
from lean_finetune.data.format.row_formats import parse_row
from lean_finetune.data.format.unread_columns import unread_columns
from lean_finetune.islands.objectives.registry import KINDS
from lean_finetune.objectives.row_kind import RowKind
from lean_finetune.preferences import pair_formats  # noqa: F401 - registers its formats
from tests.data.common import ANSWER, messages, turns
from tests.data.read.common import arrow, parquet, values_of
from tests.workspace import write_rows

CONTENT = b"\x89PNG content"
BASE64 = base64.b64encode(CONTENT).decode()
URI = f"data:image/png;base64,{BASE64}"
INSIDE = GivenImage(path=None, data=CONTENT)
TEXT = {"type": "text", "text": "What is it?"}


def beside(path: str) -> GivenImage:
    return GivenImage(path=path, data=None)


def source_of(row: dict[str, Any], **columns: str) -> SourceFormat:
    return SourceFormat(format=detect_format(row, columns)[0], columns=columns, takes_others=True)


def read(row: dict[str, Any], **columns: str) -> Conversation:
    source = source_of(row, **columns)
    assert unread_columns(row, source) == []
    example = parse_row(row, source)
    assert isinstance(example, Conversation) and example.other_parts == ()
    assert sum(message["content"].count(IMAGE) for message in example.messages) == len(example.others)
    return example


def refusal(row: dict[str, Any], source: SourceFormat | None = None) -> str:
    source = source or source_of(row)
    with pytest.raises(RowFault) as fault:
        unread_columns(row, source)
        parse_row(row, source)
    assert "\n" not in str(fault.value)
    return str(fault.value)


def asked(*content: Any, **others: Any) -> dict[str, Any]:
    """A row with one question; parts, or one text."""
    one = content[0] if len(content) == 1 and isinstance(content[0], str) else list(content)
    return messages({"role": "user", "content": one}, ANSWER) | others


BY_COLUMN: dict[str, dict[str, Any]] = {
    "messages": asked("<image>What <image>?", images=["a.png", "b.png"]),
    "sharegpt": turns(("human", "<image>What <image>?"), ("gpt", "A")) | {"images": ["a.png", "b.png"]},
    "alpaca": {"instruction": "<image>What <image>?", "output": "A", "images": ["a.png", "b.png"]},
    "query_response": {"query": "<image>What <image>?", "response": "A", "images": ["a.png", "b.png"]},
    "prompt_completion": {
        "prompt": [{"role": "user", "content": "<image>What <image>?"}],
        "completion": [ANSWER],
        "images": ["a.png", "b.png"],
    },
    "conversation": {
        "conversation": [{"human": "<image>What <image>?", "assistant": "A"}],
        "images": ["a.png", "b.png"],
    },
    "csv": {"messages": json.dumps(asked("<image>What <image>?")["messages"]), "images": '["a.png", "b.png"]'},
    "bare parts": asked(
        {"type": "image"},
        {"type": "text", "text": "What "},
        {"type": "image"},
        {"type": "text", "text": "?"},
        images=["a.png", "b.png"],
    ),
    "both": asked(
        {"type": "text", "text": "<image>What "},
        {"type": "image"},
        {"type": "text", "text": "?"},
        images=["a.png", "b.png"],
    ),
}


@pytest.mark.parametrize("name", BY_COLUMN)
def test_the_images_of_a_column_stand_where_the_text_says(name: str):
    example = read(BY_COLUMN[name])
    assert example.messages == [
        {"role": "user", "content": f"{IMAGE}What {IMAGE}?"},
        {"role": "assistant", "content": "A"},
    ]
    assert example.others == (beside("a.png"), beside("b.png"))


VALUES: dict[str, tuple[Any, GivenImage]] = {
    "object as text of Python": ("{'bytes': None, 'path': 'a.png'}", beside("a.png")),
    "object as JSON text": ('{"path": "a.png"}', beside("a.png")),
    "path": ("dir/a.png", beside("dir/a.png")),
    "absolute": ("/data/a.png", beside("/data/a.png")),
    "path with brackets": ("[1].png", beside("[1].png")),
    "bytes": (CONTENT, INSIDE),
    "datasets": ({"bytes": CONTENT, "path": "a.png"}, GivenImage(path="a.png", data=CONTENT)),
    "datasets without path": ({"bytes": CONTENT, "path": None}, INSIDE),
    "datasets without bytes": ({"bytes": None, "path": "a.png"}, beside("a.png")),
    "uri": (URI, INSIDE),
    "file": ("file:///data/a%20b.png", beside("/data/a b.png")),
    "file of localhost": ("file://localhost/data/a.png", beside("/data/a.png")),
}


@pytest.mark.parametrize("name", VALUES)
@pytest.mark.parametrize("column", ["images", "image", "photo"])
def test_a_column_has_paths_bytes_or_both(name: str, column: str):
    value, image = VALUES[name]
    columns = {"images": "photo"} if column == "photo" else {}
    for given in (value, *([] if name.startswith("object") else [[value]])):
        example = read(asked("<image>Q", **{column: given}), **columns)
        assert example.others == (image,) and example.messages[0]["content"] == f"{IMAGE}Q"


PARTS: dict[str, tuple[dict[str, Any], GivenImage]] = {
    "path": ({"type": "image", "image": "a.png"}, beside("a.png")),
    "bytes": ({"type": "image", "image": CONTENT}, INSIDE),
    "unsloth": ({"type": "image", "image": {"bytes": CONTENT, "path": None}}, INSIDE),
    "transformers path": ({"type": "image", "path": "a.png"}, beside("a.png")),
    "transformers url": ({"type": "image", "url": "file:///a.png"}, beside("/a.png")),
    "transformers base64": ({"type": "image", "base64": BASE64, "mime_type": "image/png"}, INSIDE),
    "base64 in lines": ({"type": "image", "base64": f"{BASE64[:8]}\r\n{BASE64[8:]}\n"}, INSIDE),
    "base64 as uri": ({"type": "image", "base64": URI}, INSIDE),
    "openai": ({"type": "image_url", "image_url": {"url": URI, "detail": "high"}}, INSIDE),
    "openai text": ({"type": "image_url", "image_url": URI}, INSIDE),
    "openai path": ({"type": "image_url", "image_url": {"url": "a.png"}}, beside("a.png")),
    "responses": ({"type": "input_image", "image_url": URI, "detail": "auto"}, INSIDE),
    "nulls": ({"type": "image", "text": None, "image": "a.png", "path": None}, beside("a.png")),
}


@pytest.mark.parametrize("name", PARTS)
def test_a_content_part_has_its_own_image(name: str):
    part, image = PARTS[name]
    example = read(asked(TEXT, part))
    assert example.others == (image,) and example.messages[0]["content"] == f"What is it?{IMAGE}"


def test_own_images_and_those_of_the_column_keep_their_order():
    row = asked(
        {"type": "image", "image": "own.png"}, {"type": "image"}, {"type": "text", "text": "<image>"}, images=["a", "b"]
    )
    assert [one.path for one in read(row).others] == ["own.png", "a", "b"]


def test_images_without_a_place_stand_in_front_of_the_first_question():
    """As ms-swift does; LLaMA-Factory refuses such rows."""
    row = messages({"role": "system", "content": "S"}, {"role": "user", "content": "Q"}, ANSWER) | {
        "images": ["a", "b"]
    }
    assert [one["content"] for one in read(row).messages] == ["S", f"{IMAGE}{IMAGE}Q", "A"]
    assert "no question to put them in front of" in refusal(messages(ANSWER) | {"images": ["a"]})


def test_images_of_system_text_history_and_tool_results_are_read_in_the_order_of_the_text():
    row = {
        "system": "<image>S",
        "history": [["<image>1", "one"]],
        "instruction": "<image>2",
        "output": "two",
        "images": ["s", "1", "2"],
    }
    assert [message["content"] for message in read(row).messages] == [
        f"{IMAGE}S",
        f"{IMAGE}1",
        "one",
        f"{IMAGE}2",
        "two",
    ]
    tool = {"role": "tool", "content": [{"type": "image", "image": "t.png"}, TEXT]}
    call = {"role": "assistant", "content": "", "tool_calls": [{"name": "look", "arguments": {}}]}
    example = read(messages({"role": "user", "content": "Q"}, call, tool, ANSWER))
    assert example.messages[2]["content"] == f"{IMAGE}What is it?" and example.others == (beside("t.png"),)


@pytest.mark.parametrize("name", ["rows.arrow", "rows.parquet"])
def test_rows_that_datasets_writes_are_read_from_columns_of_structs(name: str, tmp_path: Path):
    """Arrow gives every struct all fields, null where the row had none."""
    rows = [
        asked({"type": "image", "text": None}, TEXT, images=[{"bytes": CONTENT, "path": None}]),
        asked({"type": "image", "text": None}, TEXT, images=[{"bytes": None, "path": "a.png"}]),
        asked({"type": "text", "text": "no image"}, images=[]),
        asked({"type": "text", "text": "no image"}, images=None),
    ]
    part = pa.struct({"type": pa.string(), "text": pa.string()})
    kinds = pa.schema(
        {
            "messages": pa.list_(pa.struct({"role": pa.string(), "content": pa.list_(part)})),
            "images": pa.list_(pa.struct({"bytes": pa.binary(), "path": pa.string()})),
        }
    )
    for row in rows:
        row["messages"][1] = {"role": "assistant", "content": [{"type": "text", "text": "A"}]}
    table = pa.Table.from_pylist(rows, schema=kinds)
    (tmp_path / name).write_bytes(parquet(table) if name.endswith("parquet") else arrow(table, is_file=True))
    assert [read(row).others for row in values_of(tmp_path / name)] == [(INSIDE,), (beside("a.png"),), (), ()]


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "fewer": (
        asked("<image><image>Q", images=["a"]),
        "content part without one) and 1 image in 'images'; give one image for each place",
    ),
    "more": (asked("<image>Q", images=["a", "b"]), "the row has 1 place for images"),
    "no column": (asked("<image>Q"), "without one) and 0 images"),
    "empty column": (asked("<image>Q", images=[]), "and 0 images in 'images'"),
    "bare part": (asked({"type": "image"}, TEXT), "and 0 images in 'images'"),
    "column of own": (
        asked({"type": "image", "image": "a"}, TEXT, images=["a"]),
        "the row has 0 places for images (<image>, or a",
    ),
    "both columns": (
        asked("<image>Q", images=["a"], image="a"),
        "'images' and 'image' both have images; keep one of them",
    ),
    "answer": (
        messages({"role": "user", "content": "Q"}, {"role": "assistant", "content": "<image>"}) | {"images": ["a"]},
        "message 2 is an answer with an image",
    ),
    "answer of parts": (
        messages({"role": "user", "content": "Q"}, {"role": "assistant", "content": [{"type": "image", "image": "a"}]}),
        "message 2 is an answer with an image",
    ),
    "http": (
        asked({"type": "image_url", "image_url": {"url": "https://a.b/c.png"}}),
        'messages 1 is a URL, and images are not fetched: "https://a.b/c.png"; download it and name the file',
    ),
    "http in column": (asked("<image>Q", images=["a", "http://a.b/c.png"]), "'images' 2 is a URL"),
    "s3": (asked("Q", image="s3://a/b.png"), "'image' is a URL"),
    "other machine": (asked("Q", image="file://server/a.png"), "must name a file of this machine as file:///path"),
    "broken file uri": (asked("Q", image="file://[a/b.png"), "must name a file of this machine as file:///path"),
    "relative file uri": (asked("Q", image="file:a.png"), "must name a file of this machine as file:///path"),
    "uri without base64": (asked("Q", image="data:image/svg+xml,<svg/>"), "must be a data: URI with base64"),
    "bad base64": (asked({"type": "image", "base64": "!!!"}), "messages 1 is not base64"),
    "base64 as path": (
        asked("Q", image=BASE64 * 1000),
        "'image' is too long for a path (16,000 characters); write base64 as data:image/png;base64,...",
    ),
    "number": (asked("Q", images=[1]), "'images' 1 must be an image's path or bytes, got 1; change it"),
    "null": (asked("Q", images=["a", None]), "'images' 2 must be an image's path or bytes, got null"),
    "bytes as text of Python": (
        asked("<image>Q", image="{'bytes': b'\\x89PNG', 'path': 'a.png'}"),
        "'image' is text of a list or an object that cannot be read: \"{'bytes': b'",
    ),
    "list of bytes as text": (
        asked("<image>Q", images="[{'bytes': b'a', 'path': None}]"),
        "'images' is text of a list",
    ),
    "list as text of numpy": (asked("<image>Q", images="['a.png' 'b.png']"), "'images' is text of a list or an"),
    "nested list": (asked("Q", images=[["a"]]), "'images' 1 must be an image's path or bytes"),
    "text bytes": (
        asked("Q", images=[{"bytes": "abc"}]),
        "'bytes' of an image must be bytes, got \"abc\"; write 'base64' or 'path'",
    ),
    "two values": (
        asked({"type": "image", "url": "a", "path": "b"}),
        "messages 1 has 'url' and 'path' in an image; keep one of them",
    ),
    "own limit": (
        asked({"type": "image", "image": "a", "max_pixels": 5}),
        "messages 1 has 'max_pixels' in an image, which is not read; remove it",
    ),
    "anthropic": (
        asked({"type": "image", "source": {"type": "base64", "data": BASE64}}),
        "messages 1 has 'source' in an image, which is not read",
    ),
    "mark": (asked(f"Q{IMAGE}", images=["a"]), "the row has the character U+FDD6"),
    "mark of text": (asked(f"Q{IMAGE}"), "the row has the character U+FDD6"),
    "mark in tools": (asked("Q", tools=[{"name": f"a{IMAGE}"}]), "the row has the character U+FDD6"),
    "mark in json text": (
        {"messages": '[{"role": "user", "content": "\\ufdd6"}, {"role": "assistant", "content": "A"}]'},
        "the row has the character U+FDD6",
    ),
    "plain text": (
        {"text": "<image>Q", "images": ["a"]},
        "a row of plain text cannot have images; write it as a conversation",
    ),
    "plain pair": ({"prompt": "<image>Q", "completion": "A", "image": "a"}, "a row of plain text cannot have images"),
    "video": (
        asked("Q", videos=["a.mp4"]),
        "'videos' holds images, video or audio; only text and images can be trained",
    ),
    "audio part": (asked({"type": "audio", "audio": "a.wav"}), "messages 1 has a content part that is not text"),
    "video of a message": (
        messages({"role": "user", "content": "Q", "video": "a.mp4"}, ANSWER),
        "messages 1: 'video' holds images, video or audio",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_row_that_is_not_clear_is_refused_in_one_line(name: str):
    row, says = REFUSED[name]
    assert says in refusal(row)


def test_without_images_nothing_changes():
    row = asked("Q < image > \ufdd5", images=[], image=None)
    source = source_of(row)
    assert parse_row(row, source) == parse_row(row, replace(source, takes_others=False))


def test_a_model_of_text_refuses_every_form():
    """Trained without its image, a row teaches to guess."""
    for row in (*BY_COLUMN.values(), *(asked(part) for part, _ in PARTS.values()), asked("Q", image="a.png")):
        source = replace(source_of(row), takes_others=False)
        assert "only text can be trained" in refusal(row, source)
    row = asked("Q", photo="a.png")
    assert "'photo' holds images, video or audio" in refusal(
        row, replace(source_of(row, images="photo"), takes_others=False)
    )
    text = asked(f"<image> {IMAGE} is text here")
    assert parse_row(text, replace(source_of(text), takes_others=False)) == Conversation(
        messages=text["messages"], tools=None
    )


@pytest.mark.parametrize("kind", [KINDS["pair"], KINDS["labelled"]])
def test_pairs_and_labelled_rows_with_images_are_refused(kind: RowKind):
    if kind is KINDS["pair"]:
        plain = {
            "prompt": [{"role": "user", "content": "Q"}],
            "chosen": [ANSWER],
            "rejected": [{**ANSWER, "content": "B"}],
        }
        source = SourceFormat(format="preference", columns={}, kind=kind, takes_others=True)
        parts = {**plain, "prompt": [{"role": "user", "content": [{"type": "image", "image": "a"}]}]}
    else:
        plain = asked("Q", label=True)
        source = SourceFormat(format="messages", columns={}, kind=kind, takes_others=True)
        parts = asked({"type": "image", "image": "a"}, label=True)
    parse_row(plain, source)
    for row in (parts, {**plain, "images": ["a"]}):
        assert "which cannot have images; set train.objective=sft, or remove the row" in refusal(row, source)


def test_rows_with_one_question_about_different_images_are_different_prompts():
    """Else held-out rows of one question, 'What is it?', would all fall on one side."""
    rows = [asked("<image>What is it?", image=path) for path in ("a.png", "b.png")]
    rows += [asked("<image>What is it?", image={"bytes": data, "path": "a.png"}) for data in (b"1", b"2")]
    keys = [read(row).prompt_key() for row in rows]
    assert len(set(keys)) == 4
    assert read(rows[2]).prompt_key() == read(asked("<image>What is it?", image=b"1")).prompt_key()
    assert {is_heldout(read(asked("<image>Q", image=f"{k}.png")), 0.5, 0) for k in range(20)} == {False, True}
    later = [{"role": "user", "content": "<image>And this?"}, ANSWER]
    longer = [messages({"role": "user", "content": "<image>Q"}, ANSWER, *later) | {"images": ["a", b]} for b in "bc"]
    assert read(longer[0]).prompt_key() == read(longer[1]).prompt_key()  # The first question decides, as without.


def test_the_column_of_images_may_have_any_name():
    check_columns({"images": "photo"}, "messages")
    check_columns({"images": "photo"}, "auto")
    with pytest.raises(UserError, match=r"data\.columns: rows of data\.format preference have no key \"images\""):
        check_columns({"images": "photo"}, "preference", KINDS["pair"])
    row = asked("<image>Q", pic="a.png")
    assert read(row, images="pic").others == (beside("a.png"),)


def test_rows_of_json_lines_name_images(tmp_path: Path):
    path = write_rows(tmp_path / "rows.jsonl", [asked("<image>Q", images=["a.png"]), asked("Q")])
    assert [read(row).others for row in values_of(path)] == [(beside("a.png"),), ()]
