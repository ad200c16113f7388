"""Public chat templates: how many render rows right, refuse them with a reason, or train wrong tokens.

`python -m benchmarks.templates DIR… [--rows FILE]…` tries every .jinja file below the directories, each with a
tokenizer that has the template's control tokens. Rows are synthetic ones with tools, reasoning and several turns, and
the first ones of the files. "wrong" is decided by reading the decoded tokens, without the code that made them: every
answer is in a trained span, no text of others is, spans begin and end at control tokens, and ids have the text's
control tokens. The text is compared with transformers' rendering; "not compared" counts the right rows of which it
makes none. Where X_training.jinja lies beside X.jinja, its generation marks are compared with the spans of X.
--quick: 5 rows of each file instead of 50.
"""

import json
import re
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import orjson
from tokenizers import AddedToken, Tokenizer

from benchmarks.harness import Measured, at_least, at_most, benchmark
from benchmarks.template_reading import DATE, as_row, fault_of, first_control, read_row, rendered, renderings_of
from benchmarks.template_rows import public_rows, synthetic_rows
from lean_finetune.core.errors import UserError
from lean_finetune.data.chat.tokenizer_files import read_special_tokens
from lean_finetune.data.format.format_base import Conversation, SourceFormat
from lean_finetune.data.read.row_block import RowBlock
from lean_finetune.data.shards.tokenize_block import BlockTokenizer, TokenSettings

TINY = Path("lean_finetune/tiny")
ROWS_OF_A_FILE, QUICK_ROWS_OF_A_FILE = 50, 5
CONTROL = re.compile(
    r"<\|[^<>|\s{}'+]{1,40}\|>|<｜[^<>｜\s{}'+]{1,40}｜>|<\|[a-z_]{2,20}>|<[a-z_]{2,20}\|>"
    r"|\[/?[A-Z_]{3,30}\]|\[\|[a-z]{2,20}\|\]|<SPECIAL_\d+>|\]~!?b[\[\]]|\[e~\["
    r"|</?s>|<(?:bos|eos|sop|sep)>|\[gMASK\]|<(?:start|end)_of_[a-z]+>|</?seed:[a-z_]{2,30}>"
)
"""What control tokens look like."""
PLAIN = re.compile(r"</?(?:think|tool_call|tool_response|arg_key|arg_value)>|</?minimax:tool_call>")
"""Tokens that are added to vocabularies without being called special."""
EOS, BOS = "</s>", "<s>"
NOT_COMPARED = "not compared"
"""Right rows that transformers refuses in every form, so that their text was not compared with its rendering."""
KINDS = ("right", NOT_COMPARED, "refused", "wrong", "marks differ")


def measure(quick: bool, directories: Sequence[Path], rows: Sequence[Path]) -> Measured:
    """Try every template."""
    paths = [path for directory in directories for path in sorted(directory.rglob("*.jinja"))]
    if not paths:
        raise UserError(f"{' '.join(map(str, directories))}: no .jinja file is below; name directories of templates")
    count = QUICK_ROWS_OF_A_FILE if quick else ROWS_OF_A_FILE
    given = [*synthetic_rows(), *(row for path in rows for row in public_rows(path, count))]
    results = [_row(path, given) for path in paths]
    reasons = Counter(reason for result in results for reason in result.pop("reasons"))
    table = [{"template": name, **result} for name, result in ((one.pop("template"), one) for one in results)]
    total = {key: sum(row[key] for row in table) for key in KINDS}
    summary = [{"template": "all", "loads": f"{sum(r['loads'] == 'yes' for r in table)} of {len(table)}", **total}]
    summary += [{"template": f"refused: {reason}", "refused": number} for reason, number in reasons.most_common()]
    bars = [
        at_least("templates", len(table), 1),
        at_most("rows trained wrongly", total["wrong"], 0),
        at_most("right rows whose text was not compared", total[NOT_COMPARED], 0),
        at_most("rows whose spans are not those of the marked template", total["marks differ"], 0),
    ]
    return Measured(rows=[*table, *summary], bars=bars)


def _row(path: Path, given: Sequence[tuple[str, Conversation]]) -> dict[str, Any]:
    """What comes of all rows with one template."""
    found: dict[str, Any] = {"template": f"{path.parent.name}/{path.stem}", "loads": "yes"}
    counts = Counter[str]()
    reasons: list[str] = []
    first = ""
    with tempfile.TemporaryDirectory() as place:
        for (name, _), outcome in zip(given, outcomes(path, [one for _, one in given], Path(place)), strict=True):
            kind, detail = outcome
            counts[kind] += 1
            if kind == "refused":
                reasons.append(detail)
            elif kind == "right":
                counts[NOT_COMPARED] += detail == NOT_COMPARED
            elif kind != "right":
                first = first or f"{name}: {detail}"
            if kind == "unloaded":
                counts = Counter({"refused": len(given)})
                reasons, found["loads"], first = [detail] * len(given), "no", detail
                break
    return (
        found
        | {kind: counts[kind] for kind in KINDS}
        | {
            "first fault": first or None,
            "reasons": reasons,
        }
    )


