"""Retrieval cases: exact sizes, needles where they belong, answers in the prompt, scores, seeds."""

from __future__ import annotations

import re
from collections import Counter

import pytest

from nosa_sys.errors import ConfigError
from nosa_sys.training.tasks import NEEDLES, TASKS, Case, make_case
from tests.training.small import TextTokenizer

HAYSTACK = " ".join(f"Sentence {i} tells of a quiet day by the sea." for i in range(3000))
TOKENIZER = TextTokenizer()


def text_of(case: Case) -> str:
    return TOKENIZER.decode(case.prompt)


@pytest.mark.parametrize("kind", TASKS)
@pytest.mark.parametrize("n_tokens", [4096, 16384])
def test_prompts_fill_the_context_and_hold_their_answers(kind: str, n_tokens: int) -> None:
    case = make_case(kind, n_tokens, TOKENIZER, HAYSTACK, seed=[1, 2])
    assert n_tokens - 60 <= len(case.prompt) <= n_tokens
    text = text_of(case)
    for answer in case.answers:
        assert answer in text
        assert answer not in text.rsplit("\n\n", 1)[1], "the question must not give the answer away"
    assert len(set(case.answers)) == {"needle_multi_value": 4, "needle_multi_query": 4, "variable_tracking": 5,
                                      "common_words": 10, "frequent_words": 3}.get(kind, 1)  # fmt: skip
    assert case.score(text) == 1.0
    assert case.score("nothing") == 0.0


@pytest.mark.parametrize("kind", NEEDLES)
@pytest.mark.parametrize("depth", [0.0, 0.25, 0.5, 1.0])
def test_the_first_needle_lies_at_its_depth_between_sentences(kind: str, depth: float) -> None:
    case = make_case(kind, 8192, TOKENIZER, HAYSTACK, depth=depth, seed=3)
    text = text_of(case)
    if kind == "variable_tracking":
        assert case.depth is None
        spots = [match.start() for match in re.finditer("VAR", text)]
        assert spots[0] < len(text) / 12
        assert spots[-1] > len(text) * 0.8
    else:
        assert case.depth == depth
        spot = text.index(case.answers[0]) / len(text)
        assert abs(spot - depth) < 0.06
    for match in re.finditer(r"(.)( One of the special magic numbers| The pass key is \d| VAR \w+ = VAR)", text):
        assert match[1] in ".\n", match[0]


def test_word_lists_are_as_frequent_as_they_say() -> None:
    for kind, n in (("common_words", 10), ("frequent_words", 3)):
        case = make_case(kind, 8192, TOKENIZER, "", seed=5)
        words = Counter(text_of(case).split("\n\n")[1].split())
        assert {word for word, _ in words.most_common(n)} == set(case.answers)
        ranked = [count for _, count in words.most_common(n + 1)]
        assert ranked[-2] > ranked[-1]


def test_chains_lead_to_the_value() -> None:
    case = make_case("variable_tracking", 4096, TOKENIZER, HAYSTACK, seed=8)
    text = text_of(case)
    value = re.search(r"assigned the value (\d+)", text)
    assert value is not None
    links = dict(re.findall(r"VAR (\w+) = (?:VAR )?(\w+)\.", text))
    for name in case.answers:
        for _ in range(6):
            name = links.get(name, name)
        assert name == value[1]
    assert len(links) == 10


def test_seeds() -> None:
    one, same, other = (make_case("needle_single", 2048, TOKENIZER, HAYSTACK, seed=s) for s in (1, 1, 2))
    assert one == same
    assert one.answers != other.answers


def test_partial_scores() -> None:
    assert Case("x", None, [], ("Alpha", "beta"), 1).score("it is ALPHA.") == 0.5


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"kind": "riddle"}, "unknown task 'riddle'"),
        ({"depth": 1.5}, "depth=1.5"),
        ({"n_tokens": 30}, "leaves no room"),
        ({"haystack": "short."}, "does not fill"),
        ({"kind": "common_words", "n_tokens": 300}, "use a longer context"),
    ],
)
def test_what_cannot_be_made_is_refused(arguments: dict[str, object], message: str) -> None:
    given = {"kind": "passkey", "n_tokens": 2048, "tokenizer": TOKENIZER, "haystack": HAYSTACK, **arguments}
    with pytest.raises(ConfigError, match=message):
        make_case(**given)  # type: ignore[arg-type]
