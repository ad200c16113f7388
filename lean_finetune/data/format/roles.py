"""Names of roles in published rows, and the role that each one means."""

from collections.abc import Mapping
from typing import Any

from lean_finetune.data.format.example import RowFault
from lean_finetune.data.format.row_values import show

CALL = "tool_call"
"""Role of a turn whose text is the JSON of the assistant's tool calls."""
ROLE_NAMES = {
    **{role: role for role in ("system", "developer", "user", "assistant", "tool")},
    **{"human": "user", "gpt": "assistant", "chatgpt": "assistant", "model": "assistant", "bot": "assistant"},
    **dict.fromkeys(("function", "observation", "function_response", "tool_response"), "tool"),
    **dict.fromkeys((CALL, "function_call"), CALL),
}
"""Each known name and its role, CALL included. Case does not matter."""
ROLES_KEY = "roles"
"""Key of data.columns whose value maps other names of roles to known ones."""
ROLE_KEYS = ("role", "from")
_TURN_LISTS = ("messages", "conversations", "conversation", "prompt", "completion")


def role_of(name: Any, key: str, where: str) -> str:
    """The role of a name, which the turn has under `key`. Raises RowFault if it is unknown."""
    role = ROLE_NAMES.get(name) or ROLE_NAMES.get(name.strip().lower()) if isinstance(name, str) else None
    if role is None:
        raise RowFault(
            f"{where} has {key}={show(name)}; known: {', '.join(ROLE_NAMES)}; change it, or map it in data.columns, "
            "such as {roles: {name: assistant}}"
        )
    return role


def with_roles(row: Mapping[str, Any], roles: Mapping[str, str]) -> Mapping[str, Any]:
    """The row with the names of roles that `roles` maps replaced in its lists of turns."""
    changed = {key: [_renamed(turn, roles) for turn in row[key]] for key in _TURN_LISTS if type(row.get(key)) is list}
    return {**row, **changed}


def _renamed(turn: Any, roles: Mapping[str, str]) -> Any:
    if not isinstance(turn, dict):
        return turn
    names = {key: turn[key] for key in ROLE_KEYS if isinstance(turn.get(key), str)}
    return {**turn, **{key: roles.get(name) or roles.get(name.strip().lower(), name) for key, name in names.items()}}
