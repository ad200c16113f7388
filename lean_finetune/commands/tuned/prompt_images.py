"""The images of prompts: read, their tokens put into the text, and the model's arguments for them."""

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from lean_finetune.commands.tuned.tuned_files import named_by_option
from lean_finetune.core.errors import RowFault, UsageFault, UserError
from lean_finetune.data.chat.control_tokens import TextSegment
from lean_finetune.data.format.format_base import Conversation, Message
from lean_finetune.data.format.given_images import IMAGE_COLUMNS, IMAGE_PARTS, GivenImage, ImageContent
from lean_finetune.data.format.image_tags import PATH_TAG
from lean_finetune.data.format.messages import read_content
from lean_finetune.data.format.row_images import column_images, given_image, in_front, placed
from lean_finetune.images.fill_images import RowImages
from lean_finetune.images.image_files import IMAGES, ImageFiles
from lean_finetune.images.image_inputs import ImageInputs, ImageTensors
from lean_finetune.images.image_store import ImageStore, StoredImage
from lean_finetune.images.processor import ImageProcessor, image_family
from lean_finetune.memory.trace.known_images import KnownImages

if TYPE_CHECKING:
    import torch

    from lean_finetune.commands.tuned.conversation import Prompter
    from lean_finetune.commands.tuned.tuned_model import TunedModel

NOT_CONVERTED = "text alone: the converter does not know this vision tower"
"""Of a model whose parts for images are not converted."""
TEXT_ALONE = "takes no images, or is of a family whose images are not read"
"""Why a model cannot be shown an image."""


Shown = tuple[StoredImage, ...]
"""The images of a prompt."""


class PromptImages:
    """Reads the images of prompts as training read those of rows."""

    def __init__(self, tuned: "TunedModel", prompter: "Prompter", directory: Path):
        """Keep copies of the images in `directory`, which stays as long as they are shown.

        Raises:
            UserError: the model's processor cannot be read, or its tokenizer and config do not belong together.
        """
        with named_by_option():
            self._processor = ImageProcessor(_processor_directory(tuned))
            self._processor.check_image_token(tuned.config.image_token_id)
        self._rows = RowImages(ImageStore(directory / IMAGES, self._processor), prompter.rows)
        self._files, self._prompter = ImageFiles(directory), prompter
        self._inputs = ImageInputs(self._processor, tuned.config)

    def known(self, images: Iterable[Sequence[StoredImage]]) -> KnownImages:
        """What predictions need to know of the images of prompts: those with most patches."""
        worst = max(images, key=self._patches)
        return KnownImages(self._inputs, tuple((one.size.height, one.size.width) for one in worst))

    def tokens(self, images: Sequence[StoredImage]) -> int:
        """Tokens of the images of a prompt, each with one to part it from the next."""
        return sum(self._processor.tokens(image.size) + 1 for image in images)

    def stored(self, images: Sequence[GivenImage], directory: Path | None) -> tuple[StoredImage, ...]:
        """The images of a prompt, whose file is in `directory`. Raises RowFault if one cannot be read."""
        return self._rows.stored(images, directory)

    def _patches(self, images: Sequence[StoredImage]) -> int:
        return sum(self._rows.processor.patches(image.size) for image in images)

    def ids(self, messages: list[Message], tools: list[Any] | None, images: Sequence[StoredImage]) -> list[int]:
        """The ids of a conversation that has an `IMAGE` for each image; raises as `Prompter.of_messages`."""
        rendered = self._prompter.rendering(self._prompter.rows.guard.protect_messages(messages), tools)
        return self._prompter.ids(self._rows.filled([TextSegment(rendered, False)], images))

    def show(self, ids_BT: "torch.Tensor", hashes: Sequence[Sequence[bytes]]) -> ImageTensors:
        """The model's arguments in generation for padded tokens and the images of each prompt."""
        images = [[self._files.open(one) for one in of_prompt] for of_prompt in hashes]
        return self._inputs.for_generation(ids_BT, images)


@dataclass(frozen=True, kw_only=True)
class ShownImages:
    """The images of a conversation, in front of its first question."""

    name = "images"

    tuned: "TunedModel"
    """The model with its parts for images."""
    _reader: PromptImages
    _images: tuple[StoredImage, ...]

    @property
    def tokens(self) -> int:
        """Tokens of the images."""
        return self._reader.tokens(self._images)

    @property
    def known(self) -> KnownImages:
        """What predictions need to know of the images."""
        return self._reader.known([self._images])

    def ids(self, messages: list[Message]) -> list[int]:
        """The ids of a conversation; raises as `Prompter.of_messages`."""
        return self._reader.ids(in_front(messages, len(self._images)), None, self._images)

    def arguments(self, ids_BT: "torch.Tensor") -> ImageTensors:
        """The model's arguments in generation for the tokens of a prompt."""
        return self._reader.show(ids_BT, [[image.digest for image in self._images]])


