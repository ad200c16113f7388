"""Pin the images that rows name by path."""

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lean_finetune.core.atomic_files import sha256_file

MAX_IMAGE_BYTES = 256 << 20
"""Most bytes of an image's file: more is a mistake, and each worker holds one."""


def pin_images(images: Mapping[str, Path]) -> dict[str, Any]:
    """The lock's entry of a source's images by name: one hash over all names and contents, for any number of them.

    An image that cannot be read is only counted: its rows are refused when they are tokenized.
    """
    digest, size_bytes, missing = hashlib.sha256(), 0, 0
    for name in sorted(images):
        content = _content(images[name])
        if content is None:
            missing += 1
        else:
            size_bytes += content[0]
        digest.update(f"{name}\0{content}\n".encode("utf-8", "surrogatepass"))
    return {"files": len(images), "missing": missing, "bytes": size_bytes, "sha256": digest.hexdigest()}


def _content(path: Path) -> tuple[int, str] | None:
    """(bytes, hash) of a regular file; the hash of one that is too large is blank. None if it cannot be read."""
    try:
        if not path.is_file():  # A pipe would wait for a writer.
            return None
        size_bytes = path.stat().st_size
        return size_bytes, sha256_file(path) if size_bytes <= MAX_IMAGE_BYTES else ""
    except OSError:
        return None
