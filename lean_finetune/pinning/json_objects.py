"""Read JSON files that others wrote. Their size is limited, so that they cannot take much time or memory."""

import json
from pathlib import Path
from typing import Any

from lean_finetune.core.errors import shortened

MOST_BYTES = 1 << 24
MOST_INDEX_BYTES = 1 << 25
"""Of an index of weights; models of 1,000 B parameters have some 150,000 names in 14 MB."""


class NotAnObject(ValueError):
    """A file has no JSON object. The message completes a sentence that begins with the file's path."""


def read_object(path: Path, most_bytes: int = MOST_BYTES) -> dict[str, Any]:
    """The JSON object in a file of at most `most_bytes` bytes.

    Raises:
        NotAnObject: it cannot be read, is too large, is not JSON, or has another value.
    """
    try:
        with path.open("rb") as file:
            text = file.read(most_bytes + 1)
        if len(text) > most_bytes:
            raise NotAnObject(f"has more than {most_bytes} bytes")
        value = json.loads(text)
    except OSError as error:
        raise NotAnObject(f"cannot be read ({error.strerror})") from None
    except RecursionError:
        raise NotAnObject("is not JSON (nested too deeply)") from None
    except NotAnObject:
        raise
    except ValueError as error:
        raise NotAnObject(f"is not JSON ({shortened(str(error))})") from None
    if not isinstance(value, dict):
        raise NotAnObject(f"must be a JSON object; got {type(value).__name__}")
    return value
