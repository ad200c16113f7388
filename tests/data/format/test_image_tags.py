"""Tags and columns by which other tools name images: an image where it is clear which, else refused, never text."""

from typing import Any

import pytest

from lean_finetune.core.errors import RowFault
from lean_finetune.data.format.format_base import Conversation, SourceFormat, detect_format
from lean_finetune.data.format.given_images import IMAGE
from lean_finetune.data.format.row_formats import parse_row
from lean_finetune.data.format.unread_columns import unread_columns
from lean_finetune.islands.objectives.registry import KINDS
from lean_finetune.objectives.row_kind import RowKind
from lean_finetune.preferences import pair_formats  # noqa: F401 - registers its formats

TEXT = {"type": "text", "text": "What?"}


def read(
    row: dict[str, Any], kind: RowKind = RowKind.ANSWER, *, takes_images: bool = True, **columns: str
) -> Conversation:
    source = SourceFormat(
        format=detect_format(row, columns, kind)[0], columns=columns, kind=kind, takes_others=takes_images
    )
    unread_columns(row, source)
    example = parse_row(row, source)
    assert isinstance(example, Conversation)
    return example


def asked(content: Any, answer: str = "A", **others: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content}, {"role": "assistant", "content": answer}], **others}


READ: dict[str, tuple[dict[str, Any], str, list[str]]] = {
    "path": (asked("<img>a.png</img>What?"), f"{IMAGE}What?", ["a.png"]),
    "paths of Qwen-VL": (
        asked("Picture 1: <img>d/a b.png</img>\nPicture 2: <img> b.jpg </img>\nWhat?"),
        f"Picture 1: {IMAGE}\nPicture 2: {IMAGE}\nWhat?",
        ["d/a b.png", "b.jpg"],
    ),
    "path beside a place": (
        asked("<img>a.png</img><image>?", images=["b.png"]),
        f"{IMAGE}{IMAGE}?",
        ["a.png", "b.png"],
    ),
    "numbered": (asked("<image_1> or <image_2>?", images=["a", "b"]), f"{IMAGE} or {IMAGE}?", ["a", "b"]),
    "numbered with a blank (MMMU)": (asked("<image 1>?", images=["a"]), f"{IMAGE}?", ["a"]),
    "numbered (Phi)": (asked("<|image_1|>\n?", images=["a"]), f"{IMAGE}\n?", ["a"]),
    "numbered from 0": (asked("<image0><image1>?", images=["a", "b"]), f"{IMAGE}{IMAGE}?", ["a", "b"]),
    "other order": (asked("<image-2> or <image-1>?", images=["a", "b"]), f"{IMAGE} or {IMAGE}?", ["b", "a"]),
    "ImageHere": (asked("<ImageHere>?", images=["a"]), f"{IMAGE}?", ["a"]),
    "MiniGPT": (asked("<Img><ImageHere></Img> ?", images=["a"]), f"{IMAGE} ?", ["a"]),
    "[IMG]": (asked("[IMG] or [IMG]?", images=["a", "b"]), f"{IMAGE} or {IMAGE}?", ["a", "b"]),
    "rendered by Qwen": (
        asked("<|vision_start|><|image_pad|><|vision_end|>?", images=["a"]),
        f"{IMAGE}?",
        ["a"],
    ),
    "rendered by GLM": (asked("<|begin_of_image|><|image|><|end_of_image|>?", images=["a"]), f"{IMAGE}?", ["a"]),
    "rendered by PaddleOCR": (
        asked("<|IMAGE_START|><|IMAGE_PLACEHOLDER|><|IMAGE_END|>?", images=["a"]),
        f"{IMAGE}?",
        ["a"],
    ),
    "wrapped by LLaVA": (asked("<im_start><image><im_end>?", images=["a"]), f"{IMAGE}?", ["a"]),
    "wrapped by InternVL": (asked("<img><image></img>?", images=["a"]), f"{IMAGE}?", ["a"]),
    "rendered by Gemma": (asked("<start_of_image>?", images=["a"]), f"{IMAGE}?", ["a"]),
    "index": (
        asked([{"index": None, **TEXT}, {"index": 0, "text": None, "type": "image"}], images=["a"]),
        f"What?{IMAGE}",
        ["a"],
    ),
    "indices in other order": (
        asked([{"type": "image", "index": 1}, {"type": "image", "index": 0}, TEXT], images=["a", "b"]),
        f"{IMAGE}{IMAGE}What?",
        ["b", "a"],
    ),
    "value": (asked([{"type": "image_url", "value": "a.png"}, TEXT]), f"{IMAGE}What?", ["a.png"]),
    "value of an image": (asked([{"type": "image", "value": "a.png"}, TEXT]), f"{IMAGE}What?", ["a.png"]),
    "token as text": (asked("What is <|image_pad|>?"), "What is <|image_pad|>?", []),
    "token as text beside a place": (
        asked("<image>What is <|image_pad|>?", images=["a"]),
        f"{IMAGE}What is <|image_pad|>?",
        ["a"],
    ),
    "element of HTML": (asked("What does <img> do in HTML?"), "What does <img> do in HTML?", []),
    "HTML": (asked('<img src="a.png"> <video src="b"></video>?'), '<img src="a.png"> <video src="b"></video>?', []),
    "forum": (asked("[IMG]http://a.b/c.png[/IMG]?"), "[IMG]http://a.b/c.png[/IMG]?", []),
}


