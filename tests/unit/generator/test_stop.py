import pytest

from exllamav3.errors import FormatError
from exllamav3.generator.stop import StopFilter, StopMatch, split_stop_conditions


def run(strings, pieces):
    """Text let out, and the stop string found."""
    stop_filter, out = StopFilter(strings), ""
    for piece in pieces:
        passed = stop_filter.push(piece)
        if isinstance(passed, StopMatch):
            return out + passed.text, passed.string
        out += passed
    return out + stop_filter.flush(), None


@pytest.mark.parametrize("size", [1, 2, 3, 100])
def test_text_ends_before_a_stop_string_however_it_is_cut(size):
    text = "one two STOP three"
    pieces = [text[i : i + size] for i in range(0, len(text), size)]
    assert run(["STOP"], pieces) == ("one two ", "STOP")


def test_the_beginning_of_a_stop_string_is_held_back_and_released():
    stop_filter = StopFilter(["abcd", "cX"])
    assert stop_filter.push("xxab") == "xx"
    assert stop_filter.push("c") == ""
    assert stop_filter.push("e") == "abce"
    assert stop_filter.flush() == ""


def test_the_earliest_stop_string_counts_and_the_longer_of_two_at_one_place():
    assert run(["cd", "b"], ["abcd"]) == ("a", "b")
    assert run(["\n", "\n\n"], ["a\n\n"]) == ("a", "\n\n")


def test_without_stop_strings_everything_passes():
    assert run([], ["a", "b"]) == ("ab", None)


def test_a_text_that_ends_with_half_a_stop_string_keeps_it():
    assert run(["END"], ["the EN"]) == ("the EN", None)


@pytest.mark.parametrize("bad", ["", None, 1.5, True])
def test_conditions_of_other_types_are_refused(bad):
    with pytest.raises(FormatError, match=r"stop_conditions\[1\]"):
        split_stop_conditions(["ok", bad])


def test_strings_and_ids_are_told_apart():
    assert split_stop_conditions(["a", 5, "b"]) == (("a", "b"), {5})


def test_a_lone_string_is_refused_because_its_letters_would_be_the_conditions():
    with pytest.raises(FormatError, match=r"write \['END'\]"):
        split_stop_conditions("END")
