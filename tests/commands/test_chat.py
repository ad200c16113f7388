"""`lean-finetune chat` and `generate`: answers of the tuned model, within the memory that there is."""

import codecs
import gc
import io
import json
import os
import signal
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result
from peft import AutoPeftModelForCausalLM
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from lean_finetune.commands.chat import ChatSession, chat, conversation_limit
from lean_finetune.commands.generate import generate
from lean_finetune.commands.tuned import answer_memory, tuned_model
from lean_finetune.commands.tuned.answer_memory import answer_bytes
from lean_finetune.commands.tuned.chat_lines import ChatLines
from lean_finetune.commands.tuned.conversation import Prompter
from lean_finetune.core.errors import UserError
from lean_finetune.pinning.locate import TINY_DIRECTORY
from lean_finetune.step.parallel_model import ParallelModel
from lean_finetune.train.monitor.measured_peak import make_meter
from lean_finetune.train.save_model import save_tuned
from tests.conftest import ROOT
from tests.json_answers import check_answer
from tests.kit.loaded import load_model
from tests.processes import run_bounded
from tests.small_model import CPU, base_of, spec_of
from tests.workspace import error, invoke, write_rows

QUESTIONS = [[{"role": "user", "content": "Name a colour."}], [{"role": "user", "content": "What is 2 + 2?"}]]
SHORT = ["--max-new-tokens", "12", "--bits", "16"]


@pytest.mark.parametrize("command", [["chat"], ["generate", "a.jsonl", "b.jsonl"], ["export", "out"]])
def test_a_missing_model_is_named_before_torch_is_imported(tmp_path: Path, command: list[str]):
    """Twenty seconds of imports before the line that there is no model."""
    code = "from lean_finetune.cli import main\ntry: main(sys.argv[1:])\nfinally: print('torch' in sys.modules)"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = run_bounded([sys.executable, "-c", f"import sys\n{code}", *command], cwd=tmp_path, env=environment)
    assert done.returncode == 2 and "got 'data/tuned', which does not exist" in done.stderr
    assert done.stdout == "False\n"


def talk(lines: str, *arguments: str) -> Result:
    """Chat with these lines as standard input."""
    return CliRunner().invoke(chat, list(arguments), input=lines, catch_exceptions=False)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # Read by peft.
def test_generate_gives_the_answers_of_transformers_and_peft(adapter: Path, tmp_path: Path):
    """Another prompt than users of the weights make, an adapter that is not applied, or answers changed by padding."""
    source = write_rows(tmp_path / "prompts.jsonl", [{"id": n, "messages": m} for n, m in enumerate(QUESTIONS)])
    result = invoke(generate, str(source), str(tmp_path / "answers.jsonl"), "--model", str(adapter), *SHORT)
    assert result.exit_code == 0, result.output
    rows = [json.loads(line) for line in (tmp_path / "answers.jsonl").read_text().splitlines()]
    tokenizer: Any = AutoTokenizer.from_pretrained(adapter)
    model: Any = AutoPeftModelForCausalLM.from_pretrained(adapter, dtype=torch.float32).eval()
    for number, (row, messages) in enumerate(zip(rows, QUESTIONS, strict=True)):
        ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
        answer = model.generate(**ids, max_new_tokens=12, do_sample=False)[0, ids["input_ids"].shape[1] :]
        assert (row["id"], row["answer"]) == (number, tokenizer.decode(answer, skip_special_tokens=True))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["answers.jsonl", "prompts.jsonl"]


def test_chat_streams_the_same_answers_and_remembers_the_conversation(adapter: Path, tmp_path: Path):
    """A streamed answer that differs from the complete one, or a second turn without the first."""
    first, second = (messages[0]["content"] for messages in QUESTIONS)

    def answer(messages: list[dict[str, str]]) -> str:
        source = write_rows(tmp_path / "p.jsonl", [{"messages": messages}])
        invoke(generate, str(source), str(tmp_path / "a.jsonl"), "--model", str(adapter), *SHORT)
        return json.loads((tmp_path / "a.jsonl").read_text())["answer"]

    one = answer(QUESTIONS[0])
    answers = [one, answer([*QUESTIONS[0], {"role": "assistant", "content": one}, *QUESTIONS[1]]), answer(QUESTIONS[1])]
    shown = talk(f"{first}\n{second}\n/reset\n{second}\n", "--model", str(adapter), *SHORT).stdout
    assert shown == "".join(f"{each}\n" for each in answers)


