"""`python -m localspec`, the same as `localspec`."""

from localspec.cli.main import main

if __name__ == "__main__":
    main(prog_name="localspec")
