"""What rendering a template that nobody trusts may cost, and how much a step of it would.

Sizes are characters of text or items of a list, looked at before the memory is taken.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from string import Formatter

MAX_TEXT = 4 * 2**20
"""Characters of one text: the prompt, and everything on the way to it."""
MAX_TOTAL = 64 * 2**20
"""Characters of all texts that a render makes, short-lived ones included."""
MAX_WIDTH = 1000
_MAX_BITS = 1024
_CLOCK_ITEMS = 1024

_WIDE_PERCENT = re.compile(r"%(\([^)%]*\))?[-+ #0]*(\*|\d{4,}|\d*\.(\*|\d{4,}))")
_WIDE_FIELD = re.compile(r"[{]|\d{4,}")


class TemplateCostError(Exception):
    """The template costs too much. The message completes "the chat template ..."."""


class Budget:
    """What one render has left. `blank`: types that print as hardly anything."""

    def __init__(
        self, seconds: float, clock: Callable[[], float], blank: tuple[type, ...] = ()
    ) -> None:
        self._seconds = seconds
        self._clock = clock
        self._deadline = clock() + seconds
        self._blank = blank
        self._steps = 0
        self._total = 0

    def step(self) -> None:
        """Look at the clock: called for every loop iteration, call and filter."""
        if self._clock() > self._deadline:
            raise TemplateCostError(f"took over {self._seconds:g} seconds")

    def charge(self, size: int) -> None:
        """Account for a text or list of this size, made or about to be."""
        if size > MAX_TEXT:
            raise TemplateCostError(f"makes a text or list of over {MAX_TEXT} characters or items")
        self._total += size
        if self._total > MAX_TOTAL:
            raise TemplateCostError(f"makes over {MAX_TOTAL} characters of text in all")

    def charge_value(self, value: object) -> None:
        """Account for a value that was made, with all that it holds."""
        self.step()
        if isinstance(value, str | list | tuple | Mapping):
            self.charge(self.measure(value))

    def measure(self, value: object, *, printed: bool = False) -> int:
        """About how long `value` prints. Walks containers, the same one each time it stands there,
        and stops when that is too long. What is `printed` must be text or plain data."""
        if isinstance(value, str):
            return len(value)
        size, visited, stack = 0, 0, [value]
        while stack:
            item = stack.pop()
            visited += 1
            if visited % _CLOCK_ITEMS == 0:
                self.step()
            size += self._own_size(item, printed)
            if size > MAX_TEXT:
                self.charge(size)
            if isinstance(item, Mapping):
                stack.extend(item.keys())
                stack.extend(item.values())
            elif isinstance(item, list | tuple):
                stack.extend(item)
        return size

    def _own_size(self, item: object, printed: bool) -> int:
        if isinstance(item, str):
            return len(item)
        if isinstance(item, int):
            return 1 + item.bit_length() // 3
        plain = item is None or isinstance(item, (float, list, tuple, Mapping, *self._blank))
        if printed and not plain:
            raise TemplateCostError(f"prints a {type(item).__name__}")
        return 2


def length(value: object) -> int:
    """Characters or items of a text or container, without what the items hold."""
    return len(value) if isinstance(value, str | list | tuple | dict) else 0


def charge_operator(budget: Budget, operator: str, left: object, right: object) -> None:
    """Account for `left operator right` before it is done: +, *, ** and %."""
    if operator == "+":
        budget.charge(_size(budget, left) + _size(budget, right))
    elif operator == "*":
        _charge_product(budget, left, right)
    elif operator == "**":
        _charge_power(left, right)
    elif isinstance(left, str):
        charge_percent(budget, left, right)


def _size(budget: Budget, value: object) -> int:
    return budget.measure(value) if isinstance(value, str | list | tuple) else 0


def _charge_product(budget: Budget, left: object, right: object) -> None:
    if isinstance(left, int) and isinstance(right, int):
        if left.bit_length() + right.bit_length() > _MAX_BITS:
            raise TemplateCostError(f"makes a number of over {_MAX_BITS} bits")
    elif isinstance(left, int):
        budget.charge(max(left, 0) * _size(budget, right))
    elif isinstance(right, int):
        budget.charge(max(right, 0) * _size(budget, left))


def _charge_power(left: object, right: object) -> None:
    if isinstance(left, int) and isinstance(right, int) and left.bit_length() * right > _MAX_BITS:
        raise TemplateCostError(f"makes a number of over {_MAX_BITS} bits")


def charge_percent(budget: Budget, text: str, values: object) -> None:
    """Account for `text % values`."""
    if _WIDE_PERCENT.search(text):
        raise TemplateCostError(f"formats to a width of over {MAX_WIDTH}")
    budget.charge(len(text) + text.count("%") * (budget.measure(values, printed=True) + MAX_WIDTH))


def charge_method(budget: Budget, text: str, name: str, args: tuple[object, ...]) -> None:
    """Account for the method `name` of `text`, where its result may be much longer."""
    if name in ("center", "ljust", "rjust", "zfill"):
        if args and isinstance(args[0], int) and args[0] > MAX_WIDTH:
            raise TemplateCostError(f"pads to a width of over {MAX_WIDTH}")
    elif name in ("expandtabs", "translate", "encode"):
        raise TemplateCostError(f"calls {name}, which is not allowed")
    elif name == "replace" and len(args) > 1:
        old, new = str(args[0]), str(args[1])
        budget.charge(len(text) + text.count(old) * max(len(new) - len(old), 0))


def charge_format(budget: Budget, text: str, values: Iterable[object]) -> None:
    """Account for `text.format(values)`."""
    specs = [spec or "" for _, name, spec, _ in Formatter().parse(text) if name is not None]
    if any(_WIDE_FIELD.search(spec) for spec in specs):
        raise TemplateCostError(f"formats to a width of over {MAX_WIDTH}, or to a computed one")
    longest = max((budget.measure(value, printed=True) for value in values), default=0)
    budget.charge(len(text) + len(specs) * (longest + MAX_WIDTH))


def charge_join(budget: Budget, separator: str, items: list[object]) -> None:
    """Account for joining `items`."""
    budget.charge(budget.measure(items, printed=True) + len(separator) * len(items))