def test_json_lines_are_answered_alike_and_a_wrong_one_ends_nothing(adapter: Path):
    """A page or a script that gets other answers than the terminal, or no more after a wrong line."""
    first, second = (messages[0]["content"] for messages in QUESTIONS)
    lines = talk(f"{first}\n{second}\n", "--model", str(adapter), *SHORT).stdout.splitlines()
    turns = [*QUESTIONS[0], {"role": "assistant", "content": lines[0]}, *QUESTIONS[1]]
    long = [{"role": "user", "content": "word " * 600}]
    given = [
        QUESTIONS[0],
        turns,
        turns[1:],
        [],
        long,
        [{"role": "user", "content": ""}],
        [*long, turns[1], *QUESTIONS[1]],
    ]
    wrong = ["{", "3", "[" * 100_000, json.dumps({"messages": QUESTIONS[0][0]})]
    text = "".join(f"{each}\n" for each in (*wrong, *(json.dumps({"messages": one}) for one in given)))
    done = talk(text, "--json", "--model", str(adapter), "--length", "500", *SHORT)
    events = [json.loads(line) for line in done.stdout.splitlines()]
    for event in events:
        check_answer(f"chat: {event['event']}", event)
    assert events[0]["event"] == "ready" and events[0]["tokens"] == 500
    ends = [one for one in events[1:] if one["event"] != "text"]
    assert [one["event"] for one in ends] == ["fault"] * 4 + ["answer"] * 2 + ["fault"] * 4 + ["answer"]
    assert [one["text"] for one in ends[4:6]] == lines and ends[-1]["left_out"] == 2
    assert "tokens and 488 fit" in ends[8]["text"]
    parts = "".join(one["text"] for one in events[: events.index(ends[5])] if one["event"] == "text")
    assert parts == "".join(lines)


def test_a_full_model_chats_and_plain_prompts_are_completed(tmp_path: Path):
    """A merged model that needs its adapter's files, or plain text that goes through the chat template."""
    assert talk("Name a colour.\n", "--model", str(TINY_DIRECTORY), "--max-new-tokens", "4").exit_code == 0
    assert error(talk("", "--model", str(TINY_DIRECTORY), "--bits", "4"), 2).startswith("--bits: has an effect only on")
    source = write_rows(tmp_path / "p.jsonl", [{"prompt": "One, two, three"}, {"prompt": "a\u2028b"}])
    source.write_bytes(codecs.BOM_UTF8 + source.read_bytes())  # As editors on Windows save text.
    invoke(generate, str(source), str(tmp_path / "a.jsonl"), "--model", str(TINY_DIRECTORY), "--max-new-tokens", "4")
    tokenizer: Any = AutoTokenizer.from_pretrained(TINY_DIRECTORY)
    ids = tokenizer("One, two, three", return_tensors="pt")
    model: Any = AutoModelForCausalLM.from_pretrained(TINY_DIRECTORY, dtype=torch.float32)
    answer = model.generate(ids["input_ids"], attention_mask=ids["attention_mask"], max_new_tokens=4, do_sample=False)
    expected = tokenizer.decode(answer[0, ids["input_ids"].shape[1] :], skip_special_tokens=True)
    first, second = (tmp_path / "a.jsonl").read_text(encoding="utf-8").rstrip("\n").split("\n")
    assert json.loads(first)["answer"] == expected and json.loads(second)["prompt"] == "a\u2028b"


def test_the_conversation_is_as_long_as_the_memory_allows(adapter: Path, monkeypatch: pytest.MonkeyPatch):
    """An out-of-memory error in the middle of a conversation, or a refusal where a shorter one fits."""
    tuned = tuned_model.find_tuned(adapter, "16")
    some, full = (answer_bytes(tuned, rows=1, tokens=tokens, new_tokens=12) for tokens in (200, 500))
    assert some < full
    monkeypatch.setattr(answer_memory, "free_bytes", lambda: (some, "here"))
    shown = talk("Name a colour.\n", "--model", str(adapter), "--length", "500", *SHORT)
    limit = int(shown.stderr.split("note: ")[1].split(" of 500")[0])
    assert 100 < limit < 300 and answer_bytes(tuned, rows=1, tokens=limit, new_tokens=12) <= some
    long = "word " * 300
    assert "note: this line has" in talk(f"{long}\n", "--model", str(adapter), "--length", "500", *SHORT).stderr
    monkeypatch.setattr(answer_memory, "free_bytes", lambda: (1000, "here"))
    assert "are free here; free memory, lower --length" in error(talk("", "--model", str(adapter), *SHORT), 3)


@pytest.mark.slow
@pytest.mark.parametrize("bits", ["4", "16"])
def test_the_longest_conversation_that_fits_takes_the_memory_that_is_predicted(
    adapter: Path, monkeypatch: pytest.MonkeyPatch, bits: str
):
    """A limit that counts less than loading, the prompt and its answer take."""
    tuned, prompter = tuned_model.find_tuned(adapter, bits), Prompter(adapter)
    room = answer_bytes(tuned, rows=1, tokens=400, new_tokens=12)
    monkeypatch.setattr(answer_memory, "free_bytes", lambda: (room, "here"))
    most = conversation_limit(tuned, 500, 12)
    line = "word"
    while len(prompter.of_messages([{"role": "user", "content": f"{line} word"}])) <= most - 12:
        line += " word"
    gc.collect()
    meter = make_meter(CPU)
    with meter.window("chat"), meter.phase("chat"):
        shown = talk(f"{line}\n", "--model", str(adapter), "--length", "500", "--max-new-tokens", "12", "--bits", bits)
    assert most < 400 and "left out" not in shown.stderr
    assert 0.7 * room < meter.result().peak_bytes_by_phase["chat"] <= room