Outcome = tuple[str, str]
"""(right, refused, wrong, marks differ or unloaded; the reason, or `NOT_COMPARED`)."""


def outcomes(path: Path, given: Sequence[Conversation], place: Path) -> Iterator[Outcome]:
    """The outcome of each row with one template; a single one if the template is refused as a whole."""
    source = path.read_text(encoding="utf-8")
    tokenizer, stop_ids = save_tokenizer(place, source)
    try:
        made = tokenize(place, given, stop_ids)
    except UserError as error:
        yield "unloaded", _reason(str(error))
        return
    named = read_special_tokens(place)
    has_marks = re.search(r"{%-?\s*generation\s*-?%}", source) is not None  # Then its author chose what is trained.
    header = "" if has_marks else first_control(_generation_prompt(source, named), tokenizer)
    marked = path.with_name(f"{path.stem}_training.jinja")
    marks = marked.read_text(encoding="utf-8") if marked.exists() else None
    for number, conversation in enumerate(given):
        result = made[number]
        if isinstance(result, str):
            ours = (
                " although transformers renders it"
                if "refuses the row" in result and rendered(source, conversation, named)
                else ""
            )
            yield "refused", _reason(result) + ours
            continue
        row = read_row(conversation, *result, tokenizer)
        renderings = renderings_of(conversation, source, named)
        if fault := fault_of(row, renderings, tokenizer, header, has_marks):
            yield "wrong", fault
        elif marks and (fault := _marks_fault(row.pieces, conversation, marks, named)):
            yield "marks differ", fault
        else:
            yield "right", "" if renderings else NOT_COMPARED


def tokenize(
    place: Path, given: Sequence[Conversation], stop_ids: tuple[int, ...]
) -> list[tuple[list[int], list[int]] | str]:
    """(ids, spans) of each row, or why it is refused. Raises UserError if the template is refused."""
    settings = TokenSettings(
        tokenizer_directory=place,
        sources=(SourceFormat(format="messages", columns={}),),
        ignore_columns=(),
        files=1,
        chat_template="tokenizer",
        template_date=DATE.isoformat(),
        train_on="assistant",
        end_of_turn="auto",
        stop_ids=stop_ids,
        max_length=1 << 20,
        over_length="truncate",
        on_bad_row="skip",
        drop_duplicates=False,
        heldout_fraction=0.0,
        heldout_seed=0,
        engine="tokenizers",
    )
    payload = b"".join(orjson.dumps(as_row(conversation)) + b"\n" for conversation in given)
    made = BlockTokenizer(settings)(RowBlock(kind="lines", payload=payload, first_row=0))
    found: dict[int, tuple[list[int], list[int]] | str] = {}
    for row in made.train.rows.to_pylist():
        found[row["source_row"]] = (row["input_ids"], row["loss_spans"])
    for reject in made.tally.rejects:
        found[reject.row] = reject.reason
    return [found[number] for number in range(len(given))]


def save_tokenizer(place: Path, source: str) -> tuple[Tokenizer, tuple[int, ...]]:
    """The shipped tokenizer with the control tokens that a template writes, and the ids at which generation stops."""
    renderings = list(_renderings(source))
    texts = [source, *renderings]
    control = {token for text in texts for token in CONTROL.findall(text)}
    tokenizer = Tokenizer.from_file(str(TINY / "tokenizer.json"))
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in sorted({*control, BOS, EOS})])
    plain = sorted({token for text in texts for token in PLAIN.findall(text)})
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in plain])
    tokenizer.save(str(place / "tokenizer.json"))
    first = renderings[0].partition("zqa1.")[2] if renderings else ""
    ends = CONTROL.findall(first) or [EOS]
    ends.sort(key=lambda token: token not in (EOS, "<|END_OF_TURN_TOKEN|>"))  # The latter is Cohere's.
    names = {"bos_token": BOS, "eos_token": ends[0], "pad_token": "<|pad|>", "unk_token": BOS}
    (place / "tokenizer_config.json").write_text(json.dumps(names))
    (place / "chat_template.jinja").write_text(source, encoding="utf-8")
    # Where nothing ends an answer, what follows it does, as generation_config.json of GLM-4.5 says.
    following = [match[1] for text in renderings for match in re.finditer(rf"zqa\d+\.\s*({CONTROL.pattern})", text)]
    behind_calls = [
        match[1]
        for text in renderings
        for match in re.finditer(rf"zqc\d+x\d(?:(?!zq).)*?({CONTROL.pattern})", text, re.DOTALL)
    ]
    heads = CONTROL.findall(_generation_prompt(source, names))  # They follow an answer where another one does.
    stops = [ends[0]] if ends[0] in first else [EOS, *(one for one in [*following, *behind_calls] if one not in heads)]
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    return tokenizer, tuple(vocabulary[token] for token in dict.fromkeys(stops))


