"""Schema of section `data` of params.yaml."""

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from lean_finetune.config.field_types import Format, IsoDate, PositiveFloat, PositiveInt, Section, Text

HUB_PREFIX = "hf://"
HELDOUT_SOURCE = "data.heldout_source"


class Source(Section):
    """One of several sources of rows. A key that is absent takes the value of `data.<key>`."""

    source: Text
    """A file, glob, directory, `datasets.save_to_disk` folder, or `hf://org/name`."""
    revision: Text | None = None
    """Hub branch, tag or commit."""
    config: Text | None = None
    """Hub configuration (subset)."""
    split: Text | None = None
    """Split of a hub data set or of a saved DatasetDict."""
    format: Format | None = None
    """Shape of its rows."""
    columns: dict[Text, Text] | None = None
    """Column of the source by name of the shape's key."""
    rows: PositiveInt | None = None
    """Its first rows, at most; absent means all."""
    weight: PositiveFloat = 1.0
    """Mean times each of its training rows is taken in an epoch: 0.5 takes half of them, another half each epoch."""


def _source_form(value: Any) -> str:
    """Which form of data.source a value has, so that its faults are told of that form alone."""
    return "list" if isinstance(value, list) else "path"


SourceList = Annotated[list[Source], Field(min_length=1)]
Sources = Annotated[Annotated[Text, Tag("path")] | Annotated[SourceList, Tag("list")], Discriminator(_source_form)]


def named_sources(source: str | list[Source], parameter: str = "data.source") -> list[tuple[str, Source]]:
    """The sources that a value of data.source (or of `parameter`) names, each with the dotted parameter of its path."""
    if isinstance(source, str):
        return [(parameter, Source(source=source))]
    return [(f"{parameter}.{k}.source", one) for k, one in enumerate(source)]


class Data(Section):
    """Which rows are learnt, and how they become tokens."""

    source: Sources
    """A file, glob, directory, `datasets.save_to_disk` folder or `hf://org/name`; or a list of such with weights."""
    revision: Text | None
    """Hub branch, tag or commit; None means main."""
    config: Text | None
    """Hub configuration (subset); None means the default one."""
    split: Text | None
    """Split of a hub data set or of a saved DatasetDict; None means train."""
    format: Format
    """Shape of a row; `auto` reads it off the first row."""
    columns: dict[Text, Text] | None
    """Column of the source by name of the shape's key; None means the names are the same."""
    ignore_columns: list[Text] | None
    """Columns that are read as if no row had them; None means none."""
    on_bad_row: Literal["fail", "skip"]
    """What a row that cannot be used does: end the run, or be counted and listed."""
    chat_template: Text
    """`tokenizer` (its own), `chatml` (built in), or the path of a .jinja file."""
    template_date: IsoDate
    """What templates are given as today (`strftime_now`): fixed, so that equal rows give equal tokens tomorrow."""
    train_on: Literal["assistant", "last_assistant", "all"]
    """Whose tokens count in the loss."""
    max_length: Annotated[int, Field(ge=8)]
    """Tokens of the longest row. Activation memory grows with it."""
    over_length: Literal["truncate", "drop", "split"]
    """What is done with a longer row."""
    drop_duplicates: bool
    """Leave out training and held-out rows whose tokens are those of an earlier row."""
    heldout_fraction: Annotated[float, Field(ge=0.0, lt=1.0)]
    """Share of rows held out, by a hash of heldout_seed and what precedes the first answer; 0 means none."""
    heldout_seed: Annotated[int, Field(ge=0, lt=2**32)]
    """Another number holds out other rows."""
    heldout_source: Sources | None
    """Rows that are held out in place of a share of data.source, in the same forms; None means that share."""
    max_rows: PositiveInt | None
    """Rows of data.source read at most; None means all."""

    def named_sources(self) -> list[tuple[str, Source]]:
        """All sources as they are given, the held-out ones last, each with the dotted parameter of its path."""
        heldout = [] if self.heldout_source is None else named_sources(self.heldout_source, HELDOUT_SOURCE)
        return [*named_sources(self.source), *heldout]
