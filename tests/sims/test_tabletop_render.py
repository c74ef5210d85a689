"""What a camera does not see is not drawn, and no pixel changes."""

from __future__ import annotations

import numpy as np
import pytest

from sims.tabletop.layout import ARM, sample_layout
from sims.tabletop.render import Detail, Renderer, choose_gl
from sims.tabletop.task import SPLITS


@pytest.mark.parametrize(("detail", "size"), [("full", (64, 64)), ("low", (48, 96))])
def test_what_is_beside_the_view_is_not_drawn_and_no_pixel_changes(detail: Detail, size: tuple[int, int]) -> None:
    renderer = Renderer(gl=choose_gl("auto"), cameras=("agent", "wrist"), image_size=size, detail=detail)
    rng, drawn = np.random.default_rng(0), []
    for number, name in enumerate(("pick", "open_drawer", "push", "insert_peg") * 3):
        layout = sample_layout(name, number, split=SPLITS[number % len(SPLITS)], appearance=1.0)
        layout.qpos[ARM] += rng.uniform(-0.3, 0.3, 7)
        images = np.zeros((2, 2, *size, 3), np.uint8)
        for culls, image in zip((True, False), images, strict=True):
            renderer._culls = culls
            renderer._model.geom_group[:] = renderer._group
            renderer.draw(layout.qpos, layout.fixtures, layout.appearance, image)
            drawn.append(renderer._scene.ngeom)  # of the wrist, the last
        assert np.array_equal(images[0], images[1])
        assert images.std() > 10
    renderer.close()
    assert sum(drawn[::2]) < 0.8 * sum(drawn[1::2])
