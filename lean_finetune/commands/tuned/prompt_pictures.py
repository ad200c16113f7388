"""The pictures of prompts: read, their tokens put into the text, and the model's arguments for them."""

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from lean_finetune.commands.tuned.tuned_files import named_by_option
from lean_finetune.core.errors import UsageFault, UserError
from lean_finetune.data.chat.control_tokens import TextSegment
from lean_finetune.data.format.format_base import (
    PICTURE_COLUMNS,
    Conversation,
    GivenPicture,
    Message,
    PicturePart,
    RowFault,
)
from lean_finetune.data.format.messages import PICTURE_PARTS, read_content
from lean_finetune.data.format.row_pictures import column_pictures, given_picture, in_front, placed
from lean_finetune.data.pictures.picture_store import PICTURES, PictureFiles, PictureStore, StoredPicture
from lean_finetune.data.pictures.processor import PictureProcessor, picture_family
from lean_finetune.data.shards.fill_pictures import RowPictures
from lean_finetune.memory.trace.known_values import KnownPictures
from lean_finetune.step.picture_inputs import PictureInputs, PictureTensors

if TYPE_CHECKING:
    import torch

    from lean_finetune.commands.tuned.conversation import Prompter
    from lean_finetune.commands.tuned.tuned_model import TunedModel

TEXT_ALONE = "takes no pictures, or is of a family whose pictures are not read"
"""Why a model cannot be shown a picture."""


class PromptPictures:
    """Reads the pictures of prompts as training read those of rows."""

    def __init__(self, tuned: "TunedModel", prompter: "Prompter", directory: Path):
        """Keep copies of the pictures in `directory`, which stays as long as they are shown.

        Raises:
            UserError: the model's processor cannot be read, or its tokenizer and config do not belong together.
        """
        with named_by_option():
            self._processor = PictureProcessor(_processor_directory(tuned))
            self._processor.check_image_token(tuned.config.image_token_id)
        self._rows = RowPictures(PictureStore(directory / PICTURES, self._processor), prompter.rows)
        self._files, self._prompter = PictureFiles(directory), prompter
        self._inputs = PictureInputs(self._processor, tuned.config)

    def known(self, pictures: Iterable[Sequence[StoredPicture]]) -> KnownPictures:
        """What predictions need to know of the pictures of prompts: those with most patches."""
        worst = max(pictures, key=self._patches)
        return KnownPictures(self._inputs, tuple((one.size.height, one.size.width) for one in worst))

    def tokens(self, pictures: Sequence[StoredPicture]) -> int:
        """Tokens of the pictures of a prompt, each with one to part it from the next."""
        return sum(self._processor.tokens(picture.size) + 1 for picture in pictures)

    def stored(self, pictures: Sequence[GivenPicture], directory: Path | None) -> tuple[StoredPicture, ...]:
        """The pictures of a prompt, whose file is in `directory`. Raises RowFault if one cannot be read."""
        return self._rows.stored(pictures, directory)

    def _patches(self, pictures: Sequence[StoredPicture]) -> int:
        return sum(self._rows.processor.patches(picture.size) for picture in pictures)

    def ids(self, messages: list[Message], tools: list[Any] | None, pictures: Sequence[StoredPicture]) -> list[int]:
        """The ids of a conversation that has a `PICTURE` for each picture; raises as `Prompter.of_messages`."""
        rendered = self._prompter.rendering(self._prompter.rows.guard.protect_messages(messages), tools)
        return self._prompter.ids(self._rows.filled([TextSegment(rendered, False)], pictures))

    def show(self, ids_BT: "torch.Tensor", hashes: Sequence[Sequence[bytes]]) -> PictureTensors:
        """The model's arguments in generation for padded tokens and the pictures of each prompt."""
        pictures = [[self._files.open(one) for one in of_prompt] for of_prompt in hashes]
        return self._inputs.for_generation(ids_BT, pictures)


