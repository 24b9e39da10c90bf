"""Signatures of modules for help() and editors."""

import inspect


def tell_signatures(*modules: type) -> None:
    """Let classes show the arguments of their ``__init__``, where the metaclass of Flax NNX shows *args, **kwargs."""
    for module in modules:
        _, *arguments = inspect.signature(module.__init__).parameters.values()
        module.__signature__ = inspect.Signature(arguments)  # type: ignore
