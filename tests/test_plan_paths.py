"""Path patterns against their meaning, by brute force over a small alphabet."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dtplan.plan import paths

NAMES = [name for length in (1, 2, 3) for name in itertools.product("abc", repeat=length)]
"""All names of one to three segments over three words; `c` stands for a word that no pattern spells."""

segments = st.sampled_from(["a", "b", "*"])
patterns = st.lists(segments, min_size=1, max_size=3).map(tuple)
words = st.text("ab", min_size=1, max_size=2)
alternatives = st.lists(words, min_size=1, max_size=3, unique=True)


def named(pattern: paths.Segments) -> set[paths.Segments]:
    return {name for name in NAMES if paths.matches(pattern, name)}


@given(patterns)
def test_a_pattern_names_what_agrees_segment_by_segment(pattern):
    regular = [set("abc") if segment == "*" else {segment} for segment in pattern]
    assert named(pattern) == set(itertools.product(*regular))


@given(patterns, patterns)
def test_patterns_overlap_where_some_name_has_both(a, b):
    assert paths.overlap(a, b) == bool(named(a) & named(b))
    assert paths.overlap(a, b) == paths.overlap(b, a)


@given(st.lists(patterns, max_size=12), patterns)
def test_the_map_finds_what_a_comparison_with_all_finds(kept, asked):
    found = paths.PatternMap[int]()
    for index, pattern in enumerate(kept):
        found.add(pattern, index)
    assert sorted(found.overlapping(asked)) == [i for i, p in enumerate(kept) if paths.overlap(p, asked)]


@given(st.lists(alternatives, min_size=1, max_size=3), st.data())
def test_braces_stand_for_each_of_their_words(choices, data):
    """Within segments, over several segments, with spaces, and with text around them."""
    prefix, suffix = data.draw(words), data.draw(words)
    comma = data.draw(st.sampled_from([",", ", "]))
    spelled = ".".join(f"{prefix}{{{comma.join(each)}}}{suffix}" for each in choices)
    expected = {tuple(f"{prefix}{word}{suffix}" for word in chosen) for chosen in itertools.product(*choices)}
    expanded = paths.expand(spelled)
    assert set(expanded) == expected
    assert len(expanded) == len(expected)


@given(patterns)
def test_a_pattern_without_braces_is_itself(pattern):
    assert paths.expand(".".join(pattern)) == (pattern,)


def test_braces_may_hold_dots_and_stars():
    assert paths.expand("h.{attn.c_attn,mlp.c_fc,*}.weight") == (
        ("h", "attn", "c_attn", "weight"),
        ("h", "mlp", "c_fc", "weight"),
        ("h", "*", "weight"),
    )


@pytest.mark.parametrize(
    ("pattern", "why"),
    [
        ("", "the path is empty"),
        ("a..b", "an empty segment"),
        (".a", "an empty segment"),
        ("a.", "an empty segment"),
        ("a.{b,}.c", "an empty segment"),
        ("a.**", "name every level"),
        ("a.b*", "stands for a whole segment"),
        ("*a*", "stands for a whole segment"),
        ("{a,b}*", "stands for a whole segment"),
        ("a b", "is not a module name"),
        ("a-b", "is not a module name"),
        ("a[0]", "is not a module name"),
        ("a.{b", "unbalanced braces"),
        ("a.b}", "unbalanced braces"),
        ("}a{", "unbalanced braces"),
        ("{a,{b,c}}", "braces inside braces"),
        ("{a,a}", "names the same path twice"),
        ("{a,b}.{c,c}", "names the same path twice"),
        (".".join(["{a,b}"] * 11), "stands for more than 1024 paths"),
        (".".join(["{a,b}"] * 5000), "stands for more than 1024 paths"),
    ],
)
def test_a_pattern_that_is_not_well_formed_says_why(pattern, why):
    with pytest.raises(paths.PatternError, match=why):
        paths.expand(pattern)


def test_as_many_paths_as_are_allowed():
    assert len(paths.expand(".".join(["{a,b}"] * 10))) == paths.MAX_ALTERNATIVES