@dataclass(frozen=True, kw_only=True)
class ShownPictures:
    """The pictures of a conversation, in front of its first question."""

    tuned: "TunedModel"
    """The model with its parts for pictures."""
    _reader: PromptPictures
    _pictures: tuple[StoredPicture, ...]

    @property
    def tokens(self) -> int:
        """Tokens of the pictures."""
        return self._reader.tokens(self._pictures)

    @property
    def known(self) -> KnownPictures:
        """What predictions need to know of the pictures."""
        return self._reader.known([self._pictures])

    def ids(self, messages: list[Message]) -> list[int]:
        """The ids of a conversation; raises as `Prompter.of_messages`."""
        return self._reader.ids(in_front(messages, len(self._pictures)), None, self._pictures)

    def arguments(self, ids_BT: "torch.Tensor") -> PictureTensors:
        """The model's arguments in generation for the tokens of a prompt."""
        return self._reader.show(ids_BT, [[picture.digest for picture in self._pictures]])


@contextmanager
def shown_pictures(tuned: "TunedModel", prompter: "Prompter", images: Sequence[str]) -> Iterator[ShownPictures | None]:
    """The pictures of the option --image of a conversation; None without any.

    Raises:
        UserError: the model takes no pictures, or one of them cannot be read.
    """
    if not images:
        yield None
        return
    with picture_reader(tuned, prompter) as reader:
        if reader is None:
            raise UsageFault(f"--image: {tuned.directory} {TEXT_ALONE}; leave it out, or choose another model")
        try:
            pictures = reader.stored(given_files(images), Path())
        except RowFault as fault:
            raise UserError(f"--image: {fault}") from None
        yield ShownPictures(tuned=tuned.with_pictures(), _reader=reader, _pictures=pictures)


@contextmanager
def picture_reader(tuned: "TunedModel", prompter: "Prompter") -> Iterator[PromptPictures | None]:
    """What reads the pictures of prompts; None if the model takes none."""
    if not takes_pictures(tuned):
        yield None
        return
    with TemporaryDirectory() as directory:
        yield PromptPictures(tuned, prompter, Path(directory))


def takes_pictures(tuned: "TunedModel") -> bool:
    """Whether a model is of a family that is trained with pictures. Raises UserError if its processor is damaged."""
    with named_by_option():
        return picture_family(_processor_directory(tuned)) is not None


def projector_is_converted(tuned: "TunedModel") -> bool:
    """Whether llama.cpp's convert_hf_to_gguf.py converts the parts of a model for pictures, with `--mmproj`.

    Of models of type `llava` it knows Pixtral's tower alone (conversion/llava.py), and `llava_next` has CLIP's too.
    """
    vision = getattr(tuned.config, "vision_config", None)
    return takes_pictures(tuned) and getattr(vision, "model_type", None) != "clip_vision_model"


def _processor_directory(tuned: "TunedModel") -> Path:
    """The directory with the model's processor: that of the adapter, which has the limits of training, or the base's.

    Older adapters have files that do not name their processor.
    """
    return tuned.directory if picture_family(tuned.directory) is not None else tuned.base


def given_files(names: Sequence[str]) -> list[GivenPicture]:
    """The pictures of the option --image. Raises UserError if one is no file."""
    try:
        given = [given_picture(name, "it") for name in names]
    except RowFault as fault:
        raise UserError(f"--image: {fault}") from None
    return [one if one.path is None else replace(one, path=os.path.abspath(one.path)) for one in given]


def conversation_of(
    row: Mapping[str, Any], messages: Sequence[Message], shown: Sequence[GivenPicture]
) -> Conversation | None:
    """The conversation of a row with pictures, as rows of training have them; None if it has none.

    `shown` are pictures of the option --image, in front of the first question.

    Raises:
        RowFault: its pictures and their places differ in number, a picture is not as rows name them, or the row has
            pictures beside `shown`.
    """
    has_own = any(row.get(key) for key in PICTURE_COLUMNS) or any(
        part.get("type") in PICTURE_PARTS for message in messages for part in _parts(message)
    )
    if not (shown or has_own):
        return None
    if shown and has_own:
        raise RowFault("the row has pictures of its own; leave out --image, or remove them")
    texts: list[Message] = []
    parts: list[PicturePart] = []
    for number, message in enumerate(messages, start=1):
        texts.append(dict(message))
        parts += read_content(texts[-1], str(message.get("role")), f"message {number}", "content").pictures
    example = Conversation(messages=texts, tools=row.get("tools"), picture_parts=tuple(parts))
    return placed(example, [*shown, *column_pictures(row)])


def _parts(message: Message) -> list[dict[str, Any]]:
    """The content parts of a message; empty if it is text."""
    content = message.get("content")
    return [part for part in content if isinstance(part, dict)] if isinstance(content, list) else []