def test_ctrl_c_stops_an_answer_and_not_the_conversation(adapter: Path, monkeypatch: pytest.MonkeyPatch):
    """Words about outputs and other commands, or the end of a long conversation for one long answer."""
    prompts: list[list[int]] = []

    def answer(ids: list[int]) -> str:
        prompts.append(ids)
        if len(prompts) == 1:
            signal.raise_signal(signal.SIGINT)
        return "Yes"

    monkeypatch.setattr(sys, "stdin", io.StringIO("One?\nTwo?\n"))
    before, prompter = signal.getsignal(signal.SIGINT), Prompter(adapter)
    ChatSession(prompter.of_messages, 500, []).run(answer)
    assert prompts[1:] == [prompter.of_messages([{"role": "user", "content": "Two?"}])]
    assert signal.getsignal(signal.SIGINT) is before


def test_sigint_stops_one_answer_of_json_lines(adapter: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any):
    """A second event for one question, which would be taken for the answer to the next one."""

    def answer(ids: list[int], show: Any) -> str:
        show("a")
        if len(ids) < 12:
            signal.raise_signal(signal.SIGINT)
        return "Yes"

    class Lines(io.StringIO):
        def readline(self, *size: Any) -> str:  # type: ignore[override]
            signal.raise_signal(signal.SIGINT)
            return super().readline(*size)

    asked = [[{"role": "user", "content": text}] for text in ("One", "Is this a longer question, or is it none?")]
    monkeypatch.setattr(sys, "stdin", Lines("".join(f"{json.dumps({'messages': one})}\n" for one in asked)))
    before, prompter = signal.getsignal(signal.SIGINT), Prompter(adapter)
    ChatLines(prompter.of_messages, 500, []).run(answer)
    events = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(one["event"], one.get("stopped")) for one in events] == [
        ("text", None),
        ("answer", True),
        ("text", None),
        ("answer", False),
    ]
    assert signal.getsignal(signal.SIGINT) is before


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("{", "p.jsonl:2: not JSON"),
        ('{"text": "x"}', "p.jsonl:2: must have 'messages', a list of messages, or 'prompt'"),
        (json.dumps({"prompt": "word " * 4000}), "p.jsonl:2: "),
    ],
)
def test_a_faulty_prompt_is_named_by_its_line_and_nothing_is_written(
    adapter: Path, tmp_path: Path, line: str, expected: str
):
    """Half a file of answers, or a traceback after an hour."""
    file = tmp_path / "p.jsonl"
    file.write_text('{"prompt": "One"}\n' + line + "\n")
    refusal = error(invoke(generate, str(file), str(tmp_path / "a.jsonl"), "--model", str(adapter)))
    assert refusal.startswith(f"{tmp_path}/{expected}")
    assert not (tmp_path / "a.jsonl").exists()


def test_the_base_is_stored_as_in_training(small_llama: Path, tmp_path: Path):
    """A base in other bits than the adapter learnt to correct, also where the run is not here."""
    spec, base = spec_of(method="int8_lora", precision="fp32"), replace(base_of(small_llama), address=str(small_llama))
    save_tuned(ParallelModel(load_model(small_llama, spec, CPU)), base, tmp_path / "tuned", spec)
    tuned = tuned_model.find_tuned(tmp_path / "tuned", None)
    assert (tuned.weights.method, tuned.weights.precision, tuned.reason) == ("int8_lora", "fp32", "as in training")
    assert tuned_model.find_tuned(tmp_path / "tuned", "4").weights.method == "qlora"
    (tmp_path / "tuned/base_weights.json").write_text('{"method": "none"}')
    with pytest.raises(UserError, match=r"base_weights\.json: must be as training wrote it"):
        tuned_model.find_tuned(tmp_path / "tuned", None)
    (tmp_path / "tuned/base_weights.json").unlink()
    assert "default" in tuned_model.find_tuned(tmp_path / "tuned", None).reason


def test_a_directory_without_a_model_is_one_line(tmp_path: Path):
    """A traceback of transformers."""
    assert error(talk("", "--model", str(tmp_path)), 2).startswith(
        "--model: must be a directory with adapter_config.json"
    )
    (tmp_path / "adapter_config.json").write_text(
        '{"r": 8, "lora_alpha": 8, "target_modules": ["q_proj"], "base_model_name_or_path": "/gone"}'
    )
    assert "adapter_model.safetensors is missing" in error(talk("", "--model", str(tmp_path)))
    tensors = {
        f"base_model.model.model.layers.0.self_attn.q_proj.lora_{part}.weight": torch.zeros(8, 8) for part in "AB"
    }
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    assert "which does not exist; put the base model back" in error(talk("", "--model", str(tmp_path)))
