"""Draw images of coloured shapes, and write questions about them: rows with images for tests and examples.

`python -m data.synth.images OUT` writes OUT/train.jsonl, OUT/heldout.jsonl and OUT/images/*.png. No image of one
file is in the other.
"""

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
from PIL import Image, ImageDraw

COLOURS = {
    "red": (220, 40, 40),
    "green": (40, 170, 60),
    "blue": (40, 70, 220),
    "yellow": (235, 205, 30),
    "purple": (150, 50, 180),
    "black": (20, 20, 20),
}
SHAPES = ("circle", "square", "triangle")
SIDE = 84
"""Pixels of an image's edges: 36 patches of 14 x 14."""
CELLS = 2
"""Shapes stand in a grid of so many columns and rows."""


def draw(generator: random.Random) -> tuple[Image.Image, str, str, int]:
    """An image, and its shapes' colour, name and number."""
    colour, shape, count = generator.choice(list(COLOURS)), generator.choice(SHAPES), generator.randint(1, CELLS**2)
    image = Image.new("RGB", (SIDE, SIDE), (245, 245, 245))
    pen, cell = ImageDraw.Draw(image), SIDE // CELLS
    for place in generator.sample(range(CELLS**2), count):
        left, top = place % CELLS * cell + generator.randint(3, 9), place // CELLS * cell + generator.randint(3, 9)
        box = (left, top, left + cell - 14, top + cell - 14)
        if shape == "circle":
            pen.ellipse(box, COLOURS[colour])
        elif shape == "square":
            pen.rectangle(box, COLOURS[colour])
        else:
            pen.polygon([((box[0] + box[2]) // 2, box[1]), (box[0], box[3]), (box[2], box[3])], COLOURS[colour])
    return image, colour, shape, count


def rows(directory: Path, name: str, images: int, seed: int) -> Iterator[dict[str, Any]]:
    """Draw images into `directory`/images; yield a row for each question about one of them."""
    generator = random.Random(seed)
    (directory / "images").mkdir(parents=True, exist_ok=True)
    for number in range(images):
        image, colour, shape, count = draw(generator)
        path = f"images/{name}-{number:04d}.png"
        image.save(directory / path)
        questions = (("Which colour?", colour), ("Which shape?", shape), ("How many?", str(count)))
        for question, answer in questions:
            yield {
                "messages": [
                    {"role": "user", "content": f"<image>{question}"},
                    {"role": "assistant", "content": answer},
                ],
                "images": [path],
                "family": question,
            }


def write(directory: Path, *, train: int, heldout: int, seed: int) -> None:
    """Write both files of rows, and their images."""
    for name, count, own in (("train", train, seed), ("heldout", heldout, seed + 1)):
        lines = (json.dumps(row) + "\n" for row in rows(directory, name, count, own))
        (directory / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")


@click.command()
@click.argument("out", type=click.Path(path_type=Path))
@click.option("--train", default=200, show_default=True, help="Images to learn from.")
@click.option("--heldout", default=60, show_default=True, help="Other images to ask about.")
@click.option("--seed", default=0, show_default=True)
def main(out: Path, train: int, heldout: int, seed: int) -> None:
    """Draw images of coloured shapes below OUT, and write questions about them."""
    write(out, train=train, heldout=heldout, seed=seed)


if __name__ == "__main__":
    main()
