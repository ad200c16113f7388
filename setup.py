"""The description of the package: the README without links and images that only a checkout has."""

import re
from pathlib import Path

from setuptools import setup

IN_CHECKOUT = re.compile(r"(!?)\[([^\]]*)\]\((?!https?://)[^)]*\)")


def description() -> str:
    """The README, where links to other files of the checkout are their texts alone."""
    text = IN_CHECKOUT.sub(lambda link: "" if link[1] else link[2], Path("README.md").read_text(encoding="utf-8"))
    return f"{text}\nThe pages in docs/ are in the source distribution.\n"


setup(long_description=description(), long_description_content_type="text/markdown")
