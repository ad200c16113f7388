"""A Modelfile for Ollama, with the chat template in Go's template language."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from lean_finetune.core.errors import UserError
from lean_finetune.data.format.format_base import RowFault

if TYPE_CHECKING:
    from lean_finetune.commands.tuned.conversation import Prompter

ROLES = ("system", "user", "assistant")
PROBES = (
    [("user", "first")],
    [("system", "rules"), ("user", "first"), ("assistant", "answer"), ("user", "second")],
    [("user", "first"), ("assistant", "answer"), ("user", "second"), ("assistant", "more"), ("user", "third")],
)
"""Conversations that a template derived from their parts must render as the model's own does."""
MOST_CONTEXT = 8192
"""Ollama allocates the KV cache of so many tokens when it loads a model."""
OLLAMA_ARCHITECTURES = {
    "Gemma2ForCausalLM",
    "Gemma3ForCausalLM",
    "GemmaForCausalLM",
    "LlamaForCausalLM",
    "MixtralForCausalLM",
    "Phi3ForCausalLM",
    "Qwen2ForCausalLM",
}
"""Architectures that `ollama create` converts itself (convert/convert.go, August 2026); llama.cpp converts others."""
QUOTES = '"""'
"""Around texts of several lines in a Modelfile."""
GGUF = "model.gguf"
"""The file that llama.cpp's converter writes beside the Modelfile."""
Turns = Sequence[tuple[str, str]]


def modelfile(prompter: "Prompter", context: int | None, architecture: str) -> str:
    """The Modelfile of an exported model in its own directory; `context` are the positions of the model."""
    lines = ["FROM ."]
    if architecture not in OLLAMA_ARCHITECTURES:
        lines = [f"# Ollama does not convert {architecture}: llama.cpp's convert_hf_to_gguf.py does.", f"FROM ./{GGUF}"]
    if context:
        lines.append(f"PARAMETER num_ctx {min(context, MOST_CONTEXT)}")
    lines += [f"PARAMETER stop {quoted}" for quoted in map(_quoted, prompter.stop_texts()) if quoted]
    frames = role_frames(prompter)
    if frames is None or any(mark in text for pair in frames.values() for text in pair for mark in (QUOTES, "{{")):
        lines.append(
            "# The chat template is not one text before and after each message: Ollama takes the one it detects."
        )
    else:
        # Ollama adds BOS itself where the tokenizer does.
        begin = frames[""][0].removeprefix(prompter.bos_text)
        lines.append(f'TEMPLATE """{go_template({**frames, "": (begin, "")})}"""')
    return "\n".join(lines) + "\n"


def _quoted(text: str) -> str | None:
    """A text as a Modelfile quotes it, which has no escapes; None if it cannot."""
    if QUOTES in text or text.endswith('"'):
        return None
    return f"{QUOTES}{text}{QUOTES}" if '"' in text or not text.isprintable() else f'"{text}"'


def role_frames(prompter: "Prompter") -> dict[str, tuple[str, str]] | None:
    """The texts before and after a message of each role, and under "" before the first; None if it is not so simple."""
    try:
        texts = [prompter.rendering([{"role": role, "content": text} for role, text in turns]) for turns in PROBES]
    except (RowFault, UserError):  # A template without system messages, or none.
        return None
    alone = texts[0].partition("first")[0]
    pieces, rest = [], texts[1]
    for _, content in PROBES[1]:
        before, _, rest = rest.partition(content)
        pieces.append(before)
    before_user = _common_end(alone, _common_end(pieces[1], pieces[3]))
    begin = alone.removesuffix(before_user)
    after_answer = pieces[3].removesuffix(before_user)
    after_user = _common_start(rest, after_answer)
    frames = {
        "": (begin, ""),
        "system": (pieces[0].removeprefix(begin), pieces[1].removesuffix(before_user)),
        "user": (before_user, after_user),
        "assistant": (rest.removeprefix(after_user), after_answer),
    }
    return frames if [rendered(frames, turns) for turns in PROBES] == texts else None


def _common_end(a: str, b: str) -> str:
    """The longest text with which both end."""
    return _common_start(a[::-1], b[::-1])[::-1]


def _common_start(a: str, b: str) -> str:
    """The longest text with which both start."""
    size = next((k for k, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    return a[:size]


def rendered(frames: dict[str, tuple[str, str]], turns: Turns) -> str:
    """A conversation as `go_template` renders it, up to the start of the assistant's answer."""
    messages = "".join(f"{frames[role][0]}{content}{frames[role][1]}" for role, content in turns)
    return f"{frames[''][0]}{messages}{frames['assistant'][0]}"


def go_template(frames: dict[str, tuple[str, str]]) -> str:
    """The frames in Go's template language."""
    cases = []
    for number, role in enumerate(ROLES):
        (before, after), word = frames[role], "else if" if number else "if"
        cases.append(f'{{{{ {word} eq .Role "{role}" }}}}{before}{{{{ .Content }}}}{after}')
    messages = f"{{{{ range .Messages }}}}{''.join(cases)}{{{{ end }}}}{{{{ end }}}}"
    return f"{frames[''][0]}{messages}{frames['assistant'][0]}"
