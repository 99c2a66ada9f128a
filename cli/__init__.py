"""The `tfmx` command."""
