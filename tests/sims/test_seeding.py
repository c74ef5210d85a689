"""Random streams that do not overlap."""

from itertools import product

import pytest

from sims.numbers.seeding import spawn_seed


def test_purposes_seeds_and_numbers_have_streams_of_their_own() -> None:
    purposes = [("cloning", 0), ("cloning", 1), ("exploration",), ("minibatches",), ("minibatches", 0)]
    seeds = {spawn_seed(seed, *purpose) for seed, purpose in product(range(50), purposes)}
    assert len(seeds) == 50 * len(purposes)
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_a_stream_is_the_same_on_every_machine() -> None:
    assert spawn_seed(0, "exploration") == 3170692185623922991


def test_a_negative_seed_is_refused() -> None:
    with pytest.raises(ValueError, match="non-negative"):
        spawn_seed(-1, "exploration")
