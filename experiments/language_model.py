"""Language models: train, evaluate, generate, compare.

`python -m experiments.language_model` needs no flag and no network; `train --help`, `eval --help`,
`generate --help` and `compare --help` tell the rest.
"""

import importlib
import signal
import sys
from collections.abc import Sequence

if __name__ == "__main__":  # Ctrl-C ends the imports without a traceback; later StopRequest takes over
    signal.signal(signal.SIGINT, signal.SIG_DFL)

COMMANDS = ("train", "eval", "generate", "compare")


def main(args: Sequence[str] | None = None) -> int:
    """Run a command, by default `train`; `args` are the command and its flags. Returns the exit code."""
    args = list(sys.argv[1:] if args is None else args)
    if args[:1] and args[0] in ("-h", "--help"):
        print(
            "Commands: train, whose flags follow, and eval, generate and compare, which have a --help of their own.\n"
        )
    chosen = args.pop(0) if args[:1] and args[0] in COMMANDS else "train"
    return importlib.import_module(f"experiments.language_model_{chosen}").main(args)


if __name__ == "__main__":
    importlib.import_module("experiments.command").leave(main())
