"""Reading a config.json of somebody else: every key is used, known to be harmless, or refused by name."""

import math
from collections.abc import Iterable
from typing import Any

from eflax.convert.errors import ConversionError

# What does not change the logits: training, evaluation strategy, bookkeeping of transformers.
HARMLESS = frozenset(
    {
        "_name_or_path",
        "architectures",
        "attn_mode",
        "bos_token_id",
        "dtype",
        "eos_token_id",
        "fuse_cross_entropy",
        "fuse_linear_cross_entropy",
        "fuse_norm",
        "fuse_swiglu",
        "initializer_range",
        "pad_token_id",
        "torch_dtype",
        "transformers_version",
        "use_cache",
        "use_l2warp",
    }
)


class Settings:
    """The keys and values of a config.json, taken one by one.

    Args:
        values: the object in the file.
        ignored: keys that its user says do not matter.
    """

    def __init__(self, values: dict[str, Any], ignored: Iterable[str] = ()) -> None:
        self._values = {key: _plain(value) for key, value in values.items()}
        self._seen = {*HARMLESS, *ignored}

    def take[T](self, key: str, kind: type[T], default: T | None = None) -> T:
        """Return a value, or the default, which is that of flash-linear-attention 0.6.0, where there is none.

        Raises:
            ConversionError: it is of another kind, or there is none where there must be one.
        """
        self._seen.add(key)
        value: Any = default if self._values.get(key) is None else self._values[key]
        if kind is float and type(value) is int:
            value = float(value)  # as JSON written by others may have it
        bad = type(value) in (int, float) and not 0 < value < math.inf
        if bad or type(value) is not kind:
            found = "missing" if value is None else repr(value)
            what = {int: "a positive whole number", float: "a positive number"}.get(
                kind, f"a {kind.__name__}"
            )
            raise ConversionError(f"config.json: {key!r} is {found} and must be {what}")
        return value

    def take_optional[T](self, key: str, kind: type[T]) -> T | None:
        """Return a value, or None where there is none."""
        self._seen.add(key)
        return None if self._values.get(key) is None else self.take(key, kind)

    def get(self, key: str) -> Any:
        """Return a value of any kind, or None where there is none."""
        self._seen.add(key)
        return self._values.get(key)

    def require(self, key: str, *allowed: Any, why: str) -> None:
        """Raise ConversionError unless a value is one of those allowed, the first of which is the default."""
        self._seen.add(key)
        value = self._values.get(key, allowed[0])
        if not any(type(value) is type(other) and value == other for other in allowed):
            raise ConversionError(
                f"config.json: {key!r} is {value!r}: {why}, so the model cannot be converted"
            )

    def skip(self, *keys: str) -> None:
        """Say that keys do not change the logits."""
        self._seen.update(keys)

    def finish(self) -> None:
        """Raise ConversionError for a key that was not taken and is on."""
        for key, value in self._values.items():
            if key not in self._seen and not (value is None or value is False or value in ([], {}, "")):
                raise ConversionError(
                    f"config.json: {key!r} is {value!r}, which is not known here; where it does not change what the "
                    f"model computes, add --ignore {key}"
                )


def _plain(value: Any) -> Any:
    """Return a value in which infinities are numbers; JSON has none, and transformers writes them in two ways."""
    if isinstance(value, dict) and list(value) == ["__float__"]:
        return {"Infinity": math.inf, "-Infinity": -math.inf}.get(value["__float__"], math.nan)
    return [_plain(item) for item in value] if isinstance(value, list) else value
