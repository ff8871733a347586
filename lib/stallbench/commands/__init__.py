"""The command line; each module is a thin face."""
