"""The command `lean-finetune chat`: talk to a tuned model in the terminal."""

import io
import signal
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from cuda_memory.terminal import echo, echo_text, json_text
from cuda_memory.units import counted
from cuda_memory.user_paths import PATH
from lean_finetune.commands.fit_images import SHOWN_FILES
from lean_finetune.core.errors import UsageFault, UserError
from lean_finetune.core.stage_command import StageCommand
from lean_finetune.pinning.config_file import refuse_no_model

if TYPE_CHECKING:
    from lean_finetune.commands.tuned.conversation import Prompter
    from lean_finetune.commands.tuned.prompt_images import ShownImages
    from lean_finetune.commands.tuned.tuned_model import TunedModel

MODEL = click.option(
    "--model",
    type=PATH,
    default=Path("data/tuned"),
    show_default=True,
    help="The directory of an adapter or a full model.",
)
BITS = click.option(
    "--bits", type=click.Choice(["4", "8", "16"]), help="Bits of an adapter's base. Default: as trained, or 4."
)
NEW_TOKENS = click.option(
    "--max-new-tokens", type=click.IntRange(min=1), default=512, show_default=True, help="Longest answer in tokens."
)
LENGTH = 4096
"""Tokens of a conversation where the model can read more."""
COMMANDS = "/reset starts again, Ctrl-C stops an answer, /exit or Ctrl-D ends"


class ChatCommand(StageCommand):
    """With --json, an error of the command is its last event."""

    def echo_report(self, error: Mapping[str, Any]) -> None:
        """See the base class."""
        echo_text(json_text({"event": "error", **error}))


@click.command(cls=ChatCommand)
@MODEL
@BITS
@NEW_TOKENS
@click.option("--length", type=click.IntRange(min=8), help=f"Tokens of the conversation. Default: {LENGTH}, or fewer.")
@click.option(
    "--temperature", type=click.FloatRange(min=0), default=0.0, show_default=True, help="0: always the likeliest token."
)
@click.option("--system", help="A system message.")
@SHOWN_FILES
@click.option("--json", "as_json", is_flag=True, help="Read conversations and print events, both as JSON lines.")
def chat(
    model: Path,
    bits: str | None,
    max_new_tokens: int,
    length: int | None,
    temperature: float,
    system: str | None,
    files: tuple[str, ...],
    as_json: bool,
) -> None:
    """Chat with a tuned model. Answers appear as they are made.

    Its memory is predicted first: the conversation is as long as fits, and its oldest turns are left out beyond that.
    Lines are read from standard input, so a file of questions works too. With --json, each line has all messages of a
    conversation: {"messages": [{"role": "user", "content": "Hello"}]}
    """
    refuse_no_model(model)
    from lean_finetune.commands.tuned.chat_lines import ChatLines, event
    from lean_finetune.commands.tuned.conversation import Prompter
    from lean_finetune.commands.tuned.prompt_images import shown_images
    from lean_finetune.commands.tuned.tuned_model import find_tuned
    from lean_finetune.evaluate.generate import answers_of_batch, set_decoding, stop_ids
    from lean_finetune.train.process.training_device import training_device

    tuned, device = find_tuned(model, bits), training_device()
    prompter = Prompter(tuned.directory, tuned.vocabulary)
    prompter.refuse_without_template()
    ends = prompter.stops()
    with shown_images(tuned, prompter, files) as shown:
        tuned = tuned if shown is None else shown.tuned
        limit = conversation_limit(tuned, length, max_new_tokens, shown)
        lm = tuned.load(device)
        stops = sorted({*stop_ids(lm, None, [], set()), *ends})
        set_decoding(lm, stops=stops, max_new_tokens=max_new_tokens, pad_id=prompter.pad_id, temperature=temperature)

        def answer(ids: list[int], show: Callable[[str], None]) -> str:
            streamer = text_streamer(prompter, set(stops), show)
            arguments = None if shown is None else shown.arguments
            (found,) = answers_of_batch(lm, tuned.weights, [ids], stops, prompter.pad_id, device, streamer, arguments)
            return prompter.text(found)

        opening = [{"role": "system", "content": system}] if system else []
        ids_of, most = prompter.of_messages if shown is None else shown.ids, limit - max_new_tokens
        method, reason = tuned.weights.method, tuned.reason
        if as_json:
            event("ready", model=str(tuned.directory), method=method, reason=reason, device=str(device), tokens=limit)
            return ChatLines(ids_of, most, opening).run(answer)
        note(f"{tuned.directory}: {method} base ({reason}), on {device}. {COMMANDS}.")
        ChatSession(ids_of, most, opening).run(lambda ids: answer(ids, partial(echo_text, nl=False)))


