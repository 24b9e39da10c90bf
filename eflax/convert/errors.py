"""The error of this package, apart so that all its modules can raise it."""


class ConversionError(ValueError):
    """A model cannot be converted; the message names what stands in the way, and the way out if there is one."""