@pytest.mark.parametrize("name", READ)
def test_a_tag_is_an_image_where_it_is_clear_which(name: str):
    row, text, images = READ[name]
    example = read(row)
    assert example.messages[0]["content"] == text and [image.path for image in example.others] == images


TAGS = "<ImageHere>", "<image_1>", "<|image_1|>", "[IMG]", "<image 1>", "<image_placeholder>"
FILLED = "<video>", "<audio>", "<bbox>", "<ref-object>", "<video_1>"
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    **{
        f"{tag} without image": (asked(f"{tag}?"), f"the row has {tag}, a place for an image, and no im")
        for tag in TAGS
    },
    **{
        f"{tag} and another": (asked(f"{tag}<image>", images=["a", "b"]), "not clear which image stands")
        for tag in TAGS
    },
    **{
        f"{tag} and a path": (asked(f"{tag}<img>a</img>", images=["b"]), "not clear which image stands") for tag in TAGS
    },
    **{f"{tag} and a part": (asked([{"type": "image"}, TEXT | {"text": tag}], images=["a"]), "clear") for tag in TAGS},
    **{f"{tag} in an answer": (asked("?", tag, images=["a"]), "message 2 is an answer with an image") for tag in TAGS},
    **{f"{tag}": (asked(f"Find {tag}"), f"message 1 has {tag}, which other tools replace by") for tag in FILLED},
    **{f"{tag} in an answer": (asked("Find", tag), f"message 2 has {tag}, which other tools") for tag in FILLED},
    "numbers without the first": (asked("<image_2>?", images=["a"]), "it is not clear which image stands where"),
    "a number twice": (asked("<image_1> <image_1>", images=["a"]), "not clear which image stands where"),
    "fewer numbers": (asked("<image_1>", images=["a", "b"]), "the row has <image_1>, and 2 images in"),
    "tags of two kinds": (asked("[IMG]<ImageHere>", images=["a", "b"]), "not clear which image stands where"),
    "fewer tokens": (asked("<|image_pad|>", images=["a", "b"]), "not clear which image stands where"),
    "fewer tags": (asked("[IMG]", images=["a", "b"]), "not clear which image stands where"),
    "bare tag": (asked("<img>What?", images=["a"]), "the row has images, and <img> in its text, which may be"),
    "path in an answer": (asked("?", "<img>a</img>"), "message 2 is an answer with an image"),
    "path of a URL": (asked("<img>https://a.b/c.png</img>"), "<img> is a URL, and images are not fetched"),
    "index past the images": (asked([{"type": "image", "index": 1}], images=["a"]), "must name each image of 'images'"),
    "index as text": (asked([{"type": "image", "index": "first"}], images=["a"]), "must name each image of 'images'"),
    "index of an own image": (asked([{"type": "image", "index": 0, "image": "a"}]), "has 'index' in an image, which"),
    "index beside a tag": (
        asked([{"type": "image", "index": 1}, {"type": "text", "text": "<image>"}], images=["a", "b"]),
        "must name each image of 'images' once",
    ),
    "plain text": ({"text": "<image>Q"}, "a row of plain text cannot have images"),
    "plain path": ({"prompt": "<img>a.png</img>?", "completion": "A"}, "a row of plain text cannot have images"),
    "plain tag": ({"prompt": "[IMG]?", "completion": "A"}, "where [IMG] is text, name 'images' in data.ignore_columns"),
    "plain box": ({"prompt": "Find <bbox>", "completion": "A"}, "the row has <bbox>, which other tools replace"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_clear_is_refused_in_one_line(name: str):
    row, says = REFUSED[name]
    with pytest.raises(RowFault) as fault:
        read(row)
    assert says in str(fault.value) and "\n" not in str(fault.value)


@pytest.mark.parametrize("tag", ["<image>", "<img>a.png</img>", "[IMG]", "<bbox>"])
@pytest.mark.parametrize("kind", [KINDS["pair"], KINDS["labelled"]])
def test_tags_in_pairs_and_labelled_rows_are_refused(kind: RowKind, tag: str):
    """Without a column of images they were trained as text."""
    question = {"role": "user", "content": f"{tag}?"}
    good, bad = ({"role": "assistant", "content": text} for text in "AB")
    pair, labelled = (
        {"chosen": [question, good], "rejected": [question, bad]},
        {"messages": [question, good], "label": 1},
    )
    plain = {"prompt": f"{tag}?", "chosen": "A", "rejected": "B"}
    for row in (pair, plain) if kind is KINDS["pair"] else (labelled,):
        with pytest.raises(RowFault, match="which cannot have images|which other tools replace"):
            read(row, kind)


@pytest.mark.parametrize("tag", [*TAGS, *FILLED, "<img>a.png</img>"])
def test_tags_are_text_for_a_model_of_text(tag: str):
    assert read(asked(tag), takes_images=False).messages[0]["content"] == tag


COLUMNS: dict[str, Any] = {
    "image_1": "a.png",
    "image1": "a",
    "image_path": "dir/a",
    "image_url": "https://a.b/c",
    "image_file_name": "a.png",
    "img": {"bytes": b"\x89PNG", "path": None},
    "img_b64": "iVBORw0KGgo=",
    "photo": b"\xff\xd8",
    "pictures": ["a.png", "b.png"],
    "video_path": "a.mp4",
}
HIDDEN: dict[str, Any] = {
    "file_name": "000001.jpg",
    "media": ["a.png"],
    "input": "data:image/png;base64,iVBORw0KGgo=",
    "upload": {"bytes": b"\x89PNG", "path": "a.png"},
    "files": '["a.png", "b.jpeg"]',
}


@pytest.mark.parametrize("column", COLUMNS)
def test_a_column_named_after_images_is_refused_with_its_mapping(column: str):
    row = asked("What?") | {column: COLUMNS[column]}
    with pytest.raises(RowFault) as fault:
        read(row)
    assert f"{column!r} seems to hold an image" in str(fault.value)
    assert f"data.columns={{images: {column}}}" in str(fault.value)
    with pytest.raises(RowFault, match=f"'{column}' holds images, video or audio; only text can be trained"):
        read(row, takes_images=False)


@pytest.mark.parametrize("column", HIDDEN)
def test_a_column_that_holds_images_is_refused_for_a_model_of_images(column: str):
    row = asked("What?") | {column: HIDDEN[column]}
    with pytest.raises(RowFault, match=f"'{column}' seems to hold an image"):
        read(row)
    read(row, takes_images=False)
    read(row | {"images": ["b.png"]})


def test_numbered_columns_become_images_by_their_mapping():
    row = {"query": "<image 1> What?", "response": "B", "image_1": "a.png"}
    example = read(row, images="image_1")
    assert example.messages[0]["content"] == f"{IMAGE} What?" and [one.path for one in example.others] == ["a.png"]


def test_other_columns_with_such_words_are_only_listed():
    others = {"image_id": 7, "image_count": "3", "image_description": "a field", "image_size": [3, 4], "image_2": None}
    row = asked("What?") | others | {"caption": "A red field.", "title": "The file a.png is red"}
    source = SourceFormat(format="messages", columns={}, takes_others=True)
    assert set(unread_columns(row, source)) == {*others, "caption", "title"} - {"image_2"}
