"""Run localspec from a checkout: `python cli.py chat`."""

from pathlib import Path

import localspec

# An install maps models/ and convert/ into the package; from a checkout they are found here.
localspec.__path__.append(str(Path(__file__).parent))

if __name__ == "__main__":
    from localspec.app import main

    main()
