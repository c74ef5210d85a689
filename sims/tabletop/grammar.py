"""Instructions from a small grammar: ``[a|b]`` is a choice, ``{0}`` the color of the first named object."""

from __future__ import annotations

import itertools
import re


def expand(*templates: str) -> tuple[str, ...]:
    """Every sentence of these templates, in order and each once: "[lift|raise] the {0} block" gives two."""
    sentences: dict[str, None] = {}
    for template in templates:
        # Odd places of the split are the insides of brackets.
        parts = re.split(r"\[([^\]]*)\]", template)
        choices = [part.split("|") if i % 2 else [part] for i, part in enumerate(parts)]
        sentences |= dict.fromkeys(" ".join("".join(choice).split()) for choice in itertools.product(*choices))
    return tuple(sentences)
