"""Write a template for `dvc plots show --html-template` that contains its scripts, so that plots are drawn offline.

DVC's own template loads Vega from a content delivery network. Prints the names of the plots that have data.
"""

import sys
from collections.abc import Iterator
from pathlib import Path

from ruamel.yaml import YAML

# DVC replaces {plot_divs}. The function keeps the bundle's names out of the page.
PAGE = """<!DOCTYPE html>
<html lang="en">
<head><meta charset="utf-8"><link rel="icon" href="data:,"><title>Plots</title>
<script>(function () {BUNDLE})();</script>
</head>
<body>{plot_divs}</body>
</html>
"""


def write_template(path: Path) -> None:
    """Write the template with the scripts of vl-convert-python, the extra `plots`."""
    from vl_convert import javascript_bundle

    bundle = javascript_bundle("window.vegaEmbed = vegaEmbed;")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(PAGE.replace("BUNDLE", f"{{{bundle}}}"), encoding="utf-8")


def plots_with_data(directory: Path) -> Iterator[str]:
    """Yield the names of the plots in dvc.yaml whose files exist; DVC draws an empty place for any other."""
    for plot in YAML(typ="safe").load((directory / "dvc.yaml").read_text(encoding="utf-8"))["plots"]:
        for name, properties in plot.items():
            if all((directory / file).exists() for file in properties["y"]):
                yield name


if __name__ == "__main__":
    write_template(Path(sys.argv[1]))
    print(*plots_with_data(Path()))
