"""Files of one split of a hub data set, as the library `datasets` resolves them."""

from lean_finetune.config.data_schema import HUB_PREFIX
from lean_finetune.core.errors import UserError
from lean_finetune.pinning.file_formats import KNOWN_NAMES
from lean_finetune.pinning.hub import hub_errors

DEFAULT_SPLIT = "train"


def split_files(
    parameter: str, repo_id: str, commit: str, config: str | None, split: str | None
) -> tuple[str, list[str]]:
    """The split's name and its files in reading order. Downloads only the data set's card.

    `config` None means the default configuration, `split` None means train. Raises UserError if there is no such
    configuration or split, no file of a known kind, or no hub to be reached.
    """
    from datasets import load_dataset_builder
    from datasets.exceptions import FileNotFoundDatasetsError
    from datasets.utils.logging import disable_progress_bar

    disable_progress_bar()
    section = parameter.rpartition(".")[0]
    with hub_errors(parameter, repo_id):
        try:
            # The prefix excludes a local directory of that name.
            builder = load_dataset_builder(f"{HUB_PREFIX}datasets/{repo_id}", name=config, revision=commit)
        except ValueError as error:  # datasets raises this for an unknown or missing configuration
            raise UserError(f"{section}.config: {repo_id}: {error}; got {config!r}") from error
        except FileNotFoundDatasetsError as error:
            raise UserError(
                f"{parameter}: {HUB_PREFIX}{repo_id} at {commit[:12]} has no data file of a known kind "
                f"({KNOWN_NAMES}); download and convert it to one JSON row a line, then name that file"
            ) from error
        except RuntimeError as error:
            raise UserError(
                f"{parameter}: {repo_id} requires its own code, which is never run ({error}); name its files"
            ) from error
    files = builder.config.data_files or {}
    split = split or DEFAULT_SPLIT
    if split not in files:
        raise UserError(
            f"{section}.split: {HUB_PREFIX}{repo_id} has no split {split!r}; name one of {', '.join(map(str, files))}"
        )
    root = f"{HUB_PREFIX}datasets/{repo_id}@{commit}/"
    return split, [str(file).removeprefix(root) for file in files[split]]
