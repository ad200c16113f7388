"""Images of every kind become the same upright RGB pixels, and hostile ones one line."""

import struct
import sys
import zlib
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageFile
from transformers.image_transforms import convert_to_rgb

from lean_finetune.config.field_types import MAX_PIXELS
from lean_finetune.core.errors import RowFault
from lean_finetune.images import image_files
from lean_finetune.images.image_files import decode_image, has_damaged_exif
from tests.conftest import ROOT
from tests.processes import run_bounded

RED, BLUE, WHITE = (255, 0, 0), (0, 0, 255), (255, 255, 255)
ORIENTATION = 0x0112


def drawn(width: int = 24, height: int = 16) -> Image.Image:
    """Red, with a blue quarter at the upper left."""
    image = Image.new("RGB", (width, height), RED)
    image.paste(BLUE, (0, 0, width // 2, height // 2))
    return image


def saved(image: Image.Image, kind: str, **options) -> bytes:
    stream = BytesIO()
    image.save(stream, kind, **options)
    return stream.getvalue()


def corners(data: bytes) -> list[tuple[int, ...]]:
    """The colours at upper left, upper right and lower left."""
    image = decode_image(data, "a.png")
    assert image.mode == "RGB"
    width, height = image.size
    return [image.getpixel(place) for place in ((1, 1), (width - 2, 1), (1, height - 2))]  # type: ignore[misc]


def refusal(data: bytes) -> str:
    with pytest.raises(RowFault) as fault:
        decode_image(data, "dir/a.png")
    text = str(fault.value)
    assert text.startswith("image dir/a.png ") and "\n" not in text
    return text


LOSSLESS = {
    "png": saved(drawn(), "PNG"),
    "palette": saved(drawn().convert("P", palette=Image.Palette.ADAPTIVE), "PNG"),
    "webp": saved(drawn(), "WEBP", lossless=True),
    "gif": saved(drawn(), "GIF"),
    "bmp": saved(drawn(), "BMP"),
    "animated-gif": saved(drawn(), "GIF", save_all=True, append_images=[Image.new("RGB", (24, 16), WHITE)]),
    "apng": saved(drawn(), "PNG", save_all=True, append_images=[Image.new("RGB", (24, 16), WHITE)]),
    "animated-webp": saved(
        drawn(), "WEBP", lossless=True, save_all=True, append_images=[Image.new("RGB", (24, 16), WHITE)]
    ),
}


@pytest.mark.parametrize("name", LOSSLESS)
def test_every_format_gives_the_first_frame_to_the_bit(name: str):
    assert decode_image(LOSSLESS[name], name).tobytes() == drawn().tobytes()


@pytest.mark.parametrize("options", [{}, {"progressive": True}, {"subsampling": 0}])
def test_jpeg(options):
    found = np.asarray(decode_image(saved(drawn(), "JPEG", quality=95, **options), "a.jpg")).astype(int)
    assert found.shape == (16, 24, 3) and np.abs(found[1:7, 1:11] - BLUE).max() < 12


def test_a_jpeg_of_several_images_gives_the_first():
    """Some phones save a depth map behind the image (MPO)."""
    data = saved(drawn(), "MPO", quality=95, save_all=True, append_images=[Image.new("RGB", (8, 8), WHITE)])
    assert decode_image(data, "a.jpg").size == (24, 16)


def test_cmyk_jpeg_is_not_inverted():
    """Adobe's CMYK files have inverted channels: their images look like negatives."""
    for found, wanted in zip(
        corners(saved(drawn().convert("CMYK"), "JPEG", quality=95)), (BLUE, RED, RED), strict=True
    ):
        assert np.abs(np.subtract(found, wanted)).max() < 12


@pytest.mark.parametrize("mode", ["L", "1", "LA", "P"])
def test_grey_and_bilevel(mode: str):
    grey = Image.new("L", (8, 8), 255)
    grey.paste(0, (0, 0, 4, 4))
    assert corners(saved(grey.convert(mode), "PNG")) == [(0, 0, 0), WHITE, WHITE]


def sixteen_bits(values: np.ndarray, colour: int) -> bytes:
    """A PNG of 16 bits a channel, which Pillow cannot write for colour."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    height, width = values.shape[:2]
    rows = b"".join(b"\0" + row.astype(">u2").tobytes() for row in values)
    head = struct.pack(">IIBBBBB", width, height, 16, colour, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")


def test_sixteen_bits_are_scaled_and_not_clipped():
    """Pillow's own conversion made every grey above 255 of 65,535 white."""
    values = np.arange(0, 65536, 257, dtype=np.uint16).reshape(16, 16)
    wanted = np.arange(256).reshape(16, 16)
    for data in (sixteen_bits(values, 0), saved(Image.fromarray(values), "PNG")):
        found = np.asarray(decode_image(data, "a.png"))
        assert (found == wanted[..., None]).all()
    found = np.asarray(decode_image(sixteen_bits(np.repeat(values[..., None], 3, axis=2), 2), "a.png"))
    assert (found == wanted[..., None]).all()


def test_transparent_pixels_become_white():
    """RGB conversion alone would show the colour that an editor left under them, often black."""
    image = drawn().convert("RGBA")
    image.putpixel((1, 1), (0, 0, 0, 0))
    image.putpixel((22, 1), (0, 0, 0, 128))
    half = (127, 127, 127)
    assert corners(saved(image, "PNG")) == [WHITE, half, RED]
    assert corners(saved(image, "WEBP", lossless=True, exact=True)) == [WHITE, half, RED]
    grey = Image.new("LA", (24, 16), (0, 0))
    assert corners(saved(grey, "PNG")) == [WHITE] * 3
    palette = drawn().convert("P", palette=Image.Palette.ADAPTIVE, colors=4)
    for kind in ("PNG", "GIF"):
        assert corners(saved(palette, kind, transparency=palette.getpixel((1, 1)))) == [WHITE, RED, RED]
    assert corners(saved(drawn(), "PNG", transparency=RED)) == [BLUE, WHITE, WHITE]


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P"])
def test_blending_gives_the_values_of_transformers(mode: str, monkeypatch):
    """Else the pixel values that the model sees would differ from those of its processor, by one of 255."""
    monkeypatch.setattr(image_files, "BAND_PIXELS", 100)  # Several bands, the last one smaller.
    values = np.random.default_rng(0).integers(256, size=(17, 24, 4), dtype=np.uint8)
    image = Image.fromarray(values).convert(mode)
    data = saved(image, "PNG", **({"transparency": bytes(range(256))} if mode == "P" else {}))
    wanted = convert_to_rgb(Image.open(BytesIO(data)), return_numpy=True)
    assert (np.asarray(decode_image(data, "a.png")) == wanted).all()


def test_an_image_that_meets_the_limit_of_memory_is_refused(monkeypatch):
    def fail(image, **_):
        raise MemoryError

    monkeypatch.setattr(image_files.ImageOps, "exif_transpose", fail)
    assert "needs more memory than decoding it may take" in refusal(saved(drawn(), "PNG"))


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
def test_exif_orientation_is_applied(kind: str):
    """A phone's portrait would lie on its side."""
    blue_corner = {1: (0, 0), 2: (1, 0), 3: (1, 1), 4: (0, 1), 5: (0, 0), 6: (1, 0), 7: (1, 1), 8: (0, 1)}
    for orientation, (right, below) in blue_corner.items():
        exif = Image.Exif()
        exif[ORIENTATION] = orientation
        image = decode_image(saved(drawn(), kind, exif=exif, **({"lossless": True} if kind == "WEBP" else {})), "a")
        assert image.size == ((16, 24) if orientation > 4 else (24, 16)), orientation
        pixels = np.asarray(image).astype(int)
        place = (-2 if below else 1, -2 if right else 1)
        assert np.abs(pixels[place] - BLUE).max() < 12, orientation


def test_one_pixel_is_an_image():
    assert decode_image(saved(Image.new("RGB", (1, 1), BLUE), "PNG"), "a").getpixel((0, 0)) == BLUE


def claimed(size: int, kind: str) -> bytes:
    """A small image whose header claims to be `size` × `size`."""
    if kind == "PNG":
        return sixteen_bits(np.zeros((1, 1), np.uint16), 0).replace(
            struct.pack(">IIB", 1, 1, 16), struct.pack(">IIB", size, size, 16)
        )
    data = bytearray(saved(drawn(), kind))
    if kind == "BMP":
        data[18:26] = struct.pack("<ii", size, size)
    elif kind == "GIF":
        data[6:10] = struct.pack("<HH", size, size)
    else:
        place = data.index(b"\xff\xc0") + 5
        data[place : place + 4] = struct.pack(">HH", size, size)
    return bytes(data)


@pytest.mark.parametrize("size", [10_000, 20_000])
@pytest.mark.parametrize("kind", ["PNG", "JPEG", "GIF", "BMP"])
def test_too_many_pixels_are_refused_before_they_are_decoded(kind: str, size: int, monkeypatch):
    """An image of 20,000 × 20,000 pixels in a few kilobytes takes 1.2 GB as RGB."""
    monkeypatch.setattr(ImageFile.ImageFile, "load", lambda self: pytest.fail("decoded"))
    data = claimed(size, kind)
    if kind == "PNG":  # A correct checksum, so that nothing else can refuse it.
        data = data[:29] + struct.pack(">I", zlib.crc32(data[12:29])) + data[33:]
    assert f"has more than {MAX_PIXELS:,} pixels" in refusal(data)


def test_the_limit_takes_the_images_of_phones():
    assert 8160 * 6144 < MAX_PIXELS < 10_000 * 10_000


LOSSY = {kind: saved(drawn(200, 100), kind) for kind in ("PNG", "JPEG", "WEBP", "GIF", "BMP")}


@pytest.mark.parametrize("kind", LOSSY)
@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
def test_a_truncated_image_is_refused(kind: str, share: float):
    """A half download would train on grey."""
    data = LOSSY[kind]
    refusal(data[: int(len(data) * share)])


@pytest.mark.parametrize("kind", LOSSY)
def test_random_damage_gives_an_image_or_one_line(kind: str):
    """A fault of a decoder would end the run."""
    random = np.random.default_rng(0)
    for _ in range(150):
        data = bytearray(LOSSY[kind])
        for place in random.integers(0, min(len(data), 400), 4):
            data[place] = random.integers(256)
        try:
            assert decode_image(bytes(data), "a").mode == "RGB"
        except RowFault as fault:
            assert "\n" not in str(fault)


OTHERS = {
    "text": b"not an image\n" * 40,
    "html": b"<!DOCTYPE html><html>404</html>",
    "svg": b'<svg xmlns="http://www.w3.org/2000/svg"/>',
    "postscript": b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n",
    "pdf": b"%PDF-1.7\n",
    "ppm": b"P6 1 1 255\n\0\0\0",
    "tiff": saved(drawn(), "TIFF"),
    "empty": b"",
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_content_is_refused(name: str):
    """Pillow would run Ghostscript for PostScript."""
    assert "convert it to one of JPEG, PNG, WEBP, GIF, BMP" in refusal(OTHERS[name])


def with_broken_exif() -> bytes:
    """A JPEG whose EXIF data names a tag behind its end."""
    exif = Image.Exif()
    exif[ORIENTATION], exif[0x010E] = 1, "x" * 50
    data = saved(drawn(), "JPEG", exif=exif)
    place = data.index(b"\x01\x0e", data.index(b"Exif\0\0"))  # Of the description: type, count, where it is.
    return data[: place + 8] + b"\x00\x0f\x00\x00" + data[place + 12 :]


QUIET = """
import sys
from pathlib import Path
from lean_finetune.images.image_files import decode_image, has_damaged_exif
from tests.processes import run_bounded
data = Path(sys.argv[1]).read_bytes()
print(decode_image(data, "a").size, has_damaged_exif(data))
"""


def test_damaged_exif_data_is_found_and_prints_nothing(tmp_path: Path):
    """Two lines of Pillow on the terminal for each image of a data set."""
    assert not has_damaged_exif(saved(drawn(), "JPEG")) and not has_damaged_exif(LOSSLESS["png"])
    (tmp_path / "a.jpg").write_bytes(with_broken_exif())
    done = run_bounded([sys.executable, "-c", QUIET, tmp_path / "a.jpg"], cwd=ROOT)
    assert done.stdout == "(24, 16) True\n" and done.stderr == "", done.stderr
