"""Bookkeeping of the shared image buffers of a pool of worker processes."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import numpy as np
from jaxtyping import UInt8

from sims.subproc.shared_memory import SLOTS

COPY_BELOW_BYTES = 1 << 16  # smaller observations are copied, which costs less than tracking their use


class ImageSlots:
    """Which slot holds the latest images of each environment, and which slots the caller still uses.

    Images are not copied on their way to the caller: images of all environments are lent, and while the caller keeps
    them, workers write to another slot. Slot 0 is never lent; it is written, and copied, while all others are in use.
    """

    def __init__(self, images: UInt8[np.ndarray, "slots N cameras height width 3"]) -> None:
        num_envs = images.shape[1]
        self.current = np.zeros(num_envs, dtype=bool)  # the images in the slot show the environment's present state
        self.common: int | None = None  # the slot with the current images of all environments, if there is one
        self._images = images
        self._slot = np.zeros(num_envs, dtype=np.int64)
        self._lent: set[int] = set()

    def invalidate(self, env_ids: Sequence[int]) -> None:
        """The state of these environments has changed."""
        self.current[env_ids], self.common = False, None

    def written(self, env_ids: Sequence[int], slot: int) -> None:
        """The current images of these environments are in ``slot``."""
        if len(env_ids) == len(self.current):
            self.current[:], self._slot[:], self.common = True, slot, slot
            return
        self.current[env_ids], self._slot[env_ids] = True, slot
        self.common = slot if self.current.all() and (self._slot == slot).all() else None

    def free(self) -> int:
        """The slot to write next: the one of the last images, unless the caller uses it."""
        last = int(self._slot[0])
        if last and last not in self._lent:
            return last
        return next((slot for slot in range(1, SLOTS) if slot not in self._lent), 0)

    def lend_or_copy(self, slot: int) -> UInt8[np.ndarray, "N cameras height width 3"]:
        """The images of all environments: the shared memory itself where the caller has not got it already."""
        images: np.ndarray = self._images[slot]
        if slot == 0 or slot in self._lent or images.nbytes < COPY_BELOW_BYTES:
            return images.copy()
        self._lent.add(slot)
        weakref.finalize(images, self._lent.discard, slot)
        return images

    def copy_of(self, env_ids: Sequence[int]) -> UInt8[np.ndarray, "n cameras height width 3"]:
        """The latest images of these environments."""
        copied: np.ndarray = self._images[self._slot[env_ids], env_ids]
        return copied
