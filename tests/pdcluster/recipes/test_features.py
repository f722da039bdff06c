import pytest

from pdcluster.recipes.features import default_features

SPEC = """
variants: {default: {default_modes: {spec: dspark}}, fp8: {}, bare: {}}
features:
  tools: {args: [--tools], hardware_overrides: {nvidia: {args: [--tools-nvidia]}, amd: {}}}
  spec:
    default_mode: mtp
    modes:
      mtp:
        variants: [fp8]
        hardware: {gb300: unsupported}
        args: [--spec, mtp]
        hardware_overrides: {hopper: {args: [--spec, mtp-hopper]}, h200: {}}
      dspark: {variants: [default], args: [--spec, dspark]}
  narrow: {strategies: [single_node_tep], args: [--narrow]}
opt_in_features: [spec, narrow]
hardware_opt_in_features: {gb300: [tools]}
"""


@pytest.mark.parametrize(
    ("variant", "hardware", "expected"),
    [
        ("default", "h200", ("tools", "spec")),
        ("fp8", "h200", ("tools",)),
        ("fp8", "gb300", ()),
    ],
)
def test_the_default_selection_leaves_out_what_is_opt_in_unless_the_variant_names_a_mode(
    shelf, variant, hardware, expected
):
    assert default_features(shelf.write(SPEC).library.recipe("acme/m"), variant, hardware) == expected


@pytest.mark.parametrize(
    ("variant", "hardware", "modes", "expected"),
    [
        ("default", "h200", {}, ["--spec", "dspark"]),
        ("fp8", "b200", {}, ["--spec", "mtp"]),
        ("fp8", "mi300x", {}, ["--spec", "mtp"]),
        ("fp8", "h200", {}, ["--spec", "mtp"]),
        ("fp8", "gb300", {}, []),
        ("bare", "h200", {}, []),
        ("default", "h200", {"spec": "dspark"}, ["--spec", "dspark"]),
    ],
)
def test_the_mode_is_the_pick_the_variants_default_the_features_or_the_first_possible(
    shelf, variant, hardware, modes, expected
):
    shelf.write(SPEC)
    assert shelf.argv(hardware=hardware, variant=variant, features=("spec",), modes=modes)[2:] == expected


def test_features_add_in_the_order_given_and_a_block_for_the_hardware_replaces_their_arguments(shelf):
    shelf.write(SPEC)
    assert shelf.argv(features=("spec", "tools"))[2:] == ["--spec", "dspark", "--tools-nvidia"]
    assert shelf.argv(hardware="mi300x", features=("tools", "spec"))[2:] == ["--tools", "--spec", "dspark"]


def test_a_feature_that_adds_nothing_warns_and_is_refused_where_a_person_asked_for_it(shelf):
    shelf.write(SPEC)
    quiet = shelf.resolve(features=("narrow",))
    assert "it works with single_node_tep only" in str(quiet.of_kind("warning")[0])
    assert not quiet.of_kind("refusal")
    asked = shelf.resolve(features=("narrow",), asked=frozenset({"narrow"}))
    assert [finding.rule for finding in asked.of_kind("refusal")] == ["feature-not-possible"]


def test_a_mode_that_the_variant_excludes_is_refused_with_those_that_work(shelf):
    shelf.write(SPEC)
    (refusal,) = shelf.resolve(variant="fp8", features=("spec",), modes={"spec": "dspark"}).of_kind("refusal")
    assert (refusal.rule, refusal.fix) == ("mode-not-possible", "choose mtp")
