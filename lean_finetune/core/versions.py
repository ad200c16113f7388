"""Installed libraries, those that this version of lean-finetune accepts, and what to run where one is missing."""

import importlib.metadata
from dataclasses import dataclass

PROJECT = "lean-finetune"


@dataclass(frozen=True, kw_only=True)
class WrongLibrary:
    """A library that is missing or has another version than needed."""

    name: str
    version: str | None
    needed: str

    @property
    def fault(self) -> str:
        """What is wrong."""
        return f"{self.name} is {self.version or 'missing'}; needed: {self.needed}"

    @property
    def remedy(self) -> str:
        """The command that installs the right one."""
        return f'pip install "{self.name}{self.needed}"'  # Quotes that every shell takes, also those of Windows.


def installed_version(name: str) -> str | None:
    """The version of an installed library; None if it is missing."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def wrong_library() -> WrongLibrary | None:
    """The first library that lean-finetune cannot work with; None if all are right.

    Raises:
        importlib.metadata.PackageNotFoundError: lean-finetune itself is not installed.
    """
    from packaging.requirements import Requirement

    for requirement in map(Requirement, importlib.metadata.requires(PROJECT) or []):
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        version = installed_version(requirement.name)
        if version is None or not requirement.specifier.contains(version, prereleases=True):
            return WrongLibrary(name=requirement.name, version=version, needed=str(requirement.specifier))
    return None


def install_extra(extra: str) -> str:
    """The command that installs an extra beside what is there, from the metadata of the installed package."""
    return f'`pip install "{PROJECT}[{extra}]"`'
