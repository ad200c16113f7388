"""The wheel of this checkout."""

import shutil
import sys
from pathlib import Path

from tests.conftest import ROOT
from tests.processes import run_bounded

PACKAGES = ("cuda_memory", "lean_finetune")
BUILD = "import sys; from setuptools.build_meta import build_wheel; build_wheel(sys.argv[1])"
"""As `python -m build --wheel --no-isolation`."""
BUILD_FILES = ("LICENSE", "MANIFEST.in", "README.md", "pyproject.toml", "setup.py")


def tracked_files() -> list[str]:
    """Files of the packages that git tracks, and what builds them."""
    listed = run_bounded(["git", "ls-files", "-z", "--", *PACKAGES, *BUILD_FILES], cwd=ROOT, check=True).stdout
    return [name for name in listed.split("\0")[:-1] if (ROOT / name).is_file()]


def build_wheel(base: Path) -> Path:
    """Build the wheel of the tracked files below an empty directory, without a network."""
    source, out = base / "source", base / "out"
    for name in tracked_files():
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, source / name)
    (source / "tests").mkdir()
    (source / "tests/test_nothing.py").touch()
    out.mkdir()
    run_bounded([sys.executable, "-c", BUILD, str(out)], cwd=source, check=True)
    (built,) = out.iterdir()
    return built
