"""Documents inside the page, each in a frame where no script runs."""

import html

FRAME = (
    '<iframe class="answer" title="{title}" tabindex="0" sandbox="allow-same-origin" srcdoc="{document}" onload="'
    "const inner = this.contentDocument.documentElement, fit = () => this.style.height = inner.scrollHeight + 4 + 'px';"
    'new ResizeObserver(fit).observe(inner); fit()"></iframe>'
)
"""The sandbox allows no scripts, forms, links or other windows. `allow-same-origin` lets the page read the height."""


def frame(title: str, document: str) -> str:
    """A frame that is as high as its document."""
    return FRAME.format(title=html.escape(title), document=html.escape(document))