def _renderings(source: str) -> Iterable[str]:
    """The template's renderings of the synthetic rows, where transformers renders them."""
    named = {"bos_token": BOS, "eos_token": EOS}
    for _, conversation in synthetic_rows():
        if any("<|im_end|>" in message["content"] for message in conversation.messages):
            continue
        for prompt in (False, True):
            if made := rendered(source, conversation, named, add_generation_prompt=prompt):
                yield made[0]


def _generation_prompt(source: str, named: Mapping[str, Any]) -> str:
    """What the template adds before an answer; empty where it adds nothing or refuses a lone question."""
    question = Conversation(messages=[{"role": "user", "content": "Q"}], tools=None)
    without, prompt = (rendered(source, question, named, add_generation_prompt=asked) for asked in (False, True))
    return prompt[0].removeprefix(without[0]) if without and prompt and prompt[0].startswith(without[0]) else ""


def _marks_fault(
    pieces: Sequence[tuple[str, bool]], conversation: Conversation, marks: str, named: Mapping[str, Any]
) -> str | None:
    """Compare spans with the marks of another template, where it renders the same text.

    Marks may begin with a part of the generation prompt, or with the end of their turn's prompt. They may end with
    blanks behind the end of the turn, and leave out the token behind a call at which Gemma 4's generation stops.
    """
    if conversation.context:
        return None
    text, marked = _marks(conversation, marks, named)
    if not text.startswith("".join(part for part, _ in pieces)):
        return None
    place, spans = 0, []
    for part, is_trained in pieces:
        if is_trained:
            spans.append((place, place + len(part)))
        place += len(part)
    prompt, prompts = _generation_prompt(marks, named), _prompts(conversation, marks, named)
    left_out = [text[start:end] for start, end in _outside(marked, spans)]
    added = [text[start:end] for start, end in _outside(spans, marked)]
    for fault in (one for one in left_out if one not in prompt and not any(p.endswith(one) for p in prompts)):
        return f"marked and not trained: {fault[:50]!r}"
    for fault in (one for one in added if not CONTROL.fullmatch(one)):
        return f"trained and not marked: {fault[:50]!r}"
    return None


def _prompts(conversation: Conversation, source: str, named: Mapping[str, Any]) -> list[str]:
    """What a template renders before each answer."""
    before = (replace(conversation, messages=conversation.messages[:turn]) for turn in conversation.turns())
    made = (rendered(source, one, named, add_generation_prompt=True) for one in before)
    return [one[0] for one in made if one is not None]


def _outside(ranges: Sequence[tuple[int, int]], others: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """The parts of ranges that are in no other one; both are in order."""
    for start, end in ranges:
        for first, last in [*(one for one in others if one[1] > start and one[0] < end), (end, end)]:
            if start < first:
                yield start, first
            start = max(start, last)


def _marks(conversation: Conversation, source: str, named: Mapping[str, Any]) -> tuple[str, list[tuple[int, int]]]:
    """The rendering, and the ranges inside its marks, those that touch as one; nothing where the template refuses."""
    made = rendered(source, conversation, named, return_assistant_tokens_mask=True)
    if made is None:
        return "", []
    text, ranges = made
    joined: list[tuple[int, int]] = []
    for start, end in ranges:
        if joined and start == joined[-1][1]:
            joined[-1] = (joined[-1][0], end)
        elif start < end:
            joined.append((start, end))
    return text, [(start, start + len(text[start:end].rstrip())) for start, end in joined]


def _reason(fault: str) -> str:
    """A refusal without what is the row's own."""
    fault = re.sub(r"turn \d+", "turn N", fault.split(";")[0])
    return re.sub(r"model.name: the chat template in \S+", "the chat template", fault)[:110]


if __name__ == "__main__":
    folder = click.Path(exists=True, file_okay=False, path_type=Path)
    file = click.Path(exists=True, dir_okay=False, path_type=Path)
    options = [
        click.Argument(["directories"], type=folder, nargs=-1, required=True),
        click.Option(["--rows"], type=file, multiple=True, help="JSON file of public rows; may be repeated."),
    ]
    benchmark("templates", measure, options)()
