"""Retrieval tasks in the manner of RULER (arXiv 2404.06654), made here from a seed: what to find in a long text.

Needles lie in a text of the user's; lists of words are made up. Every prompt ends where the answer begins, so that a
base model can go on. The score of a case is the share of its answers that appear in what is generated.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from nosa_sys.errors import ConfigError
from nosa_sys.models.tokenizer import Tokenizer

Draw = np.random.Generator
_SYLLABLES = [c + v for c in "bdfgklmnprstvz" for v in "aeiou"]


@dataclass(frozen=True)
class Case:
    """One prompt: token ids, what must appear in the continuation, and how many tokens it may take.

    ``depth`` in [0, 1]: where the (first) needle lies, None for tasks that have none."""

    kind: str
    depth: float | None
    prompt: list[int]
    answers: tuple[str, ...]
    max_new_tokens: int

    def score(self, generated: str) -> float:
        """Share of the answers found, upper and lower case alike."""
        text = generated.lower()
        return sum(answer.lower() in text for answer in self.answers) / len(self.answers)


@dataclass(frozen=True)
class _Content:
    """What a needle task consists of: an introduction, sentences to hide, the question with the answer's beginning.

    ``ordered``: the needles stay in order, evenly spread, whatever depth is asked for."""

    intro: str
    needles: list[str]
    question: str
    answers: tuple[str, ...]
    ordered: bool = False


def _word(rng: Draw, n_syllables: int = 3) -> str:
    return "".join(_SYLLABLES[i] for i in rng.integers(0, len(_SYLLABLES), n_syllables))


def _words(rng: Draw, n: int) -> list[str]:
    """n different words."""
    found: dict[str, None] = {}
    while len(found) < n:
        found[_word(rng)] = None
    return list(found)


def _number(rng: Draw, digits: int) -> str:
    return str(rng.integers(10 ** (digits - 1), 10**digits))


def _passkey(rng: Draw) -> _Content:
    key = _number(rng, 5)
    return _Content(
        "There is important information hidden in the following text. Find it and remember it.\n\n",
        [f" The pass key is {key}. Remember it. {key} is the pass key."],
        "\n\nWhat is the pass key? The pass key is",
        (key,),
    )


def _magic(rng: Draw, n_keys: int, n_values: int, n_asked: int) -> _Content:
    """Numbers for keys: the first ``n_asked`` keys are asked for."""
    keys = _words(rng, n_keys)
    values = [[_number(rng, 7) for _ in range(n_values)] for _ in keys]
    needles = [
        f" One of the special magic numbers for {key} is: {value}."
        for key, numbers in zip(keys, values, strict=True)
        for value in numbers
    ]
    asked = keys[0] if n_asked == 1 else f"{', '.join(keys[: n_asked - 1])} and {keys[n_asked - 1]}"
    form = "number" if n_values * n_asked == 1 else "numbers"
    verb = "is" if form == "number" else "are"
    return _Content(
        "Some special magic numbers are hidden within the following text. Memorise them.\n\n",
        needles,
        f"\n\nWhat {verb} the special magic {form} for {asked} in the text above? "
        f"The special magic {form} for {asked} in the text above {verb}",
        tuple(value for numbers in values[:n_asked] for value in numbers),
    )


def _variables(rng: Draw) -> _Content:
    """A chain of four assignments, among which a second chain with another value."""
    names = [word.upper() for word in _words(rng, 10)]
    value, other = _number(rng, 5), _number(rng, 5)
    chains = []
    for chain, first in ((names[:5], value), (names[5:], other)):
        steps = [f" VAR {chain[0]} = {first}."]
        steps += [f" VAR {after} = VAR {before}." for before, after in itertools.pairwise(chain)]
        chains.append(steps)
    return _Content(
        "Memorise and track the chains of variable assignments hidden in the following text.\n\n",
        [step for pair in zip(*chains, strict=True) for step in pair],
        f"\n\nFind all variables that are assigned the value {value} in the text above. "
        f"The variables that are assigned the value {value} are",
        tuple(names[:5]),
        ordered=True,
    )


NEEDLES: dict[str, Callable[[Draw], _Content]] = {
    "passkey": _passkey,
    "needle_single": lambda rng: _magic(rng, 1, 1, 1),
    "needle_multi_key": lambda rng: _magic(rng, 4, 1, 1),
    "needle_multi_value": lambda rng: _magic(rng, 1, 4, 1),
    "needle_multi_query": lambda rng: _magic(rng, 4, 1, 4),
    "variable_tracking": _variables,
}
WORD_LISTS = ("common_words", "frequent_words")
TASKS = (*NEEDLES, *WORD_LISTS)
_NEW_TOKENS = {"passkey": 12, "needle_single": 16, "needle_multi_key": 16}


def make_case(
    kind: str, n_tokens: int, tokenizer: Tokenizer, haystack: str, *, depth: float = 0.5, seed: Sequence[int] | int = 0
) -> Case:
    """One case whose prompt has at most ``n_tokens`` tokens, and few less. ``haystack``: a text long enough to fill it.

    ``depth`` places the first needle; further ones are spread evenly over the text. Raises ConfigError for an unknown
    kind, a depth outside [0, 1], or a text or size that is too short.
    """
    if kind not in TASKS:
        raise ConfigError(f"unknown task {kind!r}; known: {', '.join(TASKS)}")
    if not 0 <= depth <= 1:
        raise ConfigError(f"depth={depth} must lie in [0, 1]")
    rng = np.random.default_rng(seed)
    new_tokens = _NEW_TOKENS.get(kind, 64)
    if kind in NEEDLES:
        content = NEEDLES[kind](rng)
        prompt = _hidden(content, n_tokens, tokenizer, haystack, depth)
        return Case(kind, None if content.ordered else depth, prompt, content.answers, new_tokens)
    prompt, answers = _word_list(kind, rng, n_tokens, tokenizer)
    return Case(kind, None, prompt, answers, new_tokens)


def _hidden(content: _Content, n_tokens: int, tokenizer: Tokenizer, haystack: str, depth: float) -> list[int]:
    """The needles between sentences of the haystack, which is cut to fill the prompt."""
    begin = tokenizer.encode(content.intro)
    needles = [tokenizer.encode(needle, begin=False) for needle in content.needles]
    end = tokenizer.encode(content.question, begin=False)
    room = n_tokens - len(begin) - len(end) - sum(map(len, needles))
    if room < 1:
        raise ConfigError(f"a prompt of {n_tokens} tokens leaves no room for a text; use a longer context")
    sentences, filled = [], 0
    for sentence in _sentences(haystack):
        ids = tokenizer.encode(sentence, begin=False)[: room - filled]
        sentences.append(ids)
        filled += len(ids)
        if filled == room:
            break
    if filled < room:
        raise ConfigError(f"a text of {filled} tokens does not fill {room}; use longer texts or a shorter context")
    starts = np.cumsum([0, *map(len, sentences[:-1])])  # nothing follows the last sentence, which is cut
    places = [depth, *((depth + i / len(needles)) % 1.0 for i in range(1, len(needles)))]
    if content.ordered:
        places = [(i + 0.5) / len(needles) for i in range(len(needles))]
    spots: dict[int, list[int]] = {}
    for place, needle in zip(places, needles, strict=True):
        spot = int(np.abs(starts - place * room).argmin())
        spots.setdefault(spot, []).extend(needle)
    body: list[int] = []
    for index in range(len(sentences) + 1):
        body += spots.get(index, [])
        body += sentences[index] if index < len(sentences) else []
    return begin + body + end


def _sentences(text: str) -> list[str]:
    """Pieces of a text that end in a full stop, each with the space before it."""
    flat = " ".join(text.split())
    pieces = flat.split(". ")
    return [(" " if i else "") + piece + ("." if i < len(pieces) - 1 else "") for i, piece in enumerate(pieces)]


def _word_list(kind: str, rng: Draw, n_tokens: int, tokenizer: Tokenizer) -> tuple[list[int], tuple[str, ...]]:
    """A shuffled list of made-up words as long as fits, and the words that are asked for."""
    common = kind == "common_words"
    n_asked = 10 if common else 3
    if common:
        begin = "Below is a list of words. Memorise the ones that appear most often.\n\n"
        asked = "10 most common words in the above list"
        end = f"\n\nWhat are the {asked}? The {asked} are:"
    else:
        begin = "Read the following coded text and track the frequency of each coded word.\n\n"
        asked = "three most frequently appearing words in the above coded text"
        end = f"\n\nWhat are the {asked}? The {asked} are:"
    pool = _words(rng, n_tokens // 2 + 128)
    head, tail = tokenizer.encode(begin), tokenizer.encode(end, begin=False)
    size, step = 0, max(1, n_tokens // 2)
    best: list[int] = []
    while step:  # the largest number of words that fits
        order = rng.permutation(_drawn(common, size + step, n_asked))
        body = tokenizer.encode(" ".join(pool[i] for i in order), begin=False)
        if len(head) + len(body) + len(tail) <= n_tokens:
            best, size = body, size + step
        else:
            step //= 2
    if size < 4 * n_asked:
        raise ConfigError(f"a prompt of {n_tokens} tokens holds {size} words only; use a longer context")
    return head + best + tail, tuple(pool[:n_asked])


def _drawn(common: bool, n_words: int, n_asked: int) -> NDArray[np.int64]:
    """Word numbers, the asked ones first, each as often as it stands in a list of about ``n_words``: common words 10
    times as often as any other; frequent ones by the power -2 of their rank, none as often as the asked."""
    if common:
        often = max(1, min(3, n_words // 200))
        n_rest = max(1, n_words // often - 10 * n_asked)
        counts = np.array([10 * often] * n_asked + [often] * n_rest)
    else:
        shares = np.arange(1, max(n_asked + 1, n_words // 16) + 1, dtype=np.float64) ** -2
        counts = np.maximum(1, np.floor(shares / shares.sum() * n_words)).astype(np.int64)
        counts[:n_asked] = np.maximum(counts[:n_asked], counts[n_asked] + 1)
    return np.repeat(np.arange(len(counts)), counts)
