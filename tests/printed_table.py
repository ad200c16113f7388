"""A table of aligned columns, as a command printed it."""


def printed_cells(text: str) -> dict[str, dict[str, str]]:
    """The cells by row and column; each begins where the header's word does."""
    header, *lines = text.splitlines()
    starts = [place for place, letter in enumerate(header) if letter != " " and header[place - 1 : place] in ("", " ")]
    ends = [*starts[1:], None]
    rows = [[line[a:b].strip() for a, b in zip(starts, ends, strict=True)] for line in (header, *lines)]
    return {row[0]: dict(zip(rows[0], row, strict=True)) for row in rows[1:]}
