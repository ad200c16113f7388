"""Access to the Hugging Face Hub: commits of revisions, lists of files, and the files themselves."""

import logging
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, Literal, cast

from lean_finetune.config.field_types import HUB_PREFIX
from lean_finetune.core.errors import UserError
from lean_finetune.pinning.config_file import KNOWN_NAMES

HUB_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*")
DEFAULT_SPLIT = "train"
RepoType = Literal["model", "dataset"]
GATED = ("meta-llama/", "google/gemma-", "google/codegemma-", "CohereLabs/")
"""Beginnings of ids of models whose pages on the hub ask for consent to a licence before a download."""


def gated_note(repo_id: str) -> str | None:
    """What to do before the first run with a model that is known to be gated, without asking the hub; None else."""
    return f"{repo_id} is gated on the hub: {_access(repo_id)}" if repo_id.startswith(GATED) else None


def _access(repo_id: str) -> str:
    return (
        f"accept its licence at https://huggingface.co/{repo_id}, then run `hf auth login`; or name a local directory"
    )


class NoAccess(UserError):
    """The hub cannot be reached, or does not give a gated repository to this user."""


@contextmanager
def hub_errors(parameter: str, repo_id: str) -> Iterator[None]:
    """Turn the hub client's exceptions into a `UserError`.

    Raises UserError if the network, the repository, the revision or the disk is at fault.
    """
    from huggingface_hub import errors

    try:
        yield
    except errors.GatedRepoError:
        raise NoAccess(f"{parameter}: {repo_id} is gated; {_access(repo_id)}") from None
    except errors.RevisionNotFoundError:
        raise UserError(
            f"{parameter}: {repo_id} has no such revision; name a branch, tag or commit of it in "
            f"{_revision_of(parameter)}, or leave that blank for main"
        ) from None
    except errors.RepositoryNotFoundError:
        raise UserError(
            f"{parameter}: the hub has no {repo_id} that you may read, and no such local directory exists; "
            "check the name, or run `hf auth login` if it is private"
        ) from None
    except UserError:
        raise
    except Exception as error:
        if _is_transport_fault(error):
            raise NoAccess(
                f"{parameter}: the Hugging Face Hub cannot be reached for {repo_id} ({type(error).__name__}); "
                "connect to the network (and unset HF_HUB_OFFLINE), or name a local path instead"
            ) from error
        if isinstance(error, OSError):
            raise UserError(
                f"{parameter}: {repo_id} cannot be stored ({error.strerror or error}); free space, or set HF_HOME to a "
                "directory on another disk"
            ) from error
        raise


def _revision_of(parameter: str) -> str:
    """The parameter with the revision of what `parameter` names."""
    return "model.adapter_revision" if parameter == "model.adapter" else f"{parameter.split('.')[0]}.revision"


def _is_transport_fault(error: Exception) -> bool:
    """Whether the network failed. The client moved from httpx to httpx2, which have no common base class."""
    from huggingface_hub import errors

    if isinstance(error, ConnectionError | TimeoutError | errors.HfHubHTTPError | errors.LocalEntryNotFoundError):
        return True
    return any(kind.__module__.split(".")[0] in ("httpx", "httpx2") for kind in type(error).__mro__)


def list_files(
    parameter: str, repo_id: str, repo_type: RepoType, revision: str | None
) -> tuple[str, dict[str, tuple[int, str]]]:
    """The current commit of `revision` (None: main), and its files: (size in bytes, blob id) by path, sorted.

    The blob id is the hex sha256 of the content for a large file (LFS), else git's blob sha1. Raises UserError if the
    hub cannot be reached, or has no such repository or revision.
    """
    from huggingface_hub import HfApi

    with hub_errors(parameter, repo_id):
        info_of = HfApi().model_info if repo_type == "model" else HfApi().dataset_info
        info = info_of(repo_id, revision=revision, files_metadata=True)
    files = sorted(info.siblings or [], key=lambda file: file.rfilename)
    return str(info.sha), {
        file.rfilename: (int(file.size or 0), str(file.lfs.sha256 if file.lfs else file.blob_id)) for file in files
    }


def download(parameter: str, repo_id: str, repo_type: RepoType, commit: str, paths: Sequence[str]) -> Path:
    """The local directory of a commit with at least `paths` in it; missing files are downloaded.

    Raises UserError if a file is missing and the hub cannot be reached.
    """
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    # snapshot_download takes fnmatch patterns; of their special characters, file names may have only brackets.
    patterns = [path.replace("[", "[[]") for path in paths]
    try:
        here = Path(
            snapshot_download(
                repo_id, repo_type=repo_type, revision=commit, allow_patterns=patterns, local_files_only=True
            )
        )
        if all((here / path).is_file() for path in paths):
            return here
    except LocalEntryNotFoundError:
        logging.getLogger(__name__).info("%s at %s is not on this machine yet", repo_id, commit)
    with hub_errors(parameter, repo_id):
        # First a small request: it fails at once if the hub is unreachable, while a download retries for 20 seconds.
        HfApi().repo_info(repo_id, repo_type=repo_type, revision=commit)
        return Path(snapshot_download(repo_id, repo_type=repo_type, revision=commit, allow_patterns=patterns))


def cached_file(repo_id: str, commit: str, path: str) -> Path | None:
    """A data file of a commit in the local cache; None if it is not there."""
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(repo_id, path, revision=commit, repo_type="dataset")
    return Path(found) if isinstance(found, str) else None


def open_stream(parameter: str, repo_id: str, commit: str, path: str) -> BinaryIO:
    """A data file of a commit, streamed from the hub without storing it. Wrap its `read` in `hub_errors`.

    Raises UserError if the hub cannot be reached.
    """
    from huggingface_hub import HfFileSystem

    with hub_errors(parameter, repo_id):
        file = HfFileSystem().open(f"datasets/{repo_id}@{commit}/{path}", "rb", block_size=0)
    return cast(BinaryIO, file)


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
