"""What all documents of the page have in common."""

from cuda_memory.page.html import Html, document, html

STYLE = "body { padding: 0 2px; max-width: none; } h2 { margin-top: 1.2rem; } .results + .columns { margin-top: 1rem; }"


def fault_document(fault: str) -> Html:
    """The page of an error."""
    return document("lean-finetune", html('<p class="verdict bad">{}</p>', fault), STYLE)