def note(text: str) -> None:
    """Print a note on standard error, so that standard output has the answers alone."""
    echo(text, err=True)


def conversation_limit(
    tuned: "TunedModel", length: int | None, new_tokens: int, shown: "ShownImages | None" = None
) -> int:
    """Tokens of a conversation with its answer that the model can read and the free memory has room for.

    Raises:
        UserError: --length is too long for the model or the memory.
    """
    from lean_finetune.commands.tuned.answer_memory import longest_that_fits

    positions = tuned.positions
    if length is not None and positions is not None and length > positions:
        raise UsageFault(f"--length: the model reads at most {positions} tokens; got {length}; lower it")
    wanted = length or min(LENGTH, positions or LENGTH)
    least = 0 if shown is None else shown.tokens
    if new_tokens + least >= wanted:
        beside = "" if shown is None else f" beside {least} of the {shown.name}"
        raise UsageFault(
            f"--max-new-tokens: must leave room for a question in the {wanted} tokens of the conversation; got "
            f"{new_tokens}{beside}; lower it, or raise --length"
        )
    known = None if shown is None else shown.known
    fits = longest_that_fits(tuned, wanted, new_tokens, least=least, shown=known)
    if fits < wanted:
        note(f"note: {fits} of {wanted} tokens fit the free memory (predicted)")
    return fits


def text_streamer(prompter: "Prompter", stops: set[int], show: Callable[[str], None]) -> Any:
    """A streamer of `generate` that calls `show` with each token's text as soon as its characters are complete."""
    from tokenizers.decoders import DecodeStream
    from transformers.generation.streamers import BaseStreamer

    class Printer(BaseStreamer):
        def __init__(self) -> None:
            self._stream, self._is_prompt = DecodeStream(skip_special_tokens=True), True

        def put(self, value: Any) -> None:
            if self._is_prompt:  # `generate` sends the prompt first.
                self._is_prompt = False
                return
            for number in value.flatten().tolist():
                if number not in stops and (text := self._stream.step(prompter.tokenizer, number)):
                    show(text)

        def end(self) -> None:
            sys.stdout.flush()

    return Printer()


class ChatSession:
    """Reads lines and answers them, within a limit of tokens."""

    def __init__(
        self, ids_of: Callable[[list[dict[str, Any]]], list[int]], most_tokens: int, opening: list[dict[str, Any]]
    ):
        """Start with the messages of `opening`; `ids_of` are the ids of a prompt, which has at most `most_tokens`."""
        self._ids_of, self._most, self._opening = ids_of, most_tokens, opening
        self._turns: list[dict[str, Any]] = []

    def run(self, answer: Callable[[list[int]], str]) -> None:
        """Answer each line until the end of the input. Ctrl-C stops an answer, and between answers the conversation."""
        if isinstance(sys.stdin, io.TextIOWrapper):
            sys.stdin.reconfigure(errors="replace")  # A file of questions may be in another encoding.
        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            while (line := self._read()) not in (None, "/exit"):
                if line == "/reset":
                    self._turns = []
                elif line and (ids := self._prompt(line)) is not None:
                    self._answer(ids, answer)
        except KeyboardInterrupt:
            echo(err=True)
        finally:
            signal.signal(signal.SIGINT, before)

    def _answer(self, ids: list[int], answer: Callable[[list[int]], str]) -> None:
        """Add the answer to the conversation, or remove its question if it is stopped."""
        try:
            self._turns.append({"role": "assistant", "content": answer(ids)})
            echo()
        except KeyboardInterrupt:
            self._turns.pop()
            echo(err=True)
            note("note: stopped; the question is left out of the conversation")

    def _read(self) -> str | None:
        """The next line; None at the end of the input."""
        if not sys.stdin.isatty():
            line = sys.stdin.readline()
            return line.strip() if line else None
        with suppress(ImportError):  # Windows, whose terminal edits lines itself.
            import readline  # noqa: F401 - lets `input` edit lines and recall earlier ones

        try:
            return input("> ").strip()
        except EOFError:
            return None

    def _prompt(self, line: str) -> list[int] | None:
        """The prompt for a new line, without the oldest turns that are too much; None if the line alone is too long."""
        from lean_finetune.commands.tuned.chat_lines import TooLong, fitting
        from lean_finetune.core.errors import RowFault

        turns = [*self._turns, {"role": "user", "content": line}]
        try:
            ids, self._turns = fitting(self._ids_of, self._most, self._opening, turns)
        except RowFault as fault:
            raise UserError(f"--model: {fault}") from None
        except TooLong as fault:
            note(f"note: this line has {counted(fault.tokens, 'token')} and {self._most} fit; it is left out")
            return None
        for _ in range(0, len(turns) - len(self._turns), 2):
            note("note: the oldest turn is left out to make room")
        return ids
