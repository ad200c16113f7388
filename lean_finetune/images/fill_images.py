"""The images of a row while it is tokenized: read, stored, and their tokens put into its text."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from lean_finetune.core.errors import RowFault, UserError
from lean_finetune.data.chat.control_tokens import TextSegment
from lean_finetune.data.encode.row_tokenizer import Chunks, RowTokenizer
from lean_finetune.data.encode.whole_row_encoder import EncodedRows
from lean_finetune.data.format.given_images import GivenImage
from lean_finetune.images.image_store import ImageStore, StoredImage


class RowImages:
    """Reads the images of rows, and fills their places."""

    def __init__(self, store: ImageStore, tokenizer: RowTokenizer):
        """`tokenizer` is the model's."""
        self._store, self.processor = store, store.processor
        number = tokenizer.id_of(self.processor.fill_token)
        if number is None:
            raise UserError(
                f"model.name: its tokenizer has no token {self.processor.fill_token!r}, which stands for images; "
                "download or save it again"
            )
        self._fill_id = number

    def stored(self, given: Sequence[GivenImage], directory: Path | None) -> tuple[StoredImage, ...]:
        """The images of a row, whose file is in `directory`. Raises RowFault, see `ImageStore.add`."""
        return tuple(self._store.add(one, directory) for one in given)

    def filled(self, segments: Sequence[TextSegment], images: Sequence[StoredImage]) -> list[TextSegment]:
        """The segments of a row with the tokens of each image in its place; they are never trained.

        Raises RowFault if the chat template shows another number of images.
        """
        mark = self.processor.image_token
        shown = sum(segment.text.count(mark) for segment in segments)
        if shown != len(images):
            raise RowFault(
                f"the chat template shows {shown} of the row's {len(images)} images; set data.chat_template to "
                f"one that writes {mark} for each, such as the model's own"
            )
        expansions = iter([self.processor.expansion(one.size, number) for number, one in enumerate(images)])
        filled: list[TextSegment] = []
        for text, trained in segments:
            first, *others = text.split(mark)
            if not trained:
                parts = [first, *(part for other in others for part in (next(expansions), other))]
                filled.append(TextSegment("".join(parts), False))
                continue
            filled.append(TextSegment(first, True))
            for other in others:
                filled += [TextSegment(next(expansions), False), TextSegment(other, True)]
        return [segment for segment in filled if segment.text]

    def first_behind(self, limit: int, images: Sequence[StoredImage], ids: np.ndarray) -> StoredImage | None:
        """The first image of a row of token ids that has a token behind the first `limit`; None without one."""
        places, end = np.flatnonzero(ids == self._fill_id), 0
        for image in images:
            end += self.processor.expansion(image.size).count(self.processor.fill_token)
            if places[end - 1] >= limit:
                return image
        return None

    def cut(self, chunks: Chunks, encoded: EncodedRows) -> np.ndarray:
        """Whether each chunk lacks tokens of its row's images, bool of shape (chunks,)."""
        fills = np.append(0, np.cumsum(encoded.ids == self._fill_id))
        left = fills[chunks.starts + chunks.lengths] - fills[chunks.starts]
        wanted = fills[encoded.offsets[1:]] - fills[encoded.offsets[:-1]]
        return np.asarray(left != wanted[chunks.rows])
