"""The Hugging Face Hub: which commit a revision is, which files it holds, and those files on this machine."""

import logging
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Literal, cast

from lean_finetune.core.errors import UserError

HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
RepoType = Literal["model", "dataset"]


@dataclass(frozen=True, kw_only=True)
class HubFile:
    """A file of one commit."""

    path: str
    """Inside the repository."""
    size_bytes: int
    blob_id: str
    """Hex sha256 of the content for a large file (LFS), else git's blob sha1."""


@contextmanager
def told_in_one_line(parameter: str, repo_id: str) -> Iterator[None]:
    """Turn what the hub client raises for an unreachable, unknown or closed repository into a `UserError`.

    Raises:
        UserError: the network, the repository, the revision or the disk is at fault.
    """
    from huggingface_hub import errors

    try:
        yield
    except errors.GatedRepoError:
        raise UserError(
            f"{parameter}: {repo_id} asks for consent; accept its terms on its page, then run `hf auth login`"
        ) from None
    except errors.RevisionNotFoundError:
        raise UserError(
            f"{parameter}: {repo_id} has no such revision; name a branch, tag or commit of it in "
            f"{parameter.split('.')[0]}.revision, or leave that blank for main"
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
            raise UserError(
                f"{parameter}: the Hugging Face Hub cannot be reached for {repo_id} ({type(error).__name__}); "
                "connect to the network (and unset HF_HUB_OFFLINE), or name a local path instead"
            ) from error
        if isinstance(error, OSError):
            raise UserError(
                f"{parameter}: {repo_id} cannot be stored ({error.strerror or error}); free space, or set HF_HOME to a "
                "directory on another disk"
            ) from error
        raise


def _is_transport_fault(error: Exception) -> bool:
    """Whether the network is at fault. The client moved from httpx to httpx2, which share no base class."""
    from huggingface_hub import errors

    if isinstance(error, ConnectionError | TimeoutError | errors.HfHubHTTPError | errors.LocalEntryNotFoundError):
        return True
    return any(kind.__module__.split(".")[0] in ("httpx", "httpx2") for kind in type(error).__mro__)


def list_files(parameter: str, repo_id: str, repo_type: RepoType, revision: str | None) -> tuple[str, list[HubFile]]:
    """The commit that `revision` (None: main) names now, and the files of that commit in order of path.

    Raises:
        UserError: the hub cannot be reached, or has no such repository or revision.
    """
    from huggingface_hub import HfApi

    with told_in_one_line(parameter, repo_id):
        ask = HfApi().model_info if repo_type == "model" else HfApi().dataset_info
        info = ask(repo_id, revision=revision, files_metadata=True)
    files = [
        HubFile(
            path=file.rfilename,
            size_bytes=int(file.size or 0),
            blob_id=str(file.lfs.sha256 if file.lfs else file.blob_id),
        )
        for file in info.siblings or []
    ]
    return str(info.sha), sorted(files, key=lambda file: file.path)


def download(parameter: str, repo_id: str, repo_type: RepoType, commit: str, paths: Sequence[str]) -> Path:
    """The directory of one commit on this machine with at least `paths` in it, downloaded unless already there.

    Raises:
        UserError: a file is not here and the hub cannot be reached.
    """
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    # snapshot_download reads its patterns as fnmatch does; brackets are the only such signs a file name may hold.
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
    with told_in_one_line(parameter, repo_id):
        # Asked first because an unreachable hub answers this at once, while a download retries for 20 seconds.
        HfApi().repo_info(repo_id, repo_type=repo_type, revision=commit)
        return Path(snapshot_download(repo_id, repo_type=repo_type, revision=commit, allow_patterns=patterns))


def cached_file(repo_id: str, commit: str, path: str) -> Path | None:
    """A data file of one commit where the local cache has it."""
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(repo_id, path, revision=commit, repo_type="dataset")
    return Path(found) if isinstance(found, str) else None


def open_stream(parameter: str, repo_id: str, commit: str, path: str) -> BinaryIO:
    """A data file of one commit, read front to back from the hub; nothing is stored.

    Its `read` raises what `told_in_one_line` tells.

    Raises:
        UserError: the hub cannot be reached.
    """
    from huggingface_hub import HfFileSystem

    with told_in_one_line(parameter, repo_id):
        file = HfFileSystem().open(f"datasets/{repo_id}@{commit}/{path}", "rb", block_size=0)
    return cast(BinaryIO, file)
