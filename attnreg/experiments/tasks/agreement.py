"""The embedded task: English acceptability judgements made by a grammar.

An acceptable sentence agrees everywhere: determiner and noun, subject and verb across whatever stands between them, a
reflexive and its antecedent. An unacceptable one disagrees in exactly one place. Columns as in CoLA: ``sentence``,
``label`` (0 unacceptable, 1 acceptable), ``idx``.
"""

from __future__ import annotations

import functools
import random
from dataclasses import dataclass

SIZES = {"train": 2000, "validation": 1000, "test": 1000}

# Few words, so that a model that starts from nothing can learn what agrees with what from 2000 sentences.
# singular, plural, reflexive pronoun of the singular
NOUNS = (
    ("boy", "boys", "himself"),
    ("man", "men", "himself"),
    ("girl", "girls", "herself"),
    ("woman", "women", "herself"),
    ("robot", "robots", "itself"),
    ("dog", "dogs", "itself"),
    ("goose", "geese", "itself"),
)
DETERMINERS = (("this", "a"), ("these", "many"))
COPULAS = (("is", "was"), ("are", "were"))
ADJECTIVES = ("happy", "old", "quiet", "tired")
INTRANSITIVES = (("sleeps", "sleep"), ("laughs", "laugh"), ("waits", "wait"))
TRANSITIVES = (("sees", "see"), ("likes", "like"), ("follows", "follow"))
PREPOSITIONS = ("near", "behind", "beside")
ADVERBS = ("today", "again", "often")
REFLEXIVES = ("himself", "herself", "itself", "themselves")


@dataclass(frozen=True)
class _Word:
    text: str
    wrong: tuple[str, ...] = ()  # what would break agreement in its place


def rows(split: str) -> list[dict[str, str | int]]:
    """The rows of a split: always the same, and no sentence in two splits.

    Args:
        split: ``"train"``, ``"validation"`` or ``"test"``.

    Example:
        >>> rows("train")[0].keys()
        dict_keys(['sentence', 'label', 'idx'])
    """
    return [dict(row) for row in _splits()[split]]


@functools.cache
def _splits() -> dict[str, list[dict[str, str | int]]]:
    rng = random.Random("attnreg agreement")
    seen: set[str] = set()
    splits: dict[str, list[dict[str, str | int]]] = {}
    for name, size in SIZES.items():
        out = splits.setdefault(name, [])
        while len(out) < size:
            sentence, label = _sentence(rng)
            if sentence not in seen:
                seen.add(sentence)
                out.append({"sentence": sentence, "label": label, "idx": len(out)})
    return splits


def corpus(split: str) -> list[dict[str, str | int]]:
    """The acceptable sentences of a split.

    Args:
        split: ``"train"``, ``"validation"`` or ``"test"``.

    Example:
        >>> {row["label"] for row in corpus("test")}
        {1}
    """
    return [row for row in rows(split) if row["label"] == 1]


def vocabulary() -> list[str]:
    """Every word of the grammar, sorted.

    Example:
        >>> len(vocabulary())
        50
    """
    words = {*ADJECTIVES, *PREPOSITIONS, *ADVERBS, *REFLEXIVES, "the", "that"}
    for table in (NOUNS, DETERMINERS, COPULAS, INTRANSITIVES, TRANSITIVES):
        words.update(word for entry in table for word in entry)
    return sorted(words)


def _sentence(rng: random.Random) -> tuple[str, int]:
    words = _clause(rng)
    label = rng.randrange(2)
    if not label:
        place = rng.choice([i for i, word in enumerate(words) if word.wrong])
        words[place] = _Word(rng.choice(words[place].wrong))
    return " ".join(word.text for word in words), label


def _clause(rng: random.Random) -> list[_Word]:
    plural = rng.randrange(2)
    noun = rng.choice(NOUNS)
    subject = _noun_phrase(rng, noun, plural)
    modifier = rng.choice((_nothing, _prepositional, _prepositional, _subject_relative, _object_relative))
    kind = rng.randrange(4)
    if kind == 0:
        predicate = [_agreeing(rng, COPULAS, plural), _Word(rng.choice(ADJECTIVES))]
    elif kind == 1:
        predicate = [_verb(rng, INTRANSITIVES, plural), _Word(rng.choice(ADVERBS))]
    elif kind == 2:
        predicate = [_verb(rng, TRANSITIVES, plural), *_some_noun_phrase(rng)]
    else:
        own = "themselves" if plural else noun[2]
        reflexive = _Word(own, tuple(word for word in REFLEXIVES if word != own))
        predicate = [_verb(rng, TRANSITIVES, plural), reflexive]
    return subject + modifier(rng, plural) + predicate


def _nothing(rng: random.Random, plural: int) -> list[_Word]:
    return []


def _prepositional(rng: random.Random, plural: int) -> list[_Word]:
    return [_Word(rng.choice(PREPOSITIONS)), *_some_noun_phrase(rng)]


def _subject_relative(rng: random.Random, plural: int) -> list[_Word]:
    return [_Word("that"), _verb(rng, TRANSITIVES, plural), *_some_noun_phrase(rng)]


def _object_relative(rng: random.Random, plural: int) -> list[_Word]:
    inner = rng.randrange(2)
    return [_Word("that"), *_noun_phrase(rng, rng.choice(NOUNS), inner), _verb(rng, TRANSITIVES, inner)]


def _some_noun_phrase(rng: random.Random) -> list[_Word]:
    return _noun_phrase(rng, rng.choice(NOUNS), rng.randrange(2))


def _noun_phrase(rng: random.Random, noun: tuple[str, str, str], plural: int) -> list[_Word]:
    determiner = _Word("the") if rng.randrange(2) else _agreeing(rng, DETERMINERS, plural)
    return [determiner, _Word(noun[plural])]


def _agreeing(rng: random.Random, table: tuple[tuple[str, ...], tuple[str, ...]], plural: int) -> _Word:
    choice = rng.randrange(len(table[0]))
    return _Word(table[plural][choice], (table[1 - plural][choice],))


def _verb(rng: random.Random, table: tuple[tuple[str, str], ...], plural: int) -> _Word:
    entry = rng.choice(table)
    return _Word(entry[plural], (entry[1 - plural],))
