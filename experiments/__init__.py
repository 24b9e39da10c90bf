"""Runnable experiments: `python -m experiments.NAME --help` tells what each does."""
