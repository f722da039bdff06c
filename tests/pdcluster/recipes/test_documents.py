import pytest

from pdcluster.errors import SpecError, UserError
from pdcluster.recipes.documents import parse_document, show_path


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("model:\n  base_args:\n    - '--a\n", ["r.yaml:4:1", "not valid YAML", "model.base_args"]),
        ("variants:\n  fp8:\n    extra_args: [--a\n  x: 1\n", ["r.yaml:4:", "variants.fp8"]),
        ("model: {a: 1\n", ["r.yaml:2:1", "not valid YAML"]),
        ("model:\n\tbase_args: []\n", ["r.yaml:2:", "not valid YAML"]),
        ("- a\n- b\n", ["r.yaml:1", "a mapping of keys is needed", "not list"]),
        ("variants:\n  a: {}\n  b:\n    tp: 1\n    tp: 2\n", ["r.yaml:5", "variants.b.tp stands twice", "line 4"]),
        ("features:\n  - a: 1\n    a: 2\n", ["features[0].a stands twice"]),
    ],
)
def test_a_broken_file_is_refused_with_file_line_and_key_path(text, words):
    with pytest.raises(UserError) as caught:
        parse_document(text, "r.yaml")
    for word in words:
        assert word in str(caught.value)


def test_a_document_knows_the_line_of_every_key_and_item():
    document = parse_document("model:\n  base_args:\n    - --a\n    - --b\n  id: x\n", "r.yaml")
    assert document.line(("model", "base_args")) == 2
    assert document.line(("model", "base_args", 1)) == 4
    assert document.line(("model", "no such key")) == 1
    assert document.where(("model", "id")) == "r.yaml:5: model.id"


def test_a_path_that_is_absent_reads_as_nothing():
    document = parse_document("a: {b: [1]}\n", "r.yaml")
    assert document.get("a", "b") == [1]
    assert document.get("a", "x", "y") is None
    assert document.get("a", "b", "c") is None
    assert show_path(("a", 0, "b")) == "a[0].b"


def test_an_unknown_key_warns_by_path_with_the_nearest_name_and_the_recipe_still_resolves(shelf):
    shelf.write("features:\n  tools: {arg: [--tools], args: [--t]}\nmodel: {model_id: m, base_argz: [--a]}")
    library = shelf.library
    library.recipe("acme/m")
    warnings = "\n".join(library.warnings())
    assert "models/acme/m.yaml:2: features.tools.arg: unknown key" in warnings
    assert "did you mean args?" in warnings
    assert "model.base_argz" in warnings
    assert shelf.argv(features=("tools",)) == ["--tensor-parallel-size", "8", "--t"]


def test_every_wrong_type_is_an_error_with_its_line_and_path(shelf):
    shelf.write("model:\n  model_id: 7\n  base_args: --a\nvariants: {default: {tp: many, vram_minimum_gb: [1]}}")
    with pytest.raises(SpecError) as caught:
        shelf.library.recipe("acme/m")
    text = str(caught.value)
    assert "models/acme/m.yaml:2: model.model_id: must be text, not a whole number (7)" in text
    assert "models/acme/m.yaml:3: model.base_args: must be a list, not text ('--a')" in text
    assert "variants.default.tp: must be a whole number or a mapping of keys" in text
    assert "variants.default.vram_minimum_gb: must be a whole number or a number, not a list" in text


def test_a_truth_value_is_no_number_and_a_key_must_be_text(shelf):
    shelf.write("variants: {default: {vram_minimum_gb: true}, 8: {}}")
    with pytest.raises(SpecError) as caught:
        shelf.library.recipe("acme/m")
    assert "vram_minimum_gb: must be a whole number or a number, not true or false" in str(caught.value)
    assert "a key must be text, not a whole number (8)" in str(caught.value)


@pytest.mark.parametrize(
    ("choice", "words"),
    [
        ({"model": "acme/n"}, ["recipe acme/n: unknown", "did you mean acme/m?"]),
        ({"model": "M"}, ["did you mean acme/m?"]),
        ({"variant": "fp"}, ["variant fp: unknown", "did you mean fp8?", "known: default, fp8"]),
        ({"strategy": "single_node_pt"}, ["did you mean single_node_tp?"]),
        ({"hardware": "h20"}, ["hardware h20: unknown", "did you mean h200?"]),
        ({"features": ("reasonin",)}, ["feature reasonin: unknown", "did you mean reasoning?"]),
        ({"modes": {"spec": "mpt"}}, ["mode of spec mpt: unknown", "did you mean mtp?"]),
        ({"kv_offload": "simpel"}, ["did you mean simple?"]),
        ({"kv_store": "pol"}, ["did you mean pool?"]),
    ],
)
def test_an_unknown_name_of_any_kind_gets_the_nearest_known_one(shelf, choice, words):
    from pdcluster.recipes.choice import Choice, select

    shelf.write("variants: {default: {}, fp8: {}}\nfeatures: {reasoning: {}, spec: {modes: {mtp: {args: [--m]}}}}")
    with pytest.raises(UserError) as caught:
        select(shelf.library, Choice(**{"model": "acme/m", "strategy": "single_node_tp", "hardware": "h200"} | choice))
    for word in words:
        assert word in str(caught.value)


def test_a_directory_that_holds_no_recipes_is_refused(tmp_path):
    from pdcluster.recipes.library import Library

    with pytest.raises(UserError, match="no recipe directory"):
        Library(tmp_path)


def test_a_profile_without_its_generation_is_refused_with_its_line(shelf):
    (shelf.root / "taxonomy.yaml").write_text("hardware_profiles:\n  h: {brand: NVIDIA, vram_gb: 1}\n")
    with pytest.raises(UserError, match=r"taxonomy.yaml:2: hardware_profiles.h: generation is missing"):
        shelf.library.profiles()


def test_a_hundred_recipes_are_read_and_resolved_in_under_three_seconds(shelf):
    import time

    from pdcluster.recipes.choice import Choice, select
    from pdcluster.recipes.resolve import resolve

    guide = "guide: |\n" + "  words\n" * 100
    for number in range(100):
        rows = (f"  v{i}: {{precision: fp8, vram_minimum_gb: {i}, extra_args: [--seed, '{i}']}}" for i in range(40))
        shelf.write("\n".join([guide, "variants:", "  default: {}", *rows]), name=f"acme/m{number}")
    library = shelf.library
    started = time.process_time()
    for model in library.models():
        resolve(select(library, Choice(model, "pd_cluster", "h200", nodes=2)))
    assert time.process_time() - started < 3
