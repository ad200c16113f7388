"""bitsandbytes, if it is installed: only runs that pack weights or optimizer state in 8 or 4 bits need it."""

from typing import TYPE_CHECKING, Any, NoReturn

import torch

from lean_finetune.core.errors import UserError

INSTALL = "run `pip install bitsandbytes`"


class _NotInstalled:
    """Stands for bitsandbytes and its parts: nothing is an instance of its classes, and a call is refused."""

    def __getattr__(self, name: str) -> "_NotInstalled":
        if name.startswith("__"):
            raise AttributeError(name)
        return _NotInstalled()

    def __instancecheck__(self, instance: Any) -> bool:
        return False

    def __or__(self, other: Any) -> Any:
        return other

    def __ror__(self, other: Any) -> Any:
        return other

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise UserError(f"bitsandbytes: is not installed, but packed weights and 8-bit optimizers need it; {INSTALL}")


if TYPE_CHECKING:
    import bitsandbytes as bnb
    import bitsandbytes.autograd._functions
    import bitsandbytes.backends.cpu.ops
    import bitsandbytes.backends.default.ops  # noqa: F401
else:
    try:
        import bitsandbytes as bnb
    except ImportError:
        bnb = _NotInstalled()


def operations(*names: str) -> list[Any]:
    """The operations that bitsandbytes registers under these names, without those that it does not have."""
    registered = torch.ops.bitsandbytes
    return [getattr(registered, name).default for name in names if hasattr(registered, name)]


def require_bitsandbytes(key: str, value: str, instead: str) -> None:
    """Refuse a parameter that needs bitsandbytes where it is not installed.

    Args:
        key: the parameter.
        value: what it is set to.
        instead: values that work without it.

    Raises:
        UserError: it is not installed.
    """
    if isinstance(bnb, _NotInstalled):
        raise UserError(f"{key}: needs bitsandbytes, which is not installed; got {value}; {INSTALL}, or set {instead}")
