"""`doctor` and `models`: what this machine can do, and which models need no download."""

from __future__ import annotations

import json
import os
from dataclasses import asdict

import typer

from pdcluster.commands import options

_MARKS = {"ok": "ok  ", "warn": "warn", "fail": "FAIL"}


def doctor(as_json: options.Json = False) -> None:
    """Look at Python, vLLM, NIXL, devices, memory and limits, and say how to mend what is wrong.

    Exit code 0 if a cluster can run here, 1 if not.
    """
    from pdcluster.doctor import examine

    if not as_json:
        options.say("looking at this machine (vLLM's import takes about 10 s)")
    findings = examine(os.environ)
    failed = any(finding.level == "fail" for finding in findings)
    if as_json:
        typer.echo(json.dumps({"ok": not failed, "findings": [asdict(finding) for finding in findings]}, indent=2))
    else:
        for finding in findings:
            advice = f"\n       -> {finding.advice}" if finding.advice else ""
            typer.echo(f"{_MARKS[finding.level]} {finding.subject}: {finding.detail}{advice}")
    raise typer.Exit(1 if failed else 0)


def models(as_json: options.Json = False) -> None:
    """List the models that need no download, and whether they are made already."""
    from pdcluster.models.catalog import CATALOG, model_directory

    rows = [
        {
            "name": model.name,
            "description": model.description,
            "parameters": model.parameters,
            "licence": model.licence,
            "max_model_len": model.max_model_len,
            "directory": str(model_directory(model.name)) if model_directory(model.name).is_dir() else None,
        }
        for model in CATALOG.values()
    ]
    if as_json:
        typer.echo(json.dumps(rows, indent=2))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table("model", "what", "parameters", "context", "licence", "made")
    for row in rows:
        made = "yes" if row["directory"] else "at first use"
        table.add_row(
            *(str(row[key]) for key in ("name", "description", "parameters", "max_model_len", "licence")), made
        )
    Console().print(table)
