"""Names in the files of rows with images."""

IMAGE_HASHES = "images"
"""Column of the shards: the sha256 of each image of a row."""
IMAGE_SIZES, PATCHES, FRAMES = "image_sizes", "patches", "frames"
"""Columns of the index: height and width in pixels of each image of a row, one after the other; patches of all; the
largest height and width of its processed images, if those of a batch are padded to the largest, else nothing."""
LIMITS = ("image_max_pixels", "image_min_pixels")
"""Metadata of the index: the limits with which images are resized, as in section `data`."""
