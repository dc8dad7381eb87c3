"""Run localspec from a checkout, without an install: `python cli.py chat`."""

from localspec.cli.main import main

if __name__ == "__main__":
    main()
