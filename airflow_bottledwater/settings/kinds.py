"""The kinds of settings: how a loosely typed value (from a form, a file, an option) is converted, and which values are allowed.

A setting of type bool, tuple, dict or Literal needs no more than its annotation; numbers and texts name their kind in
``Annotated[type, kind]``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Literal, get_args, get_origin

_TRUE, _FALSE = frozenset(["true", "yes", "y", "1", "on"]), frozenset(["false", "no", "n", "0", "off"])


class Kind(ABC):
    """A kind of setting: its values, and how they are converted."""

    #: the allowed values in words, for messages and for the documentation
    allowed: str

    @abstractmethod
    def convert(self, value: Any) -> Any:
        """The value, converted to the setting's type.

        :raises TypeError, ValueError, OverflowError: it cannot be converted.
        """

    def allows(self, value: Any) -> bool:
        """Whether a converted value is allowed; a kind may also raise instead of returning False.

        :raises ValueError: it is not allowed.
        """
        return True


@dataclass(frozen=True)
class Flag(Kind):
    """A switch, which may be given as text."""

    allowed: str = "true or false"

    def convert(self, value: Any) -> bool:
        word = value.lower() if isinstance(value, str) else value
        if isinstance(word, bool):
            return word
        if isinstance(word, str) and word in _TRUE | _FALSE:
            return word in _TRUE
        raise ValueError(word)


@dataclass(frozen=True)
class Choice(Kind):
    """One of several words."""

    choices: tuple[str, ...]
    allowed: str

    def convert(self, value: Any) -> Any:
        return value

    def allows(self, value: Any) -> bool:
        return isinstance(value, str) and value in self.choices


@dataclass(frozen=True)
class Whole(Kind):
    """A whole number within limits, which may be given as text."""

    low: int
    high: int
    allowed: str

    def convert(self, value: Any) -> int:
        if isinstance(value, bool):
            raise TypeError("a switch is no number")
        number = int(value)
        if not isinstance(value, str) and number != value:
            raise ValueError(value)
        return number

    def allows(self, value: int) -> bool:
        return self.low <= value <= self.high


@dataclass(frozen=True)
class Number(Kind):
    """A number within limits, which may be given as text."""

    low: float
    high: float
    allowed: str

    def convert(self, value: Any) -> float:
        if isinstance(value, bool):
            raise TypeError("a switch is no number")
        return float(value)

    def allows(self, value: float) -> bool:
        return self.low <= value <= self.high


@dataclass(frozen=True)
class Text(Kind):
    """A text that passes a test.

    :param fits: the test; it may also raise ValueError, as it happens when text that is not valid Unicode is encoded.
    """

    allowed: str
    fits: Callable[[str], object]

    def convert(self, value: Any) -> str:
        if not isinstance(value, str):
            raise TypeError("no text")
        return value

    def allows(self, value: str) -> bool:
        return bool(self.fits(value))


@dataclass(frozen=True)
class Texts(Kind):
    """A list of texts, which may be given as one text with commas."""

    allowed: str = "a list of texts, or one text with commas"

    def convert(self, value: Any) -> tuple[str, ...]:
        parts = value.split(",") if isinstance(value, str) else value
        return tuple(str(part).strip() for part in parts if str(part).strip())


@dataclass(frozen=True)
class Properties(Kind):
    """Names with values, mostly properties of another system; null (in a connection's extra) means not set.

    :param required: a name that must have a value; empty for none.
    """

    allowed: str = "names with values"
    required: str = ""

    def convert(self, value: Any) -> dict[str, str]:
        return {str(name): str(each) for name, each in dict(value).items() if each is not None}

    def allows(self, value: dict[str, str]) -> bool:
        return not self.required or bool(value.get(self.required))


Seconds = Annotated[float, Number(0.05, 7 * 86_400, "seconds, from 0.05 to a week")]
#: whoever looks whether a job lives waits for several of these
Heartbeat = Annotated[float, Number(0.05, 300, "seconds, from 0.05 to 300")]
Bytes = Annotated[int, Whole(64 << 10, 16 << 30, "bytes, from 64 KiB to 16 GiB")]


def kind_of(hint: Any) -> Kind:
    """The kind of a setting by its annotation: the kind that this names, or else that of its type.

    :raises TypeError: the annotation names no kind, and its type has none.
    """
    if get_origin(hint) is Annotated:
        for extra in hint.__metadata__:
            if isinstance(extra, Kind):
                return extra
        hint = hint.__origin__
    if get_origin(hint) is Literal:
        return Choice(get_args(hint), " or ".join(get_args(hint)))
    by_type: dict[Any, Kind] = {bool: Flag(), tuple: Texts(), dict: Properties()}
    if (found := by_type.get(get_origin(hint) or hint)) is None:
        raise TypeError(f"A setting of type {hint!r} needs a kind of its own: Annotated[type, kind].")
    return found


def sentence_of(hint: Any) -> str:
    """The sentence that describes a setting, from its annotation: ``Annotated[type, "one sentence"]``.

    :raises TypeError: the annotation has none.
    """
    for extra in getattr(hint, "__metadata__", ()):
        if isinstance(extra, str):
            return extra
    raise TypeError(f"A setting needs a sentence: Annotated[{hint!r}, 'what it is for'].")
