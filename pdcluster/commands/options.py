"""Options that several verbs share, and how they become a cluster spec."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from pdcluster.spec_loading import LoadedSpec

    Loaded = LoadedSpec
else:
    Loaded = Any  # typer evaluates annotations; the real class would import pydantic for `--help`

Name = Annotated[str | None, typer.Option("--name", help="Name of the cluster.", show_default="default")]
FitMemory = Annotated[bool, typer.Option("--fit-memory", help="Start fewer engines where memory is short.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON for machines.")]
_Config = Annotated[Path | None, typer.Option("--config", "-c", help="Cluster spec in YAML.", show_default=False)]
_Directory = Annotated[
    Path | None,
    typer.Option("--recipes", metavar="DIR", help="Recipes in the format.", show_default="the shipped ones"),
]


_Set = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Any key of the spec; repeat as needed.", show_default=False),
]


def _option(kind: Any, flag: str, text: str, default: str | bool = False) -> Any:
    return Annotated[kind | None, typer.Option(flag, help=text, show_default=default)]


def _many(flag: str, metavar: str, text: str) -> Any:
    return Annotated[list[str] | None, typer.Option(flag, metavar=metavar, help=text, show_default=False)]


def _switch(flag: str, text: str) -> Any:
    return Annotated[bool | None, typer.Option(flag, help=text, show_default=False)]


# Flags whose value is a list, written with commas.
_COMMAS = ("prefill_hosts", "decode_hosts")

# Flag -> its option and the keys of the spec that it sets.
_SPEC_FLAGS: dict[str, tuple[Any, tuple[str, ...]]] = {
    "prefill": (_option(int, "--prefill", "Prefill instances.", "1"), ("pools.prefill.replicas",)),
    "decode": (_option(int, "--decode", "Decode instances.", "1"), ("pools.decode.replicas",)),
    "model": (
        _option(str, "--model", "Embedded model, checkpoint directory, or model id.", "smollm2"),
        ("model",),
    ),
    "port": (_option(int, "--port", "Port of the endpoint.", "8000"), ("proxy.port",)),
    "host": (_option(str, "--host", "Address of the endpoint.", "127.0.0.1"), ("proxy.host",)),
    "name": (Name, ("name",)),
    "max_model_len": (
        _option(str, "--max-model-len", 'Context of both pools in tokens, such as "128k".'),
        ("pools.prefill.max_model_len", "pools.decode.max_model_len"),
    ),
    "connector": (_option(str, "--connector", "How KV moves.", "nixl"), ("connector",)),
    "recipe": (_option(str, "--recipe", "Published settings, such as moonshotai/Kimi-K3."), ("recipe.id",)),
    "recipes": (_Directory, ("recipe.directory",)),
    "variant": (_option(str, "--variant", "The recipe's variant.", "default"), ("recipe.variant",)),
    "hardware": (_option(str, "--hardware", "Hardware profile, such as gb300."), ("recipe.hardware",)),
    "strategy": (_option(str, "--strategy", "How ranks are laid out.", "pd_cluster"), ("recipe.strategy",)),
    "feature": (_many("--feature", "NAME[=MODE]", "Add one of the recipe's features."), ("recipe.features",)),
    "without": (_many("--without", "NAME", "Leave one of the recipe's default features out."), ("recipe.without",)),
    "prefill_nodes": (_option(int, "--prefill-nodes", "Hosts of a prefill instance.", "1"), ("pools.prefill.nodes",)),
    "decode_nodes": (_option(int, "--decode-nodes", "Hosts of a decode instance.", "1"), ("pools.decode.nodes",)),
    "prefill_hosts": (_option(str, "--prefill-hosts", "Addresses, by comma."), ("pools.prefill.hosts",)),
    "decode_hosts": (_option(str, "--decode-hosts", "Addresses, by comma."), ("pools.decode.hosts",)),
    "gpus_per_node": (_option(int, "--gpus-per-node", "Where the profile doesn't say."), ("recipe.gpus_per_node",)),
    "below_floor": (_switch("--below-floor", "Allow fewer GPUs than the recipe's floor."), ("recipe.below_floor",)),
    "any_strategy": (
        _switch("--any-strategy", "Make pools of a recipe that doesn't offer them."),
        ("recipe.any_strategy",),
    ),
    "any_vllm": (_switch("--any-vllm", "Allow an older vLLM than the recipe's."), ("recipe.any_vllm",)),
}


def takes_spec(verb: Callable[..., None]) -> Callable[..., None]:
    """Give a verb every option that makes a cluster spec; the verb gets the result as `loaded`."""
    own = [item for item in inspect.signature(verb, eval_str=True).parameters.values() if item.name != "loaded"]
    shared = {"config": _Config, **{name: option for name, (option, _) in _SPEC_FLAGS.items()}, "assignments": _Set}
    keyword = inspect.Parameter.KEYWORD_ONLY
    parameters = [inspect.Parameter(name, keyword, default=None, annotation=kind) for name, kind in shared.items()]

    @functools.wraps(verb)
    def run(**values: Any) -> None:
        given = {name: values.pop(name) for name in shared}
        verb(loaded=_load(given), **values)

    run.__signature__ = inspect.Signature([*parameters, *own])  # type: ignore[attr-defined] # read by typer
    return run


def say(text: str) -> None:
    """Tell a person something on the error stream, so that output stays clean for machines."""
    typer.echo(text, err=True)


def _load(given: dict[str, Any]) -> Loaded:
    """Merge the file and the flags; --set comes last and wins."""
    from pdcluster.spec_loading import Flag, load_spec, parse_set_flags

    flags = [
        Flag(path, _value(name, given[name]), "--" + name.replace("_", "-"))
        for name, (_, paths) in _SPEC_FLAGS.items()
        for path in paths
        if given[name] not in (None, [])
    ]
    return load_spec(given["config"], [*flags, *parse_set_flags(given["assignments"] or [])])


def _value(name: str, value: Any) -> Any:
    """Return a flag's value as YAML would hold it."""
    if name in _COMMAS:
        return [part.strip() for part in value.split(",") if part.strip()]
    return str(value) if isinstance(value, Path) else value
