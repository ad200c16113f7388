"""tiktoken encodes only where it gives the very ids of the tokenizers library; all else is refused with the reason."""

import json
import unicodedata
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, models, pre_tokenizers

from lean_finetune.core.errors import UserError
from lean_finetune.data.encode import tokenizer_engine as engine_module
from lean_finetune.data.encode.tokenizer_engine import (
    EDGE_CASES,
    TiktokenEngine,
    TokenizersEngine,
    choose_engine,
    load_engine,
    probe_texts,
)
from tests.data.built import LLAMA3_PATTERN, byte_level, sample_texts, save, sentencepiece

STYLES = ("gpt2", "llama3", "qwen2")


@pytest.fixture(scope="module")
def directories(tmp_path_factory, tiny_dir) -> dict[str, Path]:
    built = {style: save(byte_level(style), tmp_path_factory.mktemp(style)) for style in STYLES}
    return {**built, "tiny": tiny_dir}


@pytest.mark.parametrize("style", [*STYLES, "tiny"])
def test_byte_level_tokenizers_use_tiktoken_and_choosing_starts_no_thread(directories, style):
    """Workers are forks of the process that chose; a fork of a process with threads can hang."""
    threads = len(list(Path("/proc/self/task").glob("*")))
    chosen = choose_engine("auto", directories[style], [*list(sample_texts())[:50], "\ud800"])
    assert chosen.name == "tiktoken" and chosen.reason.startswith("it gave the ids of the tokenizers library on ")
    assert len(list(Path("/proc/self/task").glob("*"))) <= threads


@pytest.mark.parametrize("style", [*STYLES, "tiny"])
@given(
    texts=st.lists(
        st.one_of(st.text(), st.sampled_from(EDGE_CASES), st.sampled_from(("<|im_end|>", "<tool_call>"))), max_size=6
    )
)
@settings(max_examples=40, deadline=None)
def test_both_engines_give_the_same_ids_of_any_text(directories, engines, style, texts):
    plain, fast = engines(style)
    texts = [text.encode("utf-8", "replace").decode() for text in [*texts, "".join(texts)]]
    expected, found = plain.encode(texts), fast.encode(texts)
    assert found.values.tolist() == expected.values.tolist()
    assert found.lengths.tolist() == expected.lengths.tolist()
    assert (found.values.dtype, found.lengths.dtype) == (np.int32, np.int64)


@pytest.fixture(scope="module")
def engines(directories):
    """(the tokenizers library's engine, tiktoken's) of a style."""
    return {
        style: tuple(load_engine(name, directory) for name in ("tokenizers", "tiktoken"))
        for style, directory in directories.items()
    }.__getitem__


def test_text_on_which_tiktoken_gives_up_is_encoded_all_the_same(engines):
    plain, fast = engines("llama3")
    texts = ["before", " " * 1_000_000 + "x", "after"]
    found = fast.encode(texts)
    assert found.failed == [1]
    assert np.array_equal(found.values, plain.encode(texts).values)


def _merge_that_never_happens(spec):
    """`a` and `bc` make a token, but `abc` is `ab` and `c` by then."""
    vocabulary, merges = spec["model"]["vocab"], spec["model"]["merges"]
    for left, right in (("~", "^"), ("^", "`"), ("~", "^`")):
        merges.append([left, right])
        vocabulary[left + right] = len(vocabulary) + 10


def _ignore_merges(spec):
    spec["model"]["ignore_merges"] = True
    spec["model"]["vocab"]["hello"] = len(spec["model"]["vocab"]) + 10


def _remove_a_byte(spec):
    spec["model"]["vocab"]["other"] = spec["model"]["vocab"].pop("Ā")


