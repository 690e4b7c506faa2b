"""Where methods are found: the package's own, entry points, and files."""

from __future__ import annotations

import ast
import dataclasses
import functools
import hashlib
import importlib
import importlib.metadata
import importlib.util
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from . import options, protocol
from .errors import UserError, nearest

if TYPE_CHECKING:
    from .method import Method, Plugin
    from .nets import Net

GROUP = "protofl.methods"
"""Entry-point group by which installed packages offer methods."""

ORDER = ("fedavg", "fedprox", "moon", "fedproc", "fednh", "fedcspc")
"""The default table: the papers' common baselines, then theirs."""


received: dict[str, Path] = {}
"""Method files that were sent to this process, whose machine need not have them: where they lie, by name."""


def _file(name: str) -> Path:
    """Where a method that is given as a file lies."""
    return received.get(name, Path(name))


def files(name: str) -> list[str]:
    """What is given as a file of a method."""
    return [part for part in [name, *name.split("+")[:1]] if is_path(part)][:1]


@functools.cache
def entry_points() -> dict[str, importlib.metadata.EntryPoint]:
    """Methods of other installed packages, by name."""
    return {e.name: e for e in importlib.metadata.entry_points(group=GROUP)}


def _files() -> list[Path]:
    """The files of `methods/`."""
    spec = importlib.util.find_spec("protofl.methods")
    folders = list(spec.submodule_search_locations or []) if spec else []
    return [path for folder in folders for path in sorted(Path(folder).glob("*.py"))]


@functools.cache
def plugins() -> list[str]:
    """What can stand behind a +: files with a class of their name that is a `Plugin`. Imports none."""
    return [p.stem for p in _files() if f"class {p.stem}(plugin" in p.read_text("utf-8").lower()]


@functools.cache
def names() -> list[str]:
    """All method names, the default table first. Imports no method."""
    files = _files()
    # A file defines a method where a class of it has the file's name.
    mine = {p.stem for p in files if f"class {p.stem}(" in p.read_text("utf-8").lower()} - set(plugins())
    rest = sorted((mine | set(entry_points())) - set(ORDER))
    return [n for n in ORDER if n in mine] + rest


def is_path(name: str) -> bool:
    """Whether a method is given as a file."""
    return name.endswith(".py")


def known(name: str) -> str:
    """The name, if there is such a method; a file must exist."""
    if is_path(name):
        if not _file(name).is_file():
            raise UserError(f"method file {name!r} does not exist")
    elif "+" in name:
        for part in name.split("+")[1:]:
            if part not in plugins():
                raise UserError(f"{name!r}: there is no plug-in {part!r}{nearest(part, plugins())}; plug-ins: "
                                f"{', '.join(plugins())}, written METHOD+PLUGIN")  # fmt: skip
        known(name.split("+")[0])
    elif name not in names():
        if name in plugins():
            raise UserError(f"{name} is a plug-in: it stands behind a method, as in fedavg+{name}")
        raise UserError(
            f"there is no method {name!r}{nearest(name, names())}; methods: {', '.join(names())}, or a file ./NAME.py"
        )
    return name


def label(name: str) -> str:
    """The name under which a method appears: a file's is its stem."""
    return Path(name).stem if is_path(name) else name


def module(name: str) -> ModuleType:
    """The module of a method; of METHOD+PLUGIN the last plug-in's."""
    if not is_path(known(name)):
        name = name.rpartition("+")[2]
        if name in entry_points() and importlib.util.find_spec(f"protofl.methods.{name}") is None:
            return importlib.import_module(entry_points()[name].module)
        return importlib.import_module(f"protofl.methods.{name}")
    path = _file(name).resolve()
    unique = f"protofl_file_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}_{path.stem}"
    if unique not in sys.modules:
        spec = importlib.util.spec_from_file_location(unique, path)
        if spec is None or spec.loader is None:
            raise UserError(f"method file {name!r} cannot be read as Python")
        made = importlib.util.module_from_spec(spec)
        sys.modules[unique] = made
        try:
            spec.loader.exec_module(made)
        except (Exception, SystemExit) as e:
            del sys.modules[unique]
            raise UserError(f"method file {name!r} does not load: {type(e).__name__}: {e}") from e
    return sys.modules[unique]


