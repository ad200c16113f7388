"""The form of *Fit* becomes the words of a command."""

import pytest

pytest.importorskip("gradio", reason="needs the extra [page]")

from lean_finetune.core.errors import UserError
from lean_finetune.page.fit_view import fit_words
from lean_finetune.page.limits import HOSTED, LOCAL

FORM = {
    "gpu": "RTX-4090",
    "gpus": "",
    "method": "usual",
    "length": " 512 ",
    "image": "",
    "per_row": "",
    "sets": "a=1\n\nb=2",
}


def test_fields_are_values_and_never_options():
    """A model named `--apply` would write a file."""
    words = fit_words({**FORM, "model": "--apply"}, LOCAL, has_config=False)
    assert words == ["fit", "--model=--apply", "--gpu=RTX-4090", "--length=512", "--set=a=1", "--set=b=2"]
    assert fit_words({**FORM, "model": "x"}, LOCAL, has_config=True)[1] == "--gpu=RTX-4090"


@pytest.mark.parametrize("model", ["/etc", "../x", "~/x", "a/../b", "a/b/c", "", "a\\b", "https://a.example", "."])
def test_a_hosted_page_reads_no_model_of_the_server(model):
    with pytest.raises(UserError, match="hub id"):
        fit_words({**FORM, "model": model}, HOSTED, has_config=False)
    assert fit_words({**FORM, "model": "Qwen/Qwen3-8B"}, HOSTED, has_config=False)[1] == "--model=Qwen/Qwen3-8B"


def test_a_field_is_one_printable_line_of_limited_length():
    for model in ("x" * 600, "a\x00b"):
        with pytest.raises(UserError, match="characters"):
            fit_words({**FORM, "model": model}, LOCAL, has_config=False)
