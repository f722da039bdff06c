"""A directory of recipes: models, strategies, taxonomy and KV stores, each file read when it is asked for and kept."""

from __future__ import annotations

from pathlib import Path

from pdcluster.errors import SpecError, UserError
from pdcluster.recipes.documents import Document, read_document
from pdcluster.recipes.formats import KV_STORE, RECIPE, STRATEGY, TAXONOMY
from pdcluster.recipes.hardware import Profile
from pdcluster.recipes.names import unknown
from pdcluster.recipes.shapes import Shape, check_shape

SHIPPED = Path(__file__).parent / "data"


class Library:
    """The files under one directory in the recipe format; a file is read, checked and kept at its first use."""

    def __init__(self, root: Path = SHIPPED) -> None:
        if not (root / "models").is_dir() or not (root / "taxonomy.yaml").is_file():
            raise UserError(
                f"{root}: no recipe directory; one has taxonomy.yaml, models/ and strategies/ (give --recipes DIR)"
            )
        self.root = root
        self._documents: dict[str, Document] = {}
        self._warnings: dict[str, list[str]] = {}
        self._profiles: dict[str, Profile] = {}

    def models(self) -> tuple[str, ...]:
        """Return every model id: the path under models/ without its extension."""
        base = self.root / "models"
        return tuple(sorted(path.relative_to(base).with_suffix("").as_posix() for path in base.rglob("*.yaml")))

    def recipe(self, model: str) -> Document:
        """Return a model's recipe; an unknown model raises `UserError` with the nearest names."""
        file = f"models/{model}.yaml"
        if file not in self._documents and not (self.root / file).is_file():
            raise UserError(unknown("recipe", model, self.models()))
        return self._read(file, RECIPE)

    def strategy(self, name: str) -> Document:
        """Return a strategy's file; an unknown one raises `UserError` with the nearest names."""
        file = f"strategies/{name}.yaml"
        if file not in self._documents and not (self.root / file).is_file():
            raise UserError(unknown("strategy", name, self.strategies()))
        return self._read(file, STRATEGY)

    def strategies(self) -> tuple[str, ...]:
        """Return the names of all strategies, in the taxonomy's order."""
        listed = self.taxonomy().get("strategies") or []
        files = sorted(path.stem for path in (self.root / "strategies").glob("*.yaml"))
        return tuple([name for name in listed if name in files] + [name for name in files if name not in listed])

    def kv_store(self, name: str) -> Document:
        """Return a KV store's file; an unknown one raises `UserError` with the nearest names."""
        file = f"kv_store/{name}.yaml"
        if file not in self._documents and not (self.root / file).is_file():
            raise UserError(unknown("KV store", name, self.kv_stores()))
        return self._read(file, KV_STORE)

    def kv_stores(self) -> tuple[str, ...]:
        """Return the names of all KV stores."""
        return tuple(sorted(path.stem for path in (self.root / "kv_store").glob("*.yaml")))

    def taxonomy(self) -> Document:
        """Return the controlled vocabulary."""
        return self._read("taxonomy.yaml", TAXONOMY)

    def profiles(self) -> dict[str, Profile]:
        """Return every hardware profile by id, in the taxonomy's order."""
        if not self._profiles:
            table = self.taxonomy().get("hardware_profiles") or {}
            self._profiles = {name: _profile(self.taxonomy(), name) for name in table}
        return self._profiles

    def profile(self, hardware: str) -> Profile:
        """Return one hardware profile; an unknown id raises `UserError` with the nearest names."""
        known = self.profiles()
        if hardware not in known:
            raise UserError(unknown("hardware", hardware, tuple(known)))
        return known[hardware]

    def warnings(self) -> tuple[str, ...]:
        """Return what was odd in the files read so far: unknown keys by path."""
        return tuple(warning for warnings in self._warnings.values() for warning in warnings)

    def _read(self, file: str, shape: Shape) -> Document:
        if file not in self._documents:
            document = read_document(self.root / file, file)
            problems, warnings = check_shape(document, shape)
            if problems:
                raise SpecError(problems)
            self._documents[file] = document
            self._warnings[file] = warnings
        return self._documents[file]


def _profile(taxonomy: Document, name: str) -> Profile:
    def need(key: str) -> object:
        value = taxonomy.get("hardware_profiles", name, key)
        if value is None:
            where = taxonomy.where(("hardware_profiles", name))
            raise UserError(f"{where}: {key} is missing; a profile needs brand and generation")
        return value

    def optional(key: str) -> object:
        return taxonomy.get("hardware_profiles", name, key)

    count, vram = optional("gpu_count"), optional("vram_gb")
    return Profile(
        id=name,
        brand=str(need("brand")),
        generation=str(need("generation")),
        gpu_count=count if isinstance(count, int) else 0,
        vram_gb=vram if isinstance(vram, int | float) else 0,
        display_name=str(optional("display_name") or name),
        scalable=optional("scalable") is not False,
        restricted=optional("restricted") is True,
    )
