"""Which files of a hub data set are one split of one configuration, as the library `datasets` resolves them."""

from lean_finetune.config.data_schema import HUB_PREFIX
from lean_finetune.core.errors import UserError
from lean_finetune.pinning.file_formats import KNOWN_NAMES
from lean_finetune.pinning.hub import told_in_one_line

DEFAULT_SPLIT = "train"


def split_files(
    parameter: str, repo_id: str, commit: str, config: str | None, split: str | None
) -> tuple[str, list[str]]:
    """(the split, its paths in the repository) in reading order; downloads nothing but the data set's card.

    `config` None means the default configuration, `split` None means train.

    Raises:
        UserError: there is no such configuration or split, no file of a known kind, or no hub to be reached.
    """
    from datasets import load_dataset_builder
    from datasets.exceptions import FileNotFoundDatasetsError
    from datasets.utils.logging import disable_progress_bar

    disable_progress_bar()
    beside = parameter.rpartition(".")[0]
    with told_in_one_line(parameter, repo_id):
        try:
            # With the prefix, a local directory of that name is not taken for it.
            builder = load_dataset_builder(f"{HUB_PREFIX}datasets/{repo_id}", name=config, revision=commit)
        except ValueError as error:  # datasets has no type of its own for an unknown or missing configuration
            raise UserError(f"{beside}.config: {repo_id}: {error}; got {config!r}") from error
        except FileNotFoundDatasetsError as error:
            raise UserError(
                f"{parameter}: {HUB_PREFIX}{repo_id} at {commit[:12]} holds no data file of a known kind "
                f"({KNOWN_NAMES}); download and convert it to one JSON row a line, then name that file"
            ) from error
        except RuntimeError as error:
            raise UserError(
                f"{parameter}: {repo_id} asks for code of its own, which is never run ({error}); name its files"
            ) from error
    files = builder.config.data_files or {}
    split = split or DEFAULT_SPLIT
    if split not in files:
        raise UserError(
            f"{beside}.split: {HUB_PREFIX}{repo_id} has no split {split!r}; name one of {', '.join(map(str, files))}"
        )
    root = f"{HUB_PREFIX}datasets/{repo_id}@{commit}/"
    return split, [str(file).removeprefix(root) for file in files[split]]
