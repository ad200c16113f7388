"""Write values into a params.yaml, whose comments stay."""

import io
from collections.abc import Mapping, MutableMapping
from pathlib import Path
from typing import Any

from lean_finetune.config.load import parse_params
from lean_finetune.core.atomic_files import rewrite_text
from lean_finetune.core.errors import UserError
from lean_finetune.core.file_names import refuse_link_out
from lean_finetune.core.read_yaml import parse_yaml, read_yaml

WIDTH = 10**6
"""Lines are not wrapped: `dvc exp run -S` rewrites the file in the same form."""


def change_params(values: Mapping[str, Any], template: Path, out: Path) -> dict[str, Any]:
    """Write `template` with other values to `out`; return those that changed by dotted key.

    Raises:
        UserError: the template cannot be read, the parameters together are wrong, or `out` is read-only or a link out
            of its directory. Nothing is written then.
    """
    refuse_link_out(out.parent, out)
    # Its directory may allow to replace it, and root may do anything; the owner said no.
    if out.is_file() and not out.stat().st_mode & 0o222:
        raise UserError(f"{out}: is read-only, so nothing is written; allow it (chmod u+w), or name another file")
    missing = "file is missing here; run in a project's directory, or make one with `lean-finetune init`"
    if not isinstance(read_yaml(template, missing), Mapping):
        raise UserError(f"{template}: must be a mapping of sections; change it")
    from ruamel.yaml import YAML

    yaml = YAML(typ="rt")
    yaml.width = WIDTH
    yaml.composer.warn_double_anchors = False  # As read_yaml, which has read the file.
    content = yaml.load(template.read_text(encoding="utf-8"))
    changed = _update(content, values, "")
    text = io.StringIO()
    yaml.dump(content, text)
    parse_params(parse_yaml(text.getvalue()))
    rewrite_text(out, text.getvalue())
    return changed


def _update(content: MutableMapping[str, Any], values: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """Set values that differ, also in nested sections; return them by dotted key."""
    changed: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping) and isinstance(content.get(key), MutableMapping):
            changed |= _update(content[key], value, f"{prefix}{key}.")
        elif key not in content or content[key] != value:
            content[key] = changed[f"{prefix}{key}"] = value
    return changed
