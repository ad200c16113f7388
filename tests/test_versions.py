"""Versions that README says were tried can be installed, and `make test-newest` leaves the checkout as it was."""

import re
import sys
import tomllib
from pathlib import Path

from packaging.requirements import Requirement

from tests.processes import run_bounded

ROOT = Path(__file__).parents[1]


def test_pyproject_accepts_each_version_that_readme_says_was_tried():
    """A release that works and that pip refuses."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    bounds = {need.name: need.specifier for need in map(Requirement, project["dependencies"])}
    tried = re.search(r"^Tried with ([^;]*);", (ROOT / "README.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert tried
    versions = re.findall(r"([a-z]+) ((?:[\d.]+(?:, | and )?)+)", tried[1])
    assert {name for name, _ in versions} == {"torch", "transformers", "peft", "bitsandbytes"}
    for name, listed in versions:
        for version in re.findall(r"\d+\.\d+\.\d+", listed):
            assert bounds[name].contains(version), f"{name} {version}"


def test_the_newest_releases_are_installed_without_upper_bounds_where_git_does_not_look():
    """`make test-newest` that tests pyproject.toml's own bounds, or whose 6 GB show up in `git status`."""
    planned = run_bounded(["make", "-n", "test-newest"], cwd=ROOT, check=True)
    listing = next(line for line in planned.stdout.splitlines() if "tomllib" in line).partition(" -c ")[2]
    code = listing.partition(" > ")[0].strip("'")
    needed = run_bounded([sys.executable, "-c", code], cwd=ROOT, check=True).stdout
    assert {"torch>=2.11", "pytest>=9"} <= set(needed.split())
    assert run_bounded(["git", "check-ignore", "-q", ".venv-newest/bin/python"], cwd=ROOT).returncode == 0