REFUSED = {
    "its merges are not in the order of the ids they make": lambda spec: spec["model"]["merges"].reverse(),
    "no merge makes 1 token of its vocabulary, such as 'hello'": _ignore_merges,
    "its merges do not make its token '~^`' of that token's own bytes": _merge_that_never_happens,
    "its token '<|im_start|>' has lstrip": lambda spec: spec["added_tokens"][1].update(lstrip=True),
    "its token '<|im_start|>' is searched in normalized text": lambda spec: spec["added_tokens"][1].update(
        normalized=True
    ),
    "its normalizer is Lowercase": lambda spec: spec.update(normalizer={"type": "Lowercase"}),
    "its vocabulary lacks 1 of the 256 bytes": _remove_a_byte,
    "its pre-tokenizer Sequence(Digits+Split+ByteLevel) splits text in more than one step": lambda spec: spec[
        "pre_tokenizer"
    ]["pretokenizers"].insert(0, {"type": "Digits", "individual_digits": True}),
    "its pre-tokenizer's Split does not isolate the matches of a regular expression": lambda spec: spec[
        "pre_tokenizer"
    ]["pretokenizers"][0].update(behavior="Removed"),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_a_part_of_a_tokenizer_that_tiktoken_lacks_is_refused_with_the_reason(directories, tmp_path, reason):
    spec = json.loads((directories["qwen2"] / "tokenizer.json").read_text())
    REFUSED[reason](spec)
    (tmp_path / "tokenizer.json").write_text(json.dumps(spec))
    chosen = choose_engine("auto", tmp_path, [])
    assert (chosen.name, chosen.reason) == ("tokenizers", f"tiktoken cannot replace it: {reason}")


OTHER_MODELS = {
    "its model has byte_fallback": lambda: sentencepiece("mistral"),
    "its model is Unigram, not BPE": lambda: Tokenizer(models.Unigram([("a", -1.0), ("<unk>", -2.0)], unk_id=1)),
}


@pytest.mark.parametrize("reason", OTHER_MODELS)
def test_other_models_are_refused_with_the_reason(tmp_path, reason):
    directory = save(OTHER_MODELS[reason](), tmp_path)
    chosen = choose_engine("auto", directory, [])
    assert (chosen.name, chosen.reason) == ("tokenizers", f"tiktoken cannot replace it: {reason}")
    with pytest.raises(UserError, match=f"run.tokenizer_engine: tiktoken cannot replace .*: {reason}; set auto or"):
        choose_engine("tiktoken", directory, [])
    assert choose_engine("tokenizers", directory, []).name == "tokenizers"


def test_an_engine_that_differs_on_the_probes_or_on_the_data_alone_is_caught(directories, monkeypatch):
    """The proof has to fail where anything differs, or it proves nothing."""

    class Wrong(TiktokenEngine):
        on = ""

        def encode(self, texts):
            return super().encode([text.replace(self.on, "x") for text in texts])

    monkeypatch.setattr(engine_module, "TiktokenEngine", Wrong)
    for on, sample in (("\u3000", []), ("zebra stripes", ["no", "a zebra stripes"])):
        Wrong.on = on
        chosen = choose_engine("auto", directories["llama3"], sample)
        assert chosen.name == "tokenizers" and "it gives other ids for" in chosen.reason
    assert choose_engine("auto", directories["llama3"], ["no"]).name == "tiktoken"


@pytest.mark.slow
def test_probes_contain_every_kind_of_character():
    assert probe_texts(["<s>"]) == probe_texts(["<s>"])
    probed = {one for text in probe_texts([]) for one in text}
    categories = [unicodedata.category(chr(code)) for code in range(0x110000)]
    changes = [code for code in range(1, 0x110000) if categories[code] != categories[code - 1]]
    ends = {0, 0x10FFFF, *changes, *(code - 1 for code in changes)}
    assert {chr(code) for code in ends if categories[code] != "Cs"} <= probed


@pytest.mark.slow
def test_both_regex_libraries_split_at_every_character_alike():
    """The probes contain only the ends of each run of equal characters; here all are compared.

    Merges that reach over each kind of neighbour show where text was split.
    """
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: number for number, letter in enumerate(letters)}
    merges = {pair for near in ("a", "1", "!", "Ġ") for letter in letters for pair in ((near, letter), (letter, near))}
    for left, right in sorted(merges):
        vocabulary.setdefault(left + right, len(vocabulary))
    tokenizer = Tokenizer(
        models.BPE(vocab=vocabulary, merges=sorted(merges, key=lambda pair: vocabulary["".join(pair)]))
    )
    split = pre_tokenizers.Split(Regex(LLAMA3_PATTERN), behavior="isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(False, use_regex=False)])
    fast = TiktokenEngine(json.loads(tokenizer.to_str()), TokenizersEngine(tokenizer))
    codes = [code for code in range(0x110000) if not 0xD800 <= code <= 0xDFFF]
    for start in range(0, len(codes), 256):
        text = "".join(f"a{one}1{one}A {one}! {one}\n" for one in map(chr, codes[start : start + 256]))
        expected = tokenizer.encode(text, add_special_tokens=False).ids
        assert fast.encode([text]).values.tolist() == expected, hex(codes[start])
