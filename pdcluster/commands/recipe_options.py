"""Options that say which part of a recipe is meant, shared by the verbs of `recipe` and by `plan` and `launch`."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from pdcluster.recipes.library import Library
    from pdcluster.recipes.request import Request

    Requested = Request
else:
    Requested = Any  # typer evaluates annotations; the real class need not be imported for `--help`

Recipes = Annotated[
    Path | None,
    typer.Option("--recipes", metavar="DIR", help="A directory in the recipe format.", show_default="the shipped one"),
]
Model = Annotated[str, typer.Argument(metavar="MODEL", help="A recipe's id, such as moonshotai/Kimi-K3.")]
BelowFloor = Annotated[bool, typer.Option("--below-floor", help="Allow fewer GPUs than the recipe's floor.")]


def _text(flag: str, text: str, default: str | bool = "the recipe's") -> Any:
    return Annotated[str | None, typer.Option(flag, help=text, show_default=default)]


def _count(flag: str, text: str, default: str | bool = "the recipe's", least: int = 1) -> Any:
    return Annotated[int | None, typer.Option(flag, min=least, max=1024, help=text, show_default=default)]


def _many(flag: str, metavar: str, text: str) -> Any:
    return Annotated[list[str] | None, typer.Option(flag, metavar=metavar, help=text, show_default=False)]


# Field of a Request -> its option.
REQUEST_OPTIONS: dict[str, Any] = {
    "variant": _text("--variant", "Variant: which checkpoint is served.", "default"),
    "hardware": _text("--hardware", "Hardware profile, such as gb300."),
    "strategy": _text("--strategy", "How ranks are laid out, such as pd_cluster."),
    "nodes": _count("--nodes", "Nodes of a single- or multi-node deployment."),
    "prefill_nodes": _count("--prefill-nodes", "Nodes of one prefill instance; 0 shares a node with decode.", least=0),
    "decode_nodes": _count("--decode-nodes", "Nodes of one decode instance; 0 shares a node with prefill.", least=0),
    "prefill_parallelism": _text("--prefill-parallelism", "tp, tep or dep for the prefill pool."),
    "decode_parallelism": _text("--decode-parallelism", "tp, tep or dep for the decode pool."),
    "features": _many("--feature", "NAME[=MODE]", "Add a feature to the default selection; repeat as needed."),
    "without": _many("--without", "NAME", "Take a feature out of the default selection."),
    "only_these": Annotated[bool, typer.Option("--only-these", help="Start from no feature at all.")],
    "kv_offload": _text("--kv-offload", "A KV offload option of the taxonomy.", "none"),
    "kv_store": _text("--kv-store", "A KV store that composes with the strategy.", "none"),
    "gpus_per_node": _count("--gpus-per-node", "GPUs of a node, where they differ or no source says.", "the profile's"),
    "user_args": _many("--arg", "TOKEN", "A further token for vLLM; write --arg=--flag for each."),
}
_FLAGS = ("only_these",)
_LISTS = ("features", "without", "user_args")


def takes_request(verb: Callable[..., None]) -> Callable[..., None]:
    """Give a verb MODEL and every option that narrows a recipe; the verb gets them as `request`."""
    own = [item for item in inspect.signature(verb, eval_str=True).parameters.values() if item.name != "request"]
    keyword = inspect.Parameter.KEYWORD_ONLY
    model = inspect.Parameter("model", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=Model)
    shared = [
        inspect.Parameter(name, keyword, default=False if name in _FLAGS else None, annotation=kind)
        for name, kind in REQUEST_OPTIONS.items()
    ]

    @functools.wraps(verb)
    def run(**values: Any) -> None:
        given = {name: values.pop(name) for name in REQUEST_OPTIONS}
        verb(request=request_of(values.pop("model"), given), **values)

    run.__signature__ = inspect.Signature([model, *shared, *own])  # type: ignore[attr-defined] # read by typer
    return run


def request_of(model: str, given: dict[str, Any]) -> Requested:
    """Make a request of parsed options."""
    from pdcluster.recipes.request import Request

    lists = {name: tuple(given.get(name) or ()) for name in _LISTS}
    return Request(model, **{**given, **lists})


def open_library(recipes: Path | None) -> Library:
    """Open the directory given, or the shipped recipes."""
    from pdcluster.recipes.library import SHIPPED, Library

    return Library(recipes or SHIPPED)
