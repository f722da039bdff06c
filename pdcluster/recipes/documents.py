"""One YAML file of a recipe directory: its data, and the line of each key for whoever has to mend it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from pdcluster.errors import UserError

Key = str | int
KeyPath = tuple[Key, ...]
# libyaml's parser is ten times as fast; the wheel may lack it.
_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


@dataclass(frozen=True, slots=True, eq=False)
class Document:
    """A file's name as the user knows it, its data, and the parsed nodes that know their lines."""

    file: str
    data: dict[str, Any]
    _root: yaml.Node | None = field(repr=False, default=None)

    def get(self, *path: Key) -> Any:
        """Return the value at `path`, None where it or one of its parents is absent."""
        node: Any = self.data
        for key in path:
            if not node or type(node) is not dict:
                return None
            node = node.get(key)
        return node

    def line(self, path: KeyPath) -> int | None:
        """Return the line of `path` (of its nearest parent where it is absent), None without positions."""
        node = self._root
        line = None if node is None else node.start_mark.line + 1
        for key in path:
            child = _child(node, key)
            if child is None:
                return line
            line, node = child
        return line

    def source(self, path: KeyPath) -> str | None:
        """Return who declared what stands at `path`, as "revision (date)"; None where the file doesn't say."""
        facts = self.data.get("facts")
        if not isinstance(facts, dict):
            return None
        for length in range(len(path), 0, -1):
            name = facts.get(".".join(str(key) for key in path[:length]))
            if name is not None:
                revision, date = self.get("sources", name, "revision"), self.get("sources", name, "date")
                return f"{str(revision or name)[:12]}{f' ({date})' if date else ''}"
        return None

    def where(self, path: KeyPath) -> str:
        """Return "file:line: key path" for a message."""
        line = self.line(path)
        shown = show_path(path)
        return f"{self.file}{f':{line}' if line else ''}" + (f": {shown}" if shown else "")


def show_path(path: Sequence[Key]) -> str:
    """Return a key path as text: `variants.fp8.extra_args[2]`."""
    text = ""
    for key in path:
        text += f"[{key}]" if isinstance(key, int) else f".{key}" if text else key
    return text


def read_document(path: Path, shown: str | None = None) -> Document:
    """Read a YAML file whose root is a mapping; raises `UserError` with file, line and key path where it is broken."""
    file = shown or str(path)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise UserError(f"{file}: cannot be read: {reason}") from error
    return parse_document(text, file)


def parse_document(text: str, file: str) -> Document:
    """Parse YAML text; see `read_document`."""
    loader = _Loader(text)
    try:
        root = loader.get_single_node()
        if root is not None:
            _refuse_twice(root, (), file)
        data = None if root is None else loader.construct_document(root)
    except yaml.YAMLError as error:
        raise UserError(_broken(error, text, file)) from error
    finally:
        loader.dispose()
    if data is None:
        data = {}
    if not isinstance(data, dict):
        raise UserError(f"{file}:1: a mapping of keys is needed at the top, not {type(data).__name__}")
    return Document(file, data, root)


def _child(node: yaml.Node | None, key: Key) -> tuple[int, yaml.Node] | None:
    if isinstance(node, yaml.MappingNode):
        for name, value in node.value:
            if name.value == str(key):
                return name.start_mark.line + 1, value
    if isinstance(node, yaml.SequenceNode) and isinstance(key, int) and key < len(node.value):
        item = node.value[key]
        return item.start_mark.line + 1, item
    return None


def _refuse_twice(node: yaml.Node, path: KeyPath, file: str) -> None:
    """Refuse a key that stands twice in one mapping: YAML would silently keep the last."""
    if isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            if not isinstance(item, yaml.ScalarNode):
                _refuse_twice(item, (*path, index), file)
    if isinstance(node, yaml.MappingNode):
        seen: dict[str, int] = {}
        for name, value in node.value:
            line = name.start_mark.line + 1
            if isinstance(name, yaml.ScalarNode) and name.value in seen:
                shown = show_path((*path, name.value))
                raise UserError(
                    f"{file}:{line}: {shown} stands twice, first on line {seen[name.value]}; keep one of them"
                )
            seen[str(name.value)] = line
            if not isinstance(value, yaml.ScalarNode):
                _refuse_twice(value, (*path, str(name.value)), file)


def _broken(error: yaml.YAMLError, text: str, file: str) -> str:
    mark = getattr(error, "problem_mark", None)
    what = getattr(error, "problem", None) or "unreadable"
    if mark is None:
        return f"{file}: not valid YAML: {what}"
    begun = getattr(error, "context_mark", None) or mark
    inside = _path_at(text, begun.line, begun.column)
    return f"{file}:{mark.line + 1}:{mark.column + 1}: not valid YAML: {what}" + (f", in {inside}" if inside else "")


def _path_at(text: str, line: int, column: int) -> str:
    """Guess from indentation which keys a broken line lies in, innermost last."""
    keys: list[str] = []
    limit = column + 1
    for row in reversed(text.splitlines()[: line + 1]):
        stripped = row.lstrip()
        indent = len(row) - len(stripped)
        name, colon, _ = stripped.partition(":")
        if colon and indent < limit and name and not name.startswith(("#", "-", '"', "'")):
            keys.append(name)
            limit = indent
    return ".".join(reversed(keys))
