import pytest

from pdcluster.recipes.tokens import Origin, flat, keep_last, units_of, value_of

ORIGIN = Origin("test")


def merged(*layers):
    units = [unit for index, layer in enumerate(layers) for unit in units_of(layer.split(), Origin(f"layer {index}"))]
    return keep_last(units)


@pytest.mark.parametrize(
    ("first", "second", "left"),
    [
        ("--x 1 --y 2", "--x 3", "--y 2 --x 3"),
        ("--x 1", "--x", "--x"),
        ("--max_model_len 5", "--max-model-len 6", "--max-model-len 6"),
        ("--max-model-len=5", "--max-model-len 6", "--max-model-len 6"),
        ("--max-model-len 5", "--max_model_len=6", "--max_model_len=6"),
        ("-tp 2", "--tensor-parallel-size 4", "--tensor-parallel-size 4"),
        ("--data-parallel-size 2", "-dp=4", "-dp=4"),
        ("-O3", "--optimization-level 2", "--optimization-level 2"),
        ("-cc.mode 3", "--compilation_config.mode=1", "--compilation_config.mode=1"),
        ("--a -1 --b -1", "", "--a -1 --b -1"),
        ("--a -1", "--a -0.5", "--a -0.5"),
        ("--l a b --k", "--l c", "--k --l c"),
        ("--middleware a", "--middleware b", "--middleware a --middleware b"),
        ("--x", "--no-x", "--x --no-x"),
        ("--c.k 1", "--c {}", "--c.k 1 --c {}"),
        ("word --x 1", "word", "word --x 1 word"),
        ("--x=1 word", "", "--x=1 word"),
    ],
)
def test_of_one_flag_the_last_stays_where_it_stands_whatever_its_spelling(first, second, left):
    assert flat(merged(first, second)) == left.split()


def test_json_is_replaced_whole():
    units = units_of(["--c", '{"a": 1}', "--c", '{"b": 2}'], ORIGIN)
    assert flat(keep_last(units)) == ["--c", '{"b": 2}']


def test_what_was_displaced_is_kept_with_its_origin_oldest_first():
    units = merged("--x 1", "--x 2", "--x 3")
    assert [(unit.value, unit.origin.layer) for unit in units] == [("3", "layer 2")]
    assert [(unit.value, unit.origin.layer) for unit in units[0].displaced] == [("1", "layer 0"), ("2", "layer 1")]


def test_empty_tokens_vanish_and_a_value_is_read_in_every_spelling():
    assert flat(units_of(["", "--a", "", "1"], ORIGIN)) == ["--a", "1"]
    assert value_of(units_of(["--a=1", "--b", "x", "y", "--c"], ORIGIN), "--a").value == "1"
    assert value_of(units_of(["--b", "x", "y"], ORIGIN), "--b").value == "x y"
    assert value_of(units_of(["--c"], ORIGIN), "--c").value == ""
    assert value_of([], "--c") is None
