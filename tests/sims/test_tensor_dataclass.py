"""TensorDataclass: fields of different widths, choosing by mask, records without tensors; and instruction encoding."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from sims.tensor_dataclass import TensorDataclass
from sims.vector_env import Observation, decode_instructions, encode_instructions, update_instructions


@dataclass(frozen=True, kw_only=True)
class Text(TensorDataclass):
    ragged: ClassVar[tuple[str, ...]] = ("letters",)

    letters: Tensor
    count: Tensor


@dataclass(frozen=True, kw_only=True)
class Record(TensorDataclass):
    value: Tensor
    text: Text
    extra: Tensor | None = None


@dataclass(frozen=True, kw_only=True)
class Nothing(TensorDataclass):
    pass


def record(values: list[float], width: int, *, extra: bool = False) -> Record:
    n = len(values)
    return Record(
        value=torch.tensor(values),
        text=Text(letters=torch.full((n, width), width), count=torch.arange(n)),
        extra=torch.ones(n, 2) if extra else None,
    )


def test_a_record_is_made_of_saved_tensors() -> None:
    saved = record([1.0, 2.0], 3)
    loaded = record([0.0], 1).with_tensors(list(saved.tensors()))
    assert loaded.extra is None
    torch.testing.assert_close(list(loaded.tensors()), list(saved.tensors()))


def test_stack_and_cat_pad_ragged_fields_with_zeros() -> None:
    records = [record([1.0, 2.0], 2), record([3.0, 4.0], 3)]
    stacked, joined = Record.stack(records), Record.cat(records)
    assert stacked.text.letters.tolist() == [[[2, 2, 0], [2, 2, 0]], [[3, 3, 3], [3, 3, 3]]]
    assert joined.text.letters.tolist() == [[2, 2, 0], [2, 2, 0], [3, 3, 3], [3, 3, 3]]
    assert joined.value.tolist() == [1.0, 2.0, 3.0, 4.0]
    assert joined.extra is None


def test_other_fields_must_have_the_same_shape() -> None:
    with pytest.raises(RuntimeError):
        Observation.cat([observation("a", state_dim=2), observation("b", state_dim=3)])


def test_where_chooses_by_leading_index() -> None:
    chosen = record([1.0, 2.0], 3, extra=True).where(torch.tensor([True, False]), record([8.0, 9.0], 2, extra=True))
    assert chosen.value.tolist() == [1.0, 9.0]
    assert chosen.text.letters.tolist() == [[3, 3, 3], [2, 2, 0]]
    assert chosen.extra is not None
    assert chosen.extra.shape == (2, 2)


def test_where_with_two_leading_dimensions() -> None:
    mask = torch.tensor([[True, False], [False, True]])
    first, second = (Text(letters=torch.full((2, 2, 3), i), count=torch.full((2, 2), i)) for i in (1, 2))
    chosen = first.where(mask, second)
    assert chosen.count.tolist() == [[1, 2], [2, 1]]
    assert chosen.letters[..., 0].tolist() == [[1, 2], [2, 1]]


def test_records_without_tensors() -> None:
    nothing = Nothing()
    assert nothing.where(torch.tensor([True]), Nothing()) == nothing
    assert Nothing.stack([nothing, nothing]) == nothing
    assert nothing[torch.tensor([0])].to("cpu").detach() == nothing


def test_a_field_that_is_none_in_one_record_only_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"Record\.extra is None in some of the records only"):
        record([1.0], 2).where(torch.tensor([True]), record([1.0], 2, extra=True))


@given(st.lists(st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"])), max_size=4))
def test_instructions_of_any_length_come_back(instructions: list[str]) -> None:
    encoded = encode_instructions(instructions)
    assert encoded.shape[1] % 32 == 0
    assert encoded.shape[1] >= 96
    assert decode_instructions(encoded) == instructions


@pytest.mark.parametrize(("length", "width"), [(0, 96), (96, 96), (97, 128), (128, 128), (300, 320)])
def test_instruction_width(length: int, width: int) -> None:
    assert encode_instructions(["x" * length, "short"]).shape == (2, width)


def test_observations_with_different_instruction_widths_can_be_combined() -> None:
    both = Observation.cat([observation("short"), observation("x" * 200)])
    assert both.instruction.shape == (2, 224)
    assert decode_instructions(both.instruction) == ["short", "x" * 200]


def test_an_instruction_buffer_grows_and_keeps_its_width() -> None:
    buffer = encode_instructions(["a", "b", "c"])
    longer = update_instructions(buffer, [1], encode_instructions(["y" * 100]))
    assert decode_instructions(longer) == ["a", "y" * 100, "c"]
    again = update_instructions(longer, [1, 2], encode_instructions(["d", "e"]))
    assert again.shape == longer.shape
    assert decode_instructions(again) == ["a", "d", "e"]
    assert decode_instructions(buffer) == ["a", "b", "c"]


def observation(instruction: str, *, state_dim: int = 2) -> Observation:
    return Observation(
        images=torch.zeros(1, 0, 4, 4, 3, dtype=torch.uint8),
        state=torch.zeros(1, state_dim),
        instruction=encode_instructions([instruction]),
    )
