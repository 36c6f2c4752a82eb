"""Generated tasks with verifiable answers: arithmetic and strings. Pure; the caller seeds.

A task is a prompt and a check: a Python function body that scores an answer. The check runs in a
sandbox (sandbox.py), since real answers are programs.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

LETTERS = "abcdefgh"
ALPHABET = "\n0123456789" + LETTERS + "+=>:SCRM"  # token ids; 0 ends an answer
PROMPT_LENGTH = 8


@dataclass(frozen=True, slots=True)
class Task:
    """One question.

    Attributes:
        prompt: exactly PROMPT_LENGTH characters of ALPHABET.
        check: source of an expression over ``answer`` (a str) with a value in [0, 1].
        length: characters of a full answer.
    """

    prompt: str
    check: str
    length: int


def _close(expected: str) -> str:
    """Score by position: the share of characters that are right, and of the right kind."""
    return (
        f"(lambda want: sum(0.8 * (a == w) + 0.2 * (a.isdigit() == w.isdigit() and a.isalnum()) "
        f"for a, w in zip(answer, want)) / len(want))({expected})"
    )


def add(rng: random.Random) -> Task:
    """Two digits to add; the answer has two digits."""
    a, b = rng.randint(0, 4), rng.randint(0, 4)
    return Task(f"S:{a}+{b}=>>", _close(f"f'{{{a} + {b}:02d}}'"), 2)


def copy(rng: random.Random) -> Task:
    """Two letters to repeat twice."""
    word = "".join(rng.choices(LETTERS[:4], k=2))
    return Task(f"C:{word}=>>>", _close(f"{word!r} * 2"), 4)


def rise(rng: random.Random) -> Task:
    """Three letters to sort."""
    word = "".join(rng.choices(LETTERS[:3], k=3))
    return Task(f"R:{word}=>>", _close(f"''.join(sorted({word!r}))"), 3)


KINDS = (add, copy, rise)


def encode(text: str) -> list[int]:
    """Return token ids."""
    return [ALPHABET.index(ch) for ch in text]


def decode(tokens: list[int]) -> str:
    """Return the text before the end token."""
    text = "".join(ALPHABET[t] for t in tokens)
    return text.split("\n", 1)[0]
