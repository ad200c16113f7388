"""Images in the options of commands, and what the answer of `lean-finetune fit` says about them."""

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click

from cuda_memory.units import counted, labelled
from lean_finetune.config.field_types import MAX_PIXELS
from lean_finetune.core.errors import UsageFault
from lean_finetune.images.image_family import Size

if TYPE_CHECKING:
    from lean_finetune.commands.convert.conversions import Converted
    from lean_finetune.memory.advice.run import Run
    from lean_finetune.memory.choice.largest_image import LargestImage
    from lean_finetune.memory.predict.assumed_images import RowOfImages
    from lean_finetune.memory.predict.assumed_rows import AssumedRows

Images = tuple[Size, int]
"""The size of images, and how many a row has."""
SHOWN_FILES = click.option(
    "--image",
    "files",
    multiple=True,
    metavar="FILE",
    help="An image in front of the first question; may be repeated.",
)
"""Of commands that ask a model."""
SIZE_OF_EACH = click.option("--image", "size", metavar="WxH", help="Every row has images of this size: 1280x960.")
NUMBER_IN_A_ROW = click.option(
    "--images-per-row", "per_row", type=click.IntRange(min=1), help="Images of a row. Default: 1."
)
SIZE = re.compile(r"([0-9]{1,9})[xX×]([0-9]{1,9})")


def asked_images(
    image: str | None, per_row: int | None, lengths: str | None, converted: "Converted | None"
) -> Images | None:
    """The images of --image and --images-per-row; None without any.

    `converted`: a configuration of another tool, whose size counts if rows have images and --image is not given.

    Raises:
        UsageFault: an option has another form, or excludes another one.
    """
    size = None if converted is None else converted.image
    size = size if image is None else _size(image)
    if size is None:
        if per_row is not None:
            raise UsageFault("--images-per-row: needs --image, the size of the images")
        return None
    if lengths is not None:
        raise UsageFault("--lengths: is of rows of text; leave it out for rows with images")
    return size, per_row or 1


def assumed_rows(images: Images | None) -> "AssumedRows":
    """What is assumed of every row."""
    from lean_finetune.memory.predict.assumed_rows import TEXT_ROWS  # Here: imports torch.

    if images is None:
        return TEXT_ROWS
    from lean_finetune.memory.predict.assumed_images import AssumedImages

    return AssumedImages(size=images[0], count=images[1])


def _size(image: str) -> Size:
    found = SIZE.fullmatch(image.strip())
    width, height = (int(found[1]), int(found[2])) if found else (0, 0)
    if not 0 < width * height <= MAX_PIXELS:
        raise UsageFault(
            f"--image: must be width and height in pixels, such as 1280x960, and at most {MAX_PIXELS:,} pixels; got "
            f"{image!r}"
        )
    return Size(height=height, width=width)


def shown(size: Size) -> str:
    """A size as people write it."""
    return f"{size.width} x {size.height}"


def row_lines(run: "Run") -> Iterator[str]:
    """Tokens and patches of each image, and whose limits its size has."""
    if (row := _row_of(run)) is None:
        return
    assumed = row.assumed
    yield labelled(
        "images",
        f"{assumed.count} of {shown(assumed.size)} in every row: {counted(row.tokens, 'token')} and "
        f"{counted(row.patches, 'patch', 'patches')} each",
    )
    if not row.own_limits:
        family = run.config.model_type
        kind = row.processor.name
        yield labelled("", f"by the {kind} that {family} is published with: the model's own is not here")


def _row_of(run: "Run") -> "RowOfImages | None":
    """The images of each row; None for rows of text, which need no image processor."""
    if not run.full_row.attached:
        return None
    from lean_finetune.memory.predict.assumed_images import RowOfImages

    return run.full_row if isinstance(run.full_row, RowOfImages) else None


def _largest(run: "Run", row: "RowOfImages", peak_bytes: int) -> "LargestImage":
    from lean_finetune.memory.choice.largest_image import largest_image

    return largest_image(run, row, run.fitting_bytes, peak_bytes)


def largest_lines(run: "Run", peak_bytes: int) -> Iterator[str]:
    """The largest image of the same shape with which a run of this peak fits."""
    if (row := _row_of(run)) is None:
        return
    largest = _largest(run, row, peak_bytes)
    if largest.size is None:
        yield labelled("largest image", "not even the smallest fits")
    else:
        yield labelled("largest image", f"{shown(largest.size)}, limited by {largest.limit or 'memory'}")


def images_json(run: "Run", peak_bytes: int) -> dict[str, Any]:
    """The images of each row, and the largest with which a run of this peak fits; None without any."""
    if (row := _row_of(run)) is None:
        return {"images": None, "largest_image": None}
    return {"images": _described(run, row), "largest_image": _largest(run, row, peak_bytes).as_json()}


def _described(run: "Run", row: "RowOfImages") -> dict[str, Any]:
    return {
        "width": row.assumed.size.width,
        "height": row.assumed.size.height,
        "per_row": row.assumed.count,
        "tokens": row.tokens,
        "patches": row.patches,
        "processor": "of the model"
        if row.own_limits
        else f"{row.processor.name} as published for {run.config.model_type}",
    }