@contextmanager
def shown_images(tuned: "TunedModel", prompter: "Prompter", files: Sequence[str]) -> Iterator[ShownImages | None]:
    """The images of the option --image of a conversation; None without any.

    Raises:
        UserError: the model takes no images, or one of them cannot be read.
    """
    if not files:
        yield None
        return
    with image_reader(tuned, prompter) as reader:
        if reader is None:
            raise UsageFault(f"--image: {tuned.directory} {TEXT_ALONE}; leave it out, or choose another model")
        try:
            images = reader.stored(given_files(files), Path())
        except RowFault as fault:
            raise UserError(f"--image: {fault}") from None
        yield ShownImages(tuned=tuned.whole(), _reader=reader, _images=images)


@contextmanager
def image_reader(tuned: "TunedModel", prompter: "Prompter") -> Iterator[PromptImages | None]:
    """What reads the images of prompts; None if the model takes none."""
    if not takes_images(tuned):
        yield None
        return
    with TemporaryDirectory() as directory:
        yield PromptImages(tuned, prompter, Path(directory))


def takes_images(tuned: "TunedModel") -> bool:
    """Whether a model is of a family that is trained with images. Raises UserError if its processor is damaged."""
    with named_by_option():
        return image_family(_processor_directory(tuned)) is not None


def parts_are_converted(tuned: "TunedModel") -> bool:
    """Whether llama.cpp's convert_hf_to_gguf.py converts the parts of a model for images, with `--mmproj`.

    Of models of type `llava` it knows Pixtral's tower alone (conversion/llava.py), and `llava_next` has CLIP's too.
    """
    vision = getattr(tuned.config, "vision_config", None)
    return takes_images(tuned) and getattr(vision, "model_type", None) != "clip_vision_model"


def _processor_directory(tuned: "TunedModel") -> Path:
    """The directory with the model's processor: that of the adapter, which has the limits of training, or the base's.

    Older adapters have files that do not name their processor.
    """
    return tuned.directory if image_family(tuned.directory) is not None else tuned.base


def given_files(names: Sequence[str]) -> list[GivenImage]:
    """The images of the option --image. Raises UserError if one is no file."""
    try:
        given = [given_image(name, "it") for name in names]
    except RowFault as fault:
        raise UserError(f"--image: {fault}") from None
    return [one if one.path is None else replace(one, path=os.path.abspath(one.path)) for one in given]


def refuse_without_place(row: Mapping[str, Any], shown: Sequence[GivenImage]) -> None:
    """Raise RowFault if a row of plain text has images, or is `shown` those of the option --image."""
    if shown:
        raise RowFault("plain text has no place for the images of --image; write 'messages'")
    if column_images(row):
        raise RowFault("plain text has no place for the row's images; write 'messages', or remove them")


def unread_fault(tuned: "TunedModel") -> RowFault:
    """The fault of a row with images for a model that takes none."""
    return RowFault(f"it has images, and {tuned.directory} {TEXT_ALONE}; remove them")


def conversation_of(
    row: Mapping[str, Any], messages: Sequence[Message], shown: Sequence[GivenImage], *, takes_images: bool
) -> Conversation | None:
    """The conversation of a row with images, as rows of training have them; None if it has none.

    `shown` are images of the option --image, in front of the first question. `takes_images` says whether the model
    takes any: else a tag around a path is text.

    Raises:
        RowFault: its images and their places differ in number, an image is not as rows name them, or the row has
            images beside `shown`.
    """
    has_own = any(row.get(key) for key in IMAGE_COLUMNS) or any(
        part.get("type") in IMAGE_PARTS for message in messages for part in _parts(message)
    )
    has_own |= takes_images and any(map(_names_path, messages))
    if not (shown or has_own):
        return None
    if shown and has_own:
        raise RowFault("the row has images of its own; leave out --image, or remove them")
    texts: list[Message] = []
    parts: list[ImageContent] = []
    for number, message in enumerate(messages, start=1):
        texts.append(dict(message))
        parts += read_content(texts[-1], str(message.get("role")), f"message {number}", "content").others
    example = Conversation(messages=texts, tools=row.get("tools"), other_parts=tuple(parts))
    return placed(example, [*shown, *column_images(row)])


def _parts(message: Message) -> list[dict[str, Any]]:
    """The content parts of a message; empty if it is text."""
    content = message.get("content")
    return [part for part in content if isinstance(part, dict)] if isinstance(content, list) else []


def _names_path(message: Message) -> bool:
    """Whether the text of a message has a tag around the path of an image."""
    content = message.get("content")
    return isinstance(content, str) and PATH_TAG.search(content) is not None
