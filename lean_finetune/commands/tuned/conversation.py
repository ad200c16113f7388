"""Conversations with a tuned model, here or in Ollama."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lean_finetune.commands.tuned.tuned_files import named_by_option
from lean_finetune.core.errors import RowFault, UserError
from lean_finetune.data.chat.control_tokens import TextSegment
from lean_finetune.data.chat.tokenizer_files import compile_own_template, has_template
from lean_finetune.data.encode.row_tokenizer import RowTokenizer
from lean_finetune.data.encode.tokenizer_engine import load_engine
from lean_finetune.evaluate.generate import special_ids

TEMPLATE_DATE = "2024-07-26"
"""Today's date for templates that write it: the default of data.template_date."""
ANSWER = "ANSWER"
"""An answer of which the end of its turn is looked up."""
Message = dict[str, Any]


class Prompter:
    """Makes prompts as training made them: text of a user never becomes a control token."""

    def __init__(self, directory: Path, vocabulary: int | None = None):
        """Read the tokenizer of a model's directory, and its chat template if it has one.

        `vocabulary` is the number of tokens for which the model has embeddings, if prompts are for it.

        Raises:
            UserError: there is no tokenizer, or the tokenizer or the template is broken.
        """
        if not (directory / "tokenizer.json").is_file():
            raise UserError(f"--model: {directory} has no tokenizer.json; copy the tokenizer of the base model there")
        with named_by_option():
            self._engine = load_engine("tokenizers", directory)
            self.rows = RowTokenizer(directory, self._engine)
            self._template = compile_own_template(directory, TEMPLATE_DATE) if has_template(directory) else None
        self.tokenizer, self.pad_id = self._engine.tokenizer, self.rows.pad.number
        self.directory, self._vocabulary = directory, vocabulary

    def of_messages(self, messages: Sequence[Message], tools: list[Any] | None = None) -> list[int]:
        """The ids of a conversation up to the start of the assistant's next turn.

        Raises:
            UserError: the model has no chat template.
            RowFault: the template refuses the conversation, or the model cannot read it.
        """
        return self.ids([TextSegment(self.rendering(self.rows.guard.protect_messages(messages), tools), False)])

    def rendering(self, messages: list[Message], tools: list[Any] | None = None) -> str:
        """The text of a conversation up to the start of the assistant's next turn; raises as `of_messages`."""
        self.refuse_without_template()
        assert self._template is not None
        return self._template.bounded_text(messages, tools, add_generation_prompt=True)

    def refuse_without_template(self) -> None:
        """Raise UserError if the model has no chat template."""
        if self._template is None:
            raise UserError(
                f"--model: {self.directory} has no chat template; give prompts with the key 'prompt' to "
                "`lean-finetune generate`, or add a chat_template.jinja"
            )

    def of_text(self, prompt: str) -> list[int]:
        """The ids of plain text, after BOS where the tokenizer adds it."""
        return self.ids([TextSegment(self.rows.bos_text + self.rows.guard.protect(prompt), False)])

    def ids(self, segments: list[TextSegment]) -> list[int]:
        """The ids of a rendering. Raises RowFault if the model cannot read it."""
        for text, _ in segments:
            self.rows.guard.check(text)
        ids = [int(number) for number in self.rows.encode_rows([segments]).ids]
        if not ids:
            raise RowFault("the prompt has no tokens; write some text")
        if self._vocabulary is not None and max(ids) >= self._vocabulary:
            token = self.tokenizer.id_to_token(max(ids))
            raise RowFault(f"the model has no embedding for the token {token!r}; use the tokenizer of this model")
        return ids

    def stops(self) -> list[int]:
        """Tokens that end an answer: the tokenizer's end of sequence, and the template's end of a turn.

        Raises:
            UserError: the template refuses a question with its answer.
        """
        found = {self.rows.eos_id} - {None}
        if self._template is not None:
            question = {"role": "user", "content": "Hello"}
            # Some templates end a turn by the token that begins the next one, or only if one follows.
            messages = [question, {"role": "assistant", "content": ANSWER}, question]
            try:
                after = self._template.bounded_text(messages, None).rpartition(ANSWER)[2]
                self.rows.guard.check(after)
            except RowFault as refusal:
                raise UserError(f"--model: {self._template.name}: a question with its answer: {refusal}") from None
            special = special_ids(self.tokenizer)
            ids = self.tokenizer.encode(after, add_special_tokens=False).ids
            found |= {next((number for number in ids if number in special), None)} - {None}
        return sorted(number for number in found if number is not None)

    @property
    def bos_text(self) -> str:
        """BOS if the tokenizer itself adds it before a text, else an empty text."""
        return self.rows.bos_text

    def stop_texts(self) -> list[str]:
        """The texts of `stops`."""
        return [str(self.tokenizer.id_to_token(number)) for number in self.stops()]

    def text(self, ids: Sequence[int]) -> str:
        """The text of an answer."""
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=True))


# A Modelfile for Ollama, with the chat template in Go's template language.

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
    "Gemma3ForConditionalGeneration",
    "GemmaForCausalLM",
    "LlamaForCausalLM",
    "Mistral3ForConditionalGeneration",
    "MixtralForCausalLM",
    "Phi3ForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen2_5_VLForConditionalGeneration",
    "Qwen3VLForConditionalGeneration",
    "Qwen3VLMoeForConditionalGeneration",
}
"""Architectures that `ollama create` converts itself (convert/convert.go, August 2026); llama.cpp converts others."""
QUOTES = '"""'
"""Around texts of several lines in a Modelfile."""
GGUF, MMPROJ = "model.gguf", "mmproj-model.gguf"
"""Files that llama.cpp's converter writes beside the Modelfile: the language model, and its other parts."""
Turns = Sequence[tuple[str, str]]


def modelfile(prompter: "Prompter", context: int | None, architecture: str, *, other_parts: bool = False) -> str:
    """The Modelfile of an exported model in its own directory; `context` are the positions of the model.

    `other_parts`: llama.cpp converts those beside the language model, into a file of their own.
    """
    lines = ["FROM ."]
    if architecture not in OLLAMA_ARCHITECTURES:
        lines = [f"# Ollama does not convert {architecture}: llama.cpp's convert_hf_to_gguf.py does.", f"FROM ./{GGUF}"]
        lines += [f"FROM ./{MMPROJ}"] if other_parts else []
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
