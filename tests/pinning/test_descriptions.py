"""Pins as the report and the model card name them."""

from lean_finetune.pinning.locate import describe_data


def source(name: str, revision: str | None = None) -> dict:
    return {"source": name, "revision": revision}


def test_every_source_of_a_mixture_is_named_until_there_are_too_many_to_read():
    mixed = {"sources": [source("rows.jsonl"), source("hf://org/data", "c0ffee")]}
    assert describe_data(mixed) == "rows.jsonl, hf://org/data at c0ffee"
    many = describe_data({"sources": [source(f"{number}.jsonl") for number in range(11)]})
    assert many.endswith("7.jsonl and 3 more")
