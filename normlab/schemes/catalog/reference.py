"""Import schemes from users' files and modules: `highway.py:Highway` and `package.module:Highway`.

The file is imported because the user names it. A stored reference has an absolute path and a hash of the file's
content, `/path/highway.py@3f1c9a02b7de:Highway`, so that another process finds the same code or reports what is
missing. In shared results the folder is left out: `highway.py@3f1c9a02b7de:Highway`.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib
import importlib.util
import inspect
import os
import re
import sys
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any, ClassVar, get_origin, get_type_hints

from normlab.errors import NormLabError, unknown
from normlab.schemes.contract.scheme import Origin, Scheme

_NAME = r"[^\W\d]\w*"
_MODULE = rf"{_NAME}(?:\.{_NAME})*"
_SPELLING = re.compile(
    rf"(?P<where>.+?\.py|{_MODULE})(?:@(?P<content>[0-9a-f]{{12}}))?:(?P<cls>{_NAME})\s*(?P<options>\(.*)?", re.DOTALL
)
_modules: dict[tuple[str, str], ModuleType] = {}
"""Files that this process has imported, by path and content."""


@dataclass(frozen=True)
class Reference:
    """A parsed reference, `where[@content]:cls[(options)]`."""

    where: str
    content: str | None
    cls: str
    options: str

    @property
    def is_file(self) -> bool:
        """Whether it names a file and not a module."""
        return self.where.endswith(".py")

    def __str__(self) -> str:
        return f"{self.where}:{self.cls}"


def read(text: str) -> Reference | None:
    """Parse a reference with or without options; None if the text is not one."""
    match = _SPELLING.fullmatch(text.strip())
    return None if match is None else Reference(match["where"], match["content"], match["cls"], match["options"] or "")


def find(reference: Reference) -> type[Scheme]:
    """The class of a reference; imports its file or module unless this content was imported before."""
    found = known(reference)
    if found is None:
        module, content = _import_file(reference) if reference.is_file else _import_module(reference)
        found = _scheme_in(module, reference)
        _record_origin(found, _place(reference), content)
    return found


def known(reference: Reference) -> type[Scheme] | None:
    """The class of a reference with a hash if this process has imported it, from any folder; nothing is executed."""
    if reference.content is None:
        return None
    wanted = Origin(reference.where, reference.content, reference.cls)
    imported = [(cls, cls.origin()) for cls in _subclasses(Scheme)]
    # If the same content is in several folders: that of the exact folder, else the last one imported.
    alike = [cls for cls, origin in imported if origin and origin.shared == wanted.shared]
    return next((cls for cls in alike if cls.origin() == wanted), alike[-1] if alike else None)


def refuse_unknown(text: str) -> None:
    """Raise for a reference that has not been imported yet: a downloaded model must not choose the code to run."""
    reference = read(text)
    if reference is not None and known(reference) is None:
        shown = f"path/to/{os.path.basename(reference.where)}" if reference.is_file else reference.where
        raise NormLabError(
            f"the model's scheme is {reference}, which is not part of NormLab; "
            f"name it first if you trust it: normlab.scheme('{shown}:{reference.cls}')"
        )


def load(reference: Reference) -> Any:
    """Import what a reference names, a scheme or any other object."""
    module, _ = _import_file(reference) if reference.is_file else _import_module(reference)
    return _attribute(module, reference)


# -- importing ---------------------------------------------------------------------------------------------------------


class _Bytes(SourceFileLoader):
    """Executes the bytes that were hashed, because a .pyc beside the file may be outdated."""

    def __init__(self, name: str, path: str, source: bytes):
        super().__init__(name, path)
        self.source = source

    def get_code(self, fullname: str) -> CodeType:
        return self.source_to_code(self.source, self.path)  # type: ignore[return-value]


def _import_file(reference: Reference) -> tuple[ModuleType, str]:
    path = _place(reference)
    try:
        source = Path(path).read_bytes()
    except OSError as error:
        raise NormLabError(f"cannot read {path}: {error.strerror}; {reference} is looked for there") from None
    content = _hash(source)
    _check_content(reference, content, path)
    if (path, content) not in _modules:
        _modules[path, content] = _run(path, source, content)
    return _modules[path, content], content


def _run(path: str, source: bytes, content: str) -> ModuleType:
    place = hashlib.sha256(path.encode(errors="surrogateescape")).hexdigest()[:8]
    # Dataclasses, inspect and pickle look modules up by name, so names must be unique.
    name = f"{Path(path).stem}_{place}_{content}"
    spec = importlib.util.spec_from_file_location(name, path, loader=_Bytes(name, path, source))
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        with looking_in(os.path.dirname(path)), _in_one_line(path):
            spec.loader.exec_module(module)  # type: ignore[union-attr]
    except NormLabError:
        del sys.modules[name]
        raise
    return module


def _import_module(reference: Reference) -> tuple[ModuleType, str | None]:
    with looking_in(os.getcwd()), _in_one_line(reference.where):
        module = importlib.import_module(reference.where)
    file = getattr(module, "__file__", None)
    content = _hash(Path(file).read_bytes()) if file and file.endswith(".py") else None
    _check_content(reference, content, reference.where)
    return module, content


def _place(reference: Reference) -> str:
    """The absolute path of a file, or the name of a module."""
    return os.path.abspath(os.path.expanduser(reference.where)) if reference.is_file else reference.where


def _hash(source: bytes) -> str:
    return hashlib.sha256(source).hexdigest()[:12]


def _check_content(reference: Reference, content: str | None, where: str) -> None:
    if reference.content not in (None, content):
        raise NormLabError(
            f"{where} has changed since it was used (content {content}, was {reference.content}); "
            f"restore it, or start anew with {reference}"
        )


@contextmanager
def looking_in(folder: str) -> Generator[None, None, None]:
    """Context manager that puts a folder on `sys.path`, as Python does for a script."""
    sys.path.insert(0, folder)
    try:
        yield
    finally:
        if folder in sys.path:
            sys.path.remove(folder)


@contextmanager
def _in_one_line(where: str) -> Generator[None, None, None]:
    """Context manager that turns any exception of an import into an error of one line."""
    try:
        yield
    except SyntaxError as error:
        raise NormLabError(f"{error.filename or where}, line {error.lineno}: {error.msg}") from None
    except (Exception, SystemExit) as error:
        first = str(error).strip().partition("\n")[0]
        raise NormLabError(f"{where} cannot be imported: {type(error).__name__}: {first}".rstrip(": ")) from error


# -- what was imported -------------------------------------------------------------------------------------------------


def _attribute(module: ModuleType, reference: Reference) -> Any:
    if hasattr(module, reference.cls):
        return getattr(module, reference.cls)
    schemes = [name for name, value in vars(module).items() if is_scheme(value) and value is not Scheme]
    if schemes:
        raise unknown(f"scheme of {reference.where}", reference.cls, schemes)
    raise NormLabError(f"{reference.where} has no {reference.cls!r}; expected a class derived from normlab.Scheme")


def _scheme_in(module: ModuleType, reference: Reference) -> type[Scheme]:
    found = _attribute(module, reference)
    check_class(found, str(reference))
    return found


def is_scheme(value: Any) -> bool:
    """Whether a value is a subclass of `Scheme`."""
    return isinstance(value, type) and issubclass(value, Scheme)


def check_class(cls: Any, shown: str) -> None:
    """Raise if a class cannot be used as a scheme; `shown` is its name in the error."""
    if not (is_scheme(cls) and cls is not Scheme):
        kind = f"a {type(cls).__name__}" if not isinstance(cls, type) else "a class of another kind"
        raise NormLabError(f"{shown} is not a scheme but {kind}: expected a dataclass derived from normlab.Scheme")
    if not isinstance(getattr(cls, "name", None), str) or not cls.name:
        raise NormLabError(f"{shown} has no name; add e.g. name = {cls.__name__.lower()!r} to the class")
    with _in_one_line(shown):
        kinds: dict[str, Any] = get_type_hints(cls)
    own = inspect.get_annotations(cls)
    options = [option for option in own if get_origin(kinds[option]) is not ClassVar and kinds[option] is not ClassVar]
    if not set(options) <= {field.name for field in dataclasses.fields(cls)}:
        raise NormLabError(
            f"{shown} has options but is not a dataclass; put @dataclass(frozen=True, kw_only=True) over it"
        )


def _record_origin(cls: type[Scheme], where: str, content: str | None) -> None:
    """Store where a class was imported from, unless the registry finds it by its name."""
    from normlab.schemes.catalog.registry import permanent_owner

    owner = permanent_owner(cls.name)
    if owner is cls:
        return
    if owner is not None:
        raise NormLabError(
            f"{where}:{cls.__name__} is called {cls.name!r}, as NormLab's {owner.__name__} is; give it another name"
        )
    cls._origin = Origin(where, content, cls.__name__)  # pyright: ignore[reportPrivateUsage]


def _subclasses(cls: type[Scheme]) -> Iterator[type[Scheme]]:
    for below in cls.__subclasses__():
        yield below
        yield from _subclasses(below)
