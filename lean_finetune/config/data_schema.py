"""Schema of section `data` of params.yaml."""

from typing import Annotated, Any, Literal, get_args

from pydantic import AfterValidator, Discriminator, Field, Tag
from pydantic_core import PydanticCustomError

from lean_finetune.config.field_types import MAX_PIXELS, Format, Role
from lean_finetune.config.section import MOST, IsoDate, PositiveFloat, PositiveInt, Section, Text

HELDOUT_SOURCE = "data.heldout_source"
SOURCE_KEYS = ("source", "heldout_source")
SOURCE_FORMS = ("path", "list")


def _check_columns(columns: dict[str, Any]) -> dict[str, Any]:
    """Refuse what is neither the name of a column nor, under `roles`, a mapping of names to known roles."""
    for key, value in columns.items():
        if key != "roles" and not (isinstance(value, str) and value):
            raise PydanticCustomError("column", "{key} must be the name of a column", {"key": key})
        if key == "roles" and not (isinstance(value, dict) and all(role in get_args(Role) for role in value.values())):
            known = ", ".join(get_args(Role))
            raise PydanticCustomError("roles", "roles must map names to one of {known}", {"known": known})
    return columns


Pixels = Annotated[int, Field(ge=1, le=MAX_PIXELS)]

Columns = Annotated[dict[Text, Any], AfterValidator(_check_columns)]
"""Column of a source by key of its row format; `roles` maps its names of roles to known ones."""


class Source(Section):
    """One of several sources of rows. An absent key takes the value of `data.<key>`."""

    source: Text
    """A file, glob, directory, `datasets.save_to_disk` folder, or `hf://org/name`."""
    revision: Text | None = None
    """Hub branch, tag or commit."""
    config: Text | None = None
    """Hub configuration (subset)."""
    split: Text | None = None
    """Split of a Hub data set or of a saved DatasetDict."""
    format: Format | None = None
    """Row format."""
    columns: Columns | None = None
    """Column of the source for each key of the row format; under `roles`, the role of each name that we do not know."""
    rows: PositiveInt | None = None
    """Use only the first rows, at most this many. Absent means all."""
    weight: PositiveFloat = 1.0
    """Mean uses of each training row per epoch. 0.5 uses half of the rows in one epoch, the other half in the next."""


def _source_form(value: Any) -> str:
    """The form of a `data.source` value, so that an error is about that form only."""
    return "list" if isinstance(value, list) else "path"


SourceList = Annotated[list[Source], Field(min_length=1)]
Sources = Annotated[Annotated[Text, Tag("path")] | Annotated[SourceList, Tag("list")], Discriminator(_source_form)]


def named_sources(source: str | list[Source], parameter: str = "data.source") -> list[tuple[str, Source]]:
    """The sources in a value of `parameter`, each with the dotted key of its path."""
    if isinstance(source, str):
        return [(parameter, Source(source=source))]
    return [(f"{parameter}.{k}.source", one) for k, one in enumerate(source)]


class Data(Section):
    """The rows to learn, and how to turn them into tokens."""

    source: Sources
    """A file, glob, directory, `datasets.save_to_disk` folder or `hf://org/name`, or a list of them with weights."""
    revision: Text | None
    """Hub branch, tag or commit. None means main."""
    config: Text | None
    """Hub configuration (subset). None means the default one."""
    split: Text | None
    """Split of a Hub data set or of a saved DatasetDict. None means train."""
    format: Format
    """Row format. `auto` detects it from the first row."""
    columns: Columns | None
    """Column of the source for each key of the row format; under `roles`, the role of each name that we do not know.

    None means that the names are equal.
    """
    ignore_columns: list[Text] | None
    """Columns to ignore, as if no row had them. None means none."""
    on_bad_row: Literal["fail", "skip"]
    """What to do with an unusable row: end the run, or count and list it."""
    chat_template: Text
    """`tokenizer` (its own), `chatml` (built in), or the path of a .jinja file."""
    template_date: IsoDate
    """Today's date for chat templates (`strftime_now`). A fixed date gives equal tokens on every day."""
    train_on: Literal["assistant", "last_assistant", "all"]
    """Tokens that count in the loss."""
    end_of_turn: Literal["auto", "eos", "none"]
    """The token that ends an answer, where the chat template writes none. It counts in the loss."""
    max_length: Annotated[int, Field(ge=8, le=MOST)]
    """Longest row in tokens. Activation memory grows with it."""
    over_length: Literal["truncate", "drop", "split"]
    """What to do with a longer row."""
    image_max_pixels: Pixels | None
    """Most pixels of an image: a larger one is made smaller. None means the limit of the model's processor."""
    image_min_pixels: Pixels | None
    """Fewest pixels of an image: a smaller one is made larger. None means the limit of the model's processor."""
    drop_duplicates: bool
    """Drop training and held-out rows whose tokens equal those of an earlier row."""
    heldout_fraction: Annotated[float, Field(ge=0.0, lt=1.0)]
    """Share of held-out rows, chosen by a hash of heldout_seed and the text before the first answer. 0 means none."""
    heldout_seed: Annotated[int, Field(ge=0, lt=2**32)]
    """Another seed holds out other rows."""
    heldout_source: Sources | None
    """Held-out rows that replace a share of data.source, in the same forms. None means to use that share."""
    max_rows: PositiveInt | None
    """Read at most this many rows of data.source. None means all."""

    def named_sources(self) -> list[tuple[str, Source]]:
        """All sources, held-out ones last, each with the dotted key of its path."""
        heldout = [] if self.heldout_source is None else named_sources(self.heldout_source, HELDOUT_SOURCE)
        return [*named_sources(self.source), *heldout]
