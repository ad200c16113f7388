"""What reports show of the files that rows carry."""

from lean_finetune.images.thumbnails import thumbnails

__all__ = ["thumbnails"]
