"""What tests share."""

import pathlib

ROOT = pathlib.Path(__file__).parents[2]  # of the repository