def load(name: str) -> type[Method]:
    """The class of a method: of its module, the one with its name, or the only one defined there; METHOD+PLUGIN: both."""
    from .method import Method

    if "+" in name:
        base, _, last = name.rpartition("+")
        return _compose(load(base), last)  # type: ignore[arg-type]
    found = module(name)
    mine = [c for c in vars(found).values()
            if isinstance(c, type) and issubclass(c, Method) and c.__module__ == found.__name__]  # fmt: skip
    named = [c for c in mine if c.__name__.lower() == label(name).lower()] or mine
    if len(named) != 1:
        raise UserError(f"{name!r} must define one method named {label(name)!r}; it defines: "
                        f"{', '.join(c.__name__ for c in mine) or 'none'}")  # fmt: skip
    return named[0]


def plugin(name: str) -> type[Plugin]:
    """The class of a plug-in."""
    found = importlib.import_module(f"protofl.methods.{name}")
    return next(c for n, c in vars(found).items() if n.lower() == name and isinstance(c, type))


@functools.cache
def _compose(base: type[Method], name: str) -> type[Method]:
    """The plug-in on top of a method; refused where the two do not fit."""
    added = plugin(name)
    title = f"{base.__name__}+{added.__name__}"
    if issubclass(base, added):
        raise UserError(f"{title}: {base.__name__} has this plug-in already")
    reason = added.refuses(base)
    twice = sorted(set(options.fields(base)) & set(options.fields(added)))
    if twice and not reason:
        reason = f"both have an option named {', '.join(twice)}"
    if reason:
        raise UserError(f"{title}: {reason}")
    made = type(
        title, (added, base), {"__module__": added.__module__, "__doc__": f"{added.__name__} on {base.__name__}."}
    )
    return dataclasses.dataclass(frozen=True)(made)


def check_options(name: str, given: Iterable[str]) -> None:
    """Refuse misspelt options of a method by reading its source: importing it would take seconds."""
    options_there: list[str] = []
    for part in [name] if is_path(name) else name.split("+"):
        path = _source(part)
        declared = None if path is None else _declared(path, label(part))
        if declared is None:
            return  # found wrong, if it is, once the class is loaded
        options_there += declared
    known = set(options_there) | set(options.fields(protocol.Protocol))
    for option in given:
        if option not in known:
            raise UserError(options.unknown(label(name), option, options_there))


def check_choices(name: str, given: Iterable[str]) -> None:
    """Refuse misspelt choices of an ablation, `a` or `a=reading`: they are options of the method or protocol fields."""
    names = [choice.partition("=")[0] for choice in given]
    check_options(name, [protocol.ALIASES.get(choice, choice) for choice in names])


def _source(name: str) -> Path | None:
    """The file of a method of this package, or one that was given."""
    if is_path(name):
        return Path(name)
    spec = importlib.util.find_spec(f"protofl.methods.{name}")
    return Path(spec.origin) if spec is not None and spec.origin else None


def _declared(path: Path, name: str) -> list[str] | None:
    """The options that a class of a file declares or inherits; None: not to be seen from the source."""
    try:
        tree = ast.parse(path.read_text("utf-8"))
    except (OSError, SyntaxError, UnicodeDecodeError):
        return None
    classes = {n.name.lower(): n for n in tree.body if isinstance(n, ast.ClassDef)}
    imported = {
        a.asname or a.name: (n.module or "") for n in tree.body if isinstance(n, ast.ImportFrom) for a in n.names
    }
    found = classes.get(name.lower())
    if found is None:
        return None
    out: list[str] = []
    for base in found.bases:
        mine: list[str] | None = None
        if isinstance(base, ast.Name) and base.id.lower() in classes:
            mine = _declared(path, base.id)
        elif isinstance(base, ast.Name) and base.id in ("Method", "Plugin"):
            mine = []
        elif isinstance(base, ast.Name) and base.id in imported:
            parent = _source(imported[base.id].rpartition(".")[2])
            mine = None if parent is None else _declared(parent, base.id)
        if mine is None:
            return None
        out += mine
    own = [n for n in found.body if isinstance(n, ast.AnnAssign) and "ClassVar" not in ast.unparse(n.annotation)]
    return list(dict.fromkeys([*out, *(n.target.id for n in own if isinstance(n.target, ast.Name))]))


