"""Write a template for `dvc plots show --html-template` that contains its scripts, so that plots are drawn offline.

DVC's own template loads Vega from a content delivery network.
"""

import sys
from pathlib import Path

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


if __name__ == "__main__":
    write_template(Path(sys.argv[1]))
