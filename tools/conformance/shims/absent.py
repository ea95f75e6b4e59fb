"""Packages that are not there, for suites that import more of them than their tests use.

`AbsentFinder` finds them where they are not installed. What they hold can be named; using it fails
the test. `stand_ins` are the few things that do work, by their full names.
"""

from collections.abc import Mapping, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import spec_from_loader
from types import ModuleType


class AbsentError(Exception):
    """A test used code of a package that is not there."""


class Absent:
    """Something of such a package: can be named, not used."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> "Absent":
        if name.startswith("__"):
            raise AttributeError(name)
        return Absent(f"{self._name}.{name}")

    def __call__(self, *args: object, **kwargs: object) -> object:
        raise AbsentError(f"{self._name} is not here")

    def __repr__(self) -> str:
        return self._name


class AbsentModule(ModuleType):
    """Holds whatever is asked for."""

    def __init__(self, name: str, stand_ins: Mapping[str, object]) -> None:
        super().__init__(name)
        self._stand_ins = stand_ins

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        full = f"{self.__name__}.{name}"
        return self._stand_ins[full] if full in self._stand_ins else Absent(full)


class AbsentFinder(MetaPathFinder, Loader):
    """Finds and makes the modules of `packages` and everything below them."""

    def __init__(self, packages: Sequence[str], stand_ins: Mapping[str, object]) -> None:
        self._packages = frozenset(packages)
        self._stand_ins = stand_ins

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        top = fullname.partition(".")[0]
        if top not in self._packages or PathFinder.find_spec(top) is not None:
            return None
        return spec_from_loader(fullname, self, is_package=True)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return AbsentModule(spec.name, self._stand_ins)

    def exec_module(self, module: ModuleType) -> None:
        """There is nothing to run."""
