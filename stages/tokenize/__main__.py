"""Entry of the stage tokenize."""

from pathlib import Path

import click
from tqdm import tqdm

from stages.declared import read_params
from stages.errors import StageCommand
from stages.files import read_json, write_json
from stages.pin.locate import tokenizer_directory, verify_files
from stages.tokenize.encode import RowTokenizer
from stages.tokenize.prepare import Settings, prepare

PATH = click.Path(path_type=Path)


@click.command(cls=StageCommand)
@click.option("--data-lock", type=PATH, default=Path("locks/data.json"), show_default=True)
@click.option("--model-lock", type=PATH, default=Path("locks/model.json"), show_default=True)
@click.option("--tokenizer-lock", type=PATH, default=Path("locks/tokenizer.json"), show_default=True)
@click.option("--out", type=PATH, default=Path("data/tokens"), show_default=True)
@click.option("--metrics", type=PATH, default=Path("metrics/tokenize.json"), show_default=True)
def main(data_lock: Path, model_lock: Path, tokenizer_lock: Path, out: Path, metrics: Path) -> None:
    """Turn the pinned rows into tokens, with the spans that are trained, split into training and held-out rows."""
    p = read_params()
    data, pinned = read_json(data_lock), read_json(tokenizer_lock)
    directory = tokenizer_directory(read_json(model_lock))
    verify_files(directory, pinned["files"])
    settings = Settings(
        format=p.data.format,
        max_length=p.data.max_length,
        heldout_fraction=p.data.heldout_fraction,
        max_rows=p.data.max_rows,
    )
    with tqdm(total=data["bytes"], desc="tokenize", unit="B", unit_scale=True, disable=not p.run.progress) as bar:
        figures, notes = prepare(data, pinned, RowTokenizer(directory), settings, out, bar.update)
    write_json(metrics, figures)
    for note in notes:
        click.echo(f"note: {note}", err=True)


if __name__ == "__main__":
    main()
