"""Names in the files of rows with pictures."""

PICTURE_HASHES = "pictures"
"""Column of the shards: the sha256 of each picture of a row."""
PICTURE_SIZES, PATCHES, FRAMES = "picture_sizes", "patches", "frames"
"""Columns of the index: height and width in pixels of each picture of a row, one after the other; patches of all; the
largest height and width of its processed pictures, if those of a batch are padded to the largest, else nothing."""
LIMITS = ("image_max_pixels", "image_min_pixels")
"""Metadata of the index: the limits with which pictures are resized, as in section `data`."""
