"""Documents inside the page, each in a frame where no script runs."""

import html
from typing import Any

FRAME = (
    '<iframe class="answer" title="{title}" tabindex="0" sandbox="allow-same-origin" srcdoc="{document}" onload="'
    "const inner = this.contentDocument.documentElement, fit = () => this.style.height = inner.scrollHeight + 4 + 'px';"
    'new ResizeObserver(fit).observe(inner); fit()"></iframe>'
)
"""The sandbox allows no scripts, forms, links or other windows. `allow-same-origin` lets the page read the height."""


def frame(title: str, document: str) -> str:
    """A frame that is as high as its document."""
    return FRAME.format(title=html.escape(title), document=html.escape(document))


LIVE = (
    '<iframe class="answer" title="{title}" tabindex="0" sandbox="allow-same-origin" onload="'
    "const inner = this.contentDocument.documentElement, fit = () => this.style.height = inner.scrollHeight + 4 + 'px';"
    'new ResizeObserver(fit).observe(inner); fit()"></iframe>'
)
CHANGE = """
const frame = element.querySelector('iframe');
let isLoaded = false;
const show = () => {
  if (!props.value) return;
  const now = frame.contentDocument?.body;
  if (!isLoaded || !now) { isLoaded = true; frame.srcdoc = props.value; return; }
  const next = [...new DOMParser().parseFromString(props.value, 'text/html').body.children];
  next.forEach((part, place) => {
    const old = now.children[place];
    if (!old) now.append(part);
    else if (old.outerHTML !== part.outerHTML) old.replaceWith(part);
  });
  while (now.children.length > next.length) now.lastElementChild.remove();
};
watch('value', show);
show();
"""
"""Replaces the parts of the body that have changed, so that nothing flickers and the reader's place stays."""


def live_frame(title: str) -> dict[str, Any]:
    """Arguments of `gr.HTML` for a frame that shows the component's value, a document, again and again."""
    return {"html_template": LIVE.format(title=html.escape(title)), "js_on_load": CHANGE}
