"""Read a cluster spec from defaults, a YAML file and flags, and remember where each value came from.

Later layers win: defaults < recipe < file < flags. Everything wrong is reported at once, each with its key path.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from pdcluster.errors import Problem, SpecError, UserError
from pdcluster.recipe_layer import RecipeLayer, UnknownCountError, merge_under, recipe_layer
from pdcluster.recipes.choice import PD
from pdcluster.spec import ROLES, ClusterSpec, RecipeSpec

# Pydantic's words for some kinds of value, in YAML's.
_KINDS = {
    "model_type": "a mapping of keys",
    "model_attributes_type": "a mapping of keys",
    "dict_type": "a mapping of keys",
    "tuple_type": "a list, such as [--seed, '7']",
    "int_parsing": "a whole number",
    "int_from_float": "a whole number",
}


class _StrictLoader(yaml.SafeLoader):
    """YAML without its silent last-wins: a key that stands twice in one mapping is an error."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key_node, _ in node.value:
            key = key_node.value
            if key in seen:
                raise yaml.constructor.ConstructorError(None, None, f"the key {key} stands twice", key_node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep=deep)


@dataclass(frozen=True, slots=True)
class LoadedSpec:
    """A valid spec, the origin of every key that was set (dotted key path -> file or flag), and its recipe."""

    spec: ClusterSpec
    origins: Mapping[str, str]
    recipe: RecipeLayer | None = None

    def origin(self, path: str) -> str:
        """Say where the value at `path` came from; a key nobody set is a default."""
        while path:
            if path in self.origins:
                return self.origins[path]
            path = path.rpartition(".")[0]
        return "default"


@dataclass(frozen=True, slots=True)
class Flag:
    """One value set on the command line: dotted key path, value, and the flag as the user wrote it."""

    path: str
    value: Any
    label: str


def load_spec(config: Path | None = None, flags: Sequence[Flag] = ()) -> LoadedSpec:
    """Merge the layers and validate them; raises `SpecError` with every problem, `UserError` for a file."""
    document = _read_yaml(config) if config is not None else {}
    origins = {path: str(config) for path in _leaf_paths(document)}
    problems: list[Problem] = []
    for flag in flags:
        problem = _assign(document, flag)
        if problem is not None:
            problems.append(problem)
            continue
        prefix = flag.path + "."
        origins = {path: origin for path, origin in origins.items() if not path.startswith(prefix)}
        origins[flag.path] = flag.label
    layer = None if problems else _recipe_layer(document)
    if layer is not None:
        document = merge_under(layer.document, document)
        origins = {**layer.origins, **origins}
    try:
        spec = ClusterSpec.model_validate(document)
    except ValidationError as error:
        problems += [_problem(detail, origins) for detail in error.errors()]
    if problems:
        raise SpecError(problems)
    return LoadedSpec(spec, origins, layer)


def _recipe_layer(document: Mapping[str, Any]) -> RecipeLayer | None:
    """Resolve the recipe that a document names; a section that is wrong is left to the whole spec's validation."""
    if not isinstance(document.get("recipe"), dict):
        return None
    try:
        recipe = RecipeSpec.model_validate(document["recipe"])
    except ValidationError:
        return None
    if recipe.strategy not in (None, PD):  # serves without pools: nothing of it belongs in a spec
        return None
    pools = document.get("pools")
    asked = {role: pools.get(role) for role in ROLES} if isinstance(pools, dict) else {}
    nodes = {role: pool["nodes"] for role, pool in asked.items() if isinstance(pool, dict) and "nodes" in pool}
    try:
        return recipe_layer(recipe, nodes)
    except UnknownCountError:  # `plan` prints the commands with a variable for it; nothing else can use them
        return None


def with_flags(loaded: LoadedSpec, flags: Sequence[Flag]) -> LoadedSpec:
    """Return a copy of a valid spec with further values set on top."""
    document = loaded.spec.model_dump(exclude_unset=True)
    for flag in flags:
        _assign(document, flag)
    origins = {**loaded.origins, **{flag.path: flag.label for flag in flags}}
    return LoadedSpec(ClusterSpec.model_validate(document), origins, loaded.recipe)