def source_hash(name: str) -> str:
    """What a file's method hangs on besides its options: the file's content. Empty for the package's own."""
    return hashlib.sha256(_file(name).read_bytes()).hexdigest()[:16] if is_path(name) else ""


@dataclasses.dataclass(frozen=True)
class Spec:
    """A method as it was asked for: its name, what was set explicitly, and the setting it takes its values from.

    stored: of a recorded run, the class whose options are all given.
    """

    name: str
    given: tuple[tuple[str, Any], ...] = ()
    preset: str = "moon.common"
    stored: str = ""

    def build(self, experiment: protocol.Protocol) -> Method:
        """The method, its options resolved: explicit > method preset > the setting > the file's default."""
        if self.stored:
            cls = load(self.name)
            made = cls if cls.__name__ == self.stored else getattr(module(self.name), self.stored)
            return made(**options.read(made, dict(self.given), label(self.name)))  # type: ignore[no-any-return]
        cls, name = load(self.name), label(self.name)
        given = self._without_protocol_fields(cls, dict(self.given), experiment)
        explicit = options.read(cls, given, name)
        setting = options.read(cls, self._setting(name), f"{name} in preset {self.preset}")
        asked = explicit.get("preset")
        chosen = options.read(cls, cls.presets.get(asked, {}), name) if asked else {}
        method = cls.build({**setting, **chosen, **explicit}, self._setting)
        from .method import need

        if asked:
            need(f"{name} preset={asked}", experiment, **cls.needs.get(asked, {}))
        return method

    def _setting(self, method: str) -> Mapping[str, Any]:
        """Option values that the preset gives; of METHOD+PLUGIN those of both."""
        base, *others = [method] if is_path(method) else method.split("+")
        values = protocol.method_setting(self.preset, base)
        for name in others:
            added = plugin(name)
            for source in filter(None, (added.values_of, name)):
                mine = protocol.method_setting(self.preset, source)
                values |= {k: v for k, v in mine.items() if k in options.fields(added)}
        return values

    def _without_protocol_fields(
        self, cls: type[Method], given: dict[str, Any], experiment: protocol.Protocol
    ) -> dict[str, Any]:
        """A protocol field set for one method must equal the experiment's: a table has one protocol."""
        from .method import need

        shared = set(options.fields(protocol.Protocol)) - set(options.fields(cls))
        for key in [k for k in given if k in shared]:
            need(f"{label(self.name)}.{key}", experiment, **protocol.coerce({key: given.pop(key)}))
        return given


def check(method: Method, experiment: protocol.Protocol, adapted: protocol.Protocol, net: Net) -> None:
    """Refuse what a method cannot do in this experiment (or in what it makes of it), before any work starts."""
    method.check(experiment, net)
    if adapted.pm_clients == "all" and adapted.pm_protocol == "as_trained" and not method.keeps_personal \
            and set(adapted.metrics) - {"gm"}:  # fmt: skip
        raise UserError(
            f"pm_clients=all as trained needs a method that keeps its personal models, {type(method).__name__} does not: "
            "set pm_protocol=refresh or pm_clients=active"
        )


def describe(method: Method) -> dict[str, Any]:
    """The class and all option values, as JSON knows them."""
    return {"class": type(method).__name__, "options": dataclasses.asdict(method)}
