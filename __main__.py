"""`python -m tfmx` is the `tfmx` command."""

from .cli import main

if __name__ == "__main__":
    main()