def parse_set_flags(assignments: Iterable[str]) -> list[Flag]:
    """Parse `--set path=value`; the value is YAML, so numbers and lists are what they look like."""
    flags, problems = [], []
    for text in assignments:
        path, separator, raw = text.partition("=")
        label = f"--set {path}"
        if not separator or not path.strip():
            problems.append(Problem(f"--set {text}", "is not KEY=VALUE", "e.g. --set pools.decode.replicas=4"))
            continue
        try:
            flags.append(Flag(path.strip(), yaml.safe_load(raw), label))
        except yaml.YAMLError:
            problems.append(Problem(label, f"the value {raw!r} is not YAML", "quote it"))
    if problems:
        raise SpecError(problems)
    return flags


def json_schema() -> str:
    """Return the JSON Schema of the cluster spec."""
    schema = ClusterSpec.model_json_schema()
    schema = {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}
    return json.dumps(schema, indent=2)


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise UserError(f"{path}: cannot read the cluster spec: {reason}") from error
    try:
        document = yaml.load(text, Loader=_StrictLoader)  # noqa: S506 - a SafeLoader
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{path}:{mark.line + 1}:{mark.column + 1}" if mark else str(path)
        what = getattr(error, "problem", None) or "unreadable"
        raise UserError(f"{where}: not valid YAML: {what}; check indentation and quotes there") from error
    if document is None:
        return {}
    if not isinstance(document, dict) or not all(isinstance(key, str) for key in document):
        raise UserError(f"{path}: a cluster spec is a mapping of keys; `pdcluster schema` prints them")
    return document


def _leaf_paths(node: Any, prefix: str = "") -> list[str]:
    if not isinstance(node, dict) or not node:
        return [prefix] if prefix else []  # an empty mapping is a leaf too
    return [
        leaf for key, value in node.items() for leaf in _leaf_paths(value, f"{prefix}.{key}" if prefix else str(key))
    ]


def _assign(document: dict[str, Any], flag: Flag) -> Problem | None:
    """Set a dotted path in place; a step through something that is no mapping is a problem."""
    *parents, last = flag.path.split(".")
    node = document
    for index, key in enumerate(parents):
        child = node.get(key)
        if child is None:
            child = node[key] = {}
        if not isinstance(child, dict):
            return Problem(flag.label, f"{'.'.join(parents[: index + 1])} holds a value, not keys")
        node = child
    node[last] = flag.value
    return None


def _problem(detail: Any, origins: Mapping[str, str]) -> Problem:
    path = ".".join(str(part) for part in detail["loc"])
    origin = _origin_of(path, origins)
    where = f"{path} ({origin})" if origin else path or "spec"
    if detail["type"] == "extra_forbidden":
        return Problem(where, "unknown key", _nearest(detail["loc"]))
    message = _KINDS.get(detail["type"]) or detail["msg"].removeprefix("Value error, ").removeprefix("Input should be ")
    given = detail.get("input")
    shown = "" if isinstance(given, dict | list) else f", not {given!r}"
    verb = "must be " if detail["msg"].startswith("Input should be") else ""
    return Problem(where, f"{verb}{message}{shown}")


def _origin_of(path: str, origins: Mapping[str, str]) -> str:
    for known, origin in origins.items():
        if known == path or known.startswith(path + ".") or path.startswith(known + "."):
            return origin
    return ""


def _nearest(location: Sequence[Any]) -> str:
    """Name the known key that is closest to the unknown one."""
    model: type[BaseModel] = ClusterSpec
    for part in location[:-1]:
        field = model.model_fields.get(str(part))
        candidate = field.annotation if field else None
        if not (isinstance(candidate, type) and issubclass(candidate, BaseModel)):
            return "see `pdcluster schema`"
        model = candidate
    names = list(model.model_fields)
    close = difflib.get_close_matches(str(location[-1]), names, n=1)
    return f"did you mean {close[0]}?" if close else f"known here: {', '.join(names)}"
