"""Row tokenizer: trained spans decode to the trained segments, with tokenizers of every style."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers

from lean_finetune.core.errors import UserError
from lean_finetune.data.chat.control_tokens import TextSegment
from lean_finetune.data.encode.row_tokenizer import RowTokenizer, choose_pad
from tests.data.built import byte_level, save, sentencepiece
from tests.data.common import encode_one, row_of, row_tokenizer

STYLES = ("gpt2", "llama3", "qwen2", "mistral", "llama2", "gemma")
JOINED = {"mistral", "llama2"}
END = "</s>"
TEXT = st.text(st.characters(exclude_categories=("Cs", "Cn", "Co"), exclude_characters="▁"), max_size=8)
WORDS = st.lists(
    st.one_of(TEXT, st.sampled_from(("word", " ", "<s>", "</s>", "<unk>", "你好", "<|im_end|>"))), max_size=5
)


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory) -> Callable[[str], tuple[RowTokenizer, Tokenizer]]:
    """(ours, the library's own) of a style."""
    loaded = {}
    for style in STYLES:
        is_byte_level = style in ("gpt2", "llama3", "qwen2")
        built = byte_level(style) if is_byte_level else sentencepiece(style)
        eos = "<|im_end|>" if is_byte_level else END
        directory = save(built, tmp_path_factory.mktemp(style), eos_token=eos)
        engine = "tiktoken" if is_byte_level else "tokenizers"
        loaded[style] = row_tokenizer(directory, engine), Tokenizer.from_file(str(directory / "tokenizer.json"))
    return loaded.__getitem__


@pytest.mark.parametrize("style", STYLES)
@given(rows=st.lists(st.tuples(WORDS, WORDS), min_size=1, max_size=3))
@settings(max_examples=15, deadline=None)
def test_trained_tokens_decode_to_the_answer_and_its_end(tokenizers, style, rows):
    """Also where the row writes control tokens, which stay characters."""
    tokenizer, reference = tokenizers(style)
    eos, protect = tokenizer.special_tokens["eos_token"], tokenizer.guard.protect
    segments = []
    for prompt, answer in rows:
        # As templates do it: the answer follows a line end or a control token, or brings its own space.
        prompt_text, answer_text = protect("".join(prompt)), protect("".join(answer))
        segments.append([TextSegment(f"Q: {prompt_text}{eos}", False), TextSegment(f"{answer_text}{eos}", True)])
    encoded = tokenizer.encode_rows(segments)
    decode = lambda ids: reference.decode(ids.tolist(), skip_special_tokens=False)  # noqa: E731
    for number, (_, answer) in enumerate(rows):
        ids, spans = row_of(encoded, number)
        assert spans.shape == (1, 2) and spans[0, 1] == len(ids)
        expected = f"{''.join(answer)}{eos}"
        if style == "qwen2":
            expected = normalizers.NFC().normalize_str(expected)
        # Inside its text: alone, it would lose a first space.
        found = decode(ids)[len(decode(ids[: spans[0, 0]])) :]
        # Llama 2 adds a space to the text after each control token.
        assert found == expected or (style == "llama2" and found == f" {expected}")
        assert (ids == tokenizer.eos_id).sum() == 2


@pytest.mark.parametrize("style", sorted(JOINED))
def test_ids_equal_those_of_the_joined_text_for_space_adding_tokenizers(tokenizers, style):
    tokenizer, reference = tokenizers(style)
    segments = [TextSegment("<s>[INST] What is it? [/INST]", False), TextSegment(" An answer.</s>", True)]
    segments += [TextSegment("[INST] And then, ", False), TextSegment("nothing ", True), TextSegment("more", False)]
    ids, spans = encode_one(tokenizer, segments)
    assert ids.tolist() == reference.encode("".join(one.text for one in segments), add_special_tokens=False).ids
    trained = [[reference.id_to_token(n) for n in ids[start:end]] for start, end in spans.tolist()]
    assert "".join(trained[0]) == "▁An▁answer.</s>"
    # A space before a trained segment belongs to its first word; a space at its end belongs to the next word.
    assert "".join(trained[1]) == "▁nothing"


def test_a_tokenizer_that_loses_text_is_refused_in_one_line(tmp_path):
    tokenizer = Tokenizer(models.WordPiece({"[UNK]": 0, "hello": 1, "world": 2}, unk_token="[UNK]"))
    tokenizer.normalizer, tokenizer.decoder = normalizers.Lowercase(), decoders.WordPiece()
    with pytest.raises(UserError, match=r"^model.name: .*tokenizer.json decodes its tokens of .* to "):
        row_tokenizer(save(tokenizer, tmp_path))


PADS = [
    ({"pad_token": "<p>", "eos_token": "<e>"}, {0: "<p>", 1: "<e>"}, 0, "the tokenizer's pad_token"),
    ({"pad_token": "<e>", "eos_token": "<e>"}, {1: "<e>", 5: "<|reserved_7|>"}, 5, "no pad_token, but a control token"),
    ({"eos_token": "<e>"}, {1: "<e>", 2: "<|fill_pad|>", 3: "<unused0>"}, 2, "no pad_token, but a control token"),
    ({"eos_token": "<e>", "unk_token": "<u>"}, {1: "<e>", 2: "<u>"}, 2, "the tokenizer's unk_token"),
    ({"eos_token": "<e>"}, {1: "<e>"}, 1, "no unused token for padding"),
]


@pytest.mark.parametrize(("named", "control", "number", "why"), PADS)
def test_padding_is_a_token_that_no_answer_ends_with(named, control, number, why):
    """With the end token as padding, whoever masks padding by id masks the ends of answers."""
    by_text = {token: number for number, token in control.items()}
    pad = choose_pad(control, named, by_text.get)
    assert pad.number == number and why in pad.reason
    assert pad.is_spare == (control[number] != "<e>")


@pytest.mark.parametrize("role", ["bos_token", "eos_token", "pad_token"])
def test_a_special_token_outside_the_vocabulary_is_refused(tmp_path, tiny_dir, role):
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / file).write_bytes((tiny_dir / file).read_bytes())
    config = json.loads((tmp_path / "tokenizer_config.json").read_text()) | {role: "<|gone|>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=rf"^model.name: {role} '<\|gone\|>' of .* is not in tokenizer.json"):
        row_tokenizer(Path(tmp_path))
