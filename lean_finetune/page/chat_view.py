"""The view *Chat*: talk to the model that was trained here. It runs `lean-finetune chat`."""

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from html import escape
from typing import Any

import gradio as gr

from cuda_memory.page.html import Html, html
from cuda_memory.terminal import visible, visible_line
from lean_finetune.core.errors import UserError
from lean_finetune.page.project.chat_process import ChatModel

BETWEEN_SECONDS = 0.1
"""Least time between two parts of an answer, each of which the browser draws anew."""
MOST_CHARACTERS = 100_000
AT_ONCE = 8
"""Questions that wait for the model; more wait in the queue."""
WAITS = "Waits for the model: its memory is predicted before it is loaded, and it answers one question at a time …"
Messages = list[dict[str, str]]


def chat_view(model: ChatModel) -> None:
    """Add the view to the tab that is open."""
    shown = gr.Chatbot(
        label="Conversation", elem_id="chat-shown", height=420, render_markdown=False, buttons=[], layout="panel"
    )
    said = gr.HTML('<p class="quiet">The model is loaded with the first question.</p>', elem_id="chat-said")
    question = gr.Textbox("", label="Question", elem_id="chat-question", info="Enter sends it", lines=1, max_lines=8)
    with gr.Row():
        ask = gr.Button("Ask", variant="primary", elem_id="chat-ask")
        stop = gr.Button("Stop the answer", elem_id="chat-stop")
        new = gr.Button("New conversation", elem_id="chat-new")
        unload = gr.Button("Free its memory", elem_id="chat-unload")
    with gr.Accordion("Images", open=False):
        images = gr.File(
            label="In front of the first question, for models that take images",
            file_count="multiple",
            height=160,
            elem_id="chat-images",
        )
        gr.HTML('<p class="quiet">Their memory is predicted too, so the model is loaded again for other images.</p>')
    conversation, questions = gr.State([]), Questions(model)
    gr.on(
        [ask.click, question.submit],
        questions.answer,
        [question, conversation, images],
        [question, shown, conversation, said],
        concurrency_id="chat",
        concurrency_limit=AT_ONCE,
        show_progress="hidden",
        api_visibility="private",
    )
    quick: dict[str, Any] = {"api_visibility": "private", "show_progress": "hidden", "concurrency_limit": None}
    stop.click(questions.stop, None, None, **quick)
    gr.on([new.click, shown.clear], questions.drop, None, [shown, conversation, said], **quick)
    unload.click(questions.unload, None, said, **quick)


class Questions:
    """What the buttons do. Methods, as Gradio passes the request to functions with annotations alone."""

    def __init__(self, model: ChatModel):
        self._model = model
        self._numbers: Counter[str] = Counter()
        """Of each window's last question; a new conversation counts too."""

    def answer(
        self, question: str, conversation: Messages, images: Sequence[str] | None, request: gr.Request
    ) -> Iterator[tuple[Any, ...]]:
        """The question field, the messages as shown, those to go on with, and a note, again and again."""
        asked = question.strip()
        if not asked or len(asked) > MOST_CHARACTERS:
            fault = f"write a question of at most {MOST_CHARACTERS:,} characters"
            yield question, gr.skip(), conversation, _refusal(fault)
            return
        turns = [*conversation, {"role": "user", "content": asked}]
        yield "", _shown(turns), conversation, _quiet(WAITS)
        text, drawn, who = "", 0.0, str(request.session_hash)
        self._numbers[who] += 1
        number = self._numbers[who]
        try:
            for event in self._model.answer(turns, images or [], who):
                if number != self._numbers[who]:
                    self._model.stop(who)
                elif event["event"] == "ready":
                    about = f"{event['model']}: {event['method']} base ({event['reason']}), on {event['device']}"
                    note = f"{about}, conversations of at most {event['tokens']:,} tokens."
                    yield "", _shown(turns), conversation, _quiet(note)
                elif event["event"] == "text":
                    text += event["text"]
                    if time.monotonic() - drawn > BETWEEN_SECONDS:
                        drawn = time.monotonic()
                        yield gr.skip(), _shown(turns, text), conversation, gr.skip()
                else:
                    yield _end(event, turns, text, conversation, note)
        except UserError as error:
            yield asked, _shown(conversation), conversation, _refusal(str(error))
        if number != self._numbers[who]:  # What was drawn meanwhile belongs to no conversation.
            yield gr.skip(), [], [], gr.skip()

    def stop(self, request: gr.Request) -> None:
        """Stop the answer to this window."""
        self._model.stop(str(request.session_hash))

    def drop(self, request: gr.Request) -> tuple[Messages, Messages, str]:
        """Begin a new conversation; an answer that is being made belongs to none."""
        self._numbers[str(request.session_hash)] += 1
        self._model.stop(str(request.session_hash))
        return [], [], ""

    def unload(self) -> Html:
        """Free the model's memory."""
        self._model.end()
        return _quiet("Its memory is free. The next question loads it again.")


def _end(event: Any, turns: Messages, text: str, conversation: Messages, note: str) -> tuple[Any, ...]:
    """The last values: the answer is in the conversation, or its question is left out."""
    if event["event"] == "fault":
        return turns[-1]["content"], _shown(conversation), conversation, _refusal(event["text"])
    if event["stopped"]:
        note = "Stopped; the question is left out of the conversation"
        return gr.skip(), _shown(turns, text), conversation, _quiet(note)
    turns = [*turns, {"role": "assistant", "content": event["text"]}]
    if event["left_out"]:
        note = f"{note} The oldest {event['left_out']} messages were left out to make room."
    return gr.skip(), _shown(turns), turns, _quiet(note)


def _shown(turns: Messages, text: str | None = None) -> Messages:
    """Messages to show; `text` is the answer so far. Gradio takes them for HTML, of which it would remove some."""
    answer = [] if text is None else [{"role": "assistant", "content": text}]
    return [{**turn, "content": escape(visible(turn["content"]), quote=False)} for turn in (*turns, *answer)]


def _quiet(text: str) -> Html:
    return html('<p class="quiet" role="status">{}</p>', text)


def _refusal(text: str) -> Html:
    return html('<p role="alert" class="refusal">Error: {}</p>', visible_line(text))
