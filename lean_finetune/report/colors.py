"""Colours of all pictures: one colour for each meaning, readable on white and on dark backgrounds."""

CATEGORY_COLORS = {
    "weights": "#4c78a8",
    "quantisation_state": "#8fb8de",
    "adapters": "#2a9d8f",
    "optimizer": "#8a6bbe",
    "gradients": "#c05a9a",
    "workspace": "#8d8d8d",
    "sharding": "#5f7f7f",
    "inputs": "#a9a13c",
    "activations": "#e08a3c",
    "logits": "#d1495b",
    "activation_gradients": "#e6c229",
    "update": "#9a6b4f",
    "kv_cache": "#5aa86a",
}
"""Colour of each category of memory, from the most persistent to the most temporary."""

RECORDED_COLORS = {
    "earlier": CATEGORY_COLORS["sharding"],
    "weights": CATEGORY_COLORS["weights"],
    "autocast": CATEGORY_COLORS["quantisation_state"],
    **{name: CATEGORY_COLORS[name] for name in ("optimizer", "gradients", "activations")},
    "scores": CATEGORY_COLORS["inputs"],
    "logits": CATEGORY_COLORS["logits"],
    "backward": CATEGORY_COLORS["activation_gradients"],
    "unknown": CATEGORY_COLORS["workspace"],
}
"""Colour of each category of recorded memory, from the most persistent to the most temporary."""

TEXT = "currentColor"
"""The colour of the page's text, dark or light."""

SERIES_COLORS = {
    "measured": TEXT,
    "predicted": "#7d8590",
    "live": "#12b886",
    "reserved": "#7048e8",
    "expandable": "#b197fc",
    "process": "#868e96",
    "training": "#5c7cfa",
    "heldout": TEXT,
    "current": TEXT,
    "saves": "#12b886",
    "costs": "#adb5bd",
}
"""Colour of each line or bar that is not a category of memory."""
