import json
import os
import threading

import pytest

from pdcluster.errors import UserError
from pdcluster.models import catalog, store


@pytest.fixture
def said():
    return []


@pytest.fixture
def made(tmp_path, said):
    """A checkpoint of two files."""

    def build(directory, say):
        (directory / "weights").write_bytes(b"w" * 100)
        (directory / "config.json").write_text("{}")

    directory = tmp_path / "models" / "m-r1"
    with store.lock(directory, said.append):
        store.make(directory, build, said.append)
    return directory


def test_what_was_made_is_whole_and_leaves_nothing_beside_it(made, said):
    assert store.damage(made) == []
    assert sorted(path.name for path in made.parent.iterdir()) == ["m-r1", "m-r1.lock"]
    sums = json.loads((made / store.CHECKSUMS).read_text())
    assert sums["weights"]["sha256"] == store.sha256(made / "weights")


def test_nothing_made_is_not_damage(tmp_path):
    assert store.damage(tmp_path / "none") is None


@pytest.mark.parametrize("harm", ["remove", "shorten", "change", "no sums", "empty sums"])
def test_damage_is_seen_and_said(made, said, harm):
    weights = made / "weights"
    if harm == "remove":
        weights.unlink()
    elif harm == "shorten":
        weights.write_bytes(b"w" * 99)
    elif harm == "change":
        weights.write_bytes(b"v" * 100)
        os.utime(weights, (1, 1))
    else:
        (made / store.CHECKSUMS).write_text("" if harm == "no sums" else "{}")
    assert not store.is_sound(made, said.append)
    assert "is damaged; making the model again" in said[-1]


def test_a_copied_cache_whose_times_differ_is_whole(made):
    os.utime(made / "weights", (1, 1))
    assert store.damage(made) == []


def test_a_build_that_fails_leaves_the_old_one_and_no_rest(made, said):
    def broken(directory, say):
        (directory / "half").write_text("x")
        raise RuntimeError("no space")

    with pytest.raises(RuntimeError):
        store.make(made, broken, said.append)
    assert store.damage(made) == []
    assert not made.with_name("m-r1.part").exists()


def test_a_second_builder_waits_for_the_first_and_says_so(tmp_path):
    directory = tmp_path / "m-r1"
    waiting, order = threading.Event(), []

    def second():
        with store.lock(directory, lambda _: waiting.set()):
            order.append("second")

    with store.lock(directory, order.append):
        other = threading.Thread(target=second)
        other.start()
        assert waiting.wait(5)
        order.append("first")
    other.join(5)
    assert order == ["first", "second"]


def test_missing_packages_are_refused_with_the_extra_that_has_them(tmp_path, monkeypatch):
    real = catalog.importlib.util.find_spec
    monkeypatch.setattr(catalog.importlib.util, "find_spec", lambda name: None if name == "gguf" else real(name))
    with pytest.raises(UserError, match=r"gguf.*pip install 'pdcluster\[demo\]'"):
        catalog.prepare("tiny", tmp_path, lambda _: None)


def test_an_unknown_name_is_refused_with_the_known_ones():
    with pytest.raises(UserError, match="tiny, tiny-mla"):
        catalog.model_directory("huge")


def test_a_cache_that_cannot_be_written_is_a_users_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="PDCLUSTER_CACHE"):
        catalog.prepare("tiny", tmp_path / "file", lambda _: None)


def test_the_cache_follows_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("PDCLUSTER_CACHE", str(tmp_path))
    assert catalog.model_directory("tiny").parent == tmp_path / "models"
    assert catalog.cached("tiny") is None
