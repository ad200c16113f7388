"""pip can install the versions that the README names as tested."""

import re
import tomllib
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]


def test_pyproject_accepts_each_version_that_the_readme_names():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    bounds = {need.name: need.specifier for need in map(Requirement, project["dependencies"])}
    tried = re.search(r"^Tested with ([^;]*);", (ROOT / "README.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert tried
    versions = re.findall(r"([a-z]+) ((?:[\d.]+(?:, | and )?)+)", tried[1])
    assert {name for name, _ in versions} == {"torch", "transformers", "peft", "bitsandbytes"}
    for name, listed in versions:
        for version in re.findall(r"\d+\.\d+\.\d+", listed):
            assert bounds[name].contains(version), f"{name} {version}"
