"""`python convert/drafter.py FOLDER --target TARGET -o drafter.gguf`: `localspec convert drafter`, from a checkout."""

import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).parent.parent)  # not this folder: its names are no modules

from localspec.cli.main import main  # noqa: E402

if __name__ == "__main__":
    main(["convert", "drafter", *sys.argv[1:]], prog_name="localspec")
