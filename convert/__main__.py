"""`python -m localspec.convert target|drafter ...`, the same as `localspec convert`."""

import sys

from localspec.app import main

main(["convert", *sys.argv[1:]], prog_name="localspec")
