"""A MuJoCo model drawn in low detail: fewer triangles, smaller textures."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import numpy as np

Detail = Literal["full", "low"]
FEW = 200  # a mesh of fewer triangles stays as it is
PIXEL = 0.32  # [m]: by the image's longer side, about a pixel at 30 cm; 5 mm with 64 px
TEXTURE = 8  # sides of an image make the longest of a texture


@contextmanager
def low_detail(model: Any, image_size: tuple[int, int]) -> Iterator[None]:
    """A renderer made within it draws what a pixel shows or more; afterwards the model is what it was.

    Meshes: see ``cluster``. Textures: averaged down to a few image sides, as mipmaps are.
    """
    kept: list[tuple[np.ndarray, Any, np.ndarray]] = []

    def write(name: str, where: Any, values: Any) -> None:
        array = getattr(model, name)
        kept.append((array, where, array[where].copy()))
        array[where] = values

    try:
        for mesh in np.flatnonzero(model.mesh_facenum >= FEW):
            _coarsen_mesh(model, mesh, PIXEL / max(image_size), write)
        for texture in np.flatnonzero(model.tex_width > TEXTURE * max(image_size)):
            _shrink_texture(model, texture, TEXTURE * max(image_size), write)
        yield
    finally:
        for array, where, values in reversed(kept):
            array[where] = values


def _coarsen_mesh(model: Any, mesh: Any, cell: float, write: Any) -> None:
    """Write the triangles that remain over the first of the mesh's, and their number; one that is too thin stays."""
    start, first = model.mesh_faceadr[mesh], model.mesh_vertadr[mesh]
    faces = slice(start, start + model.mesh_facenum[mesh])
    vertices = model.mesh_vert[first : first + model.mesh_vertnum[mesh]]
    corners, remaining = cluster(vertices, model.mesh_face[faces], cell)
    if not len(remaining) or np.any(np.ptp(vertices, axis=0) - np.ptp(vertices[corners], axis=(0, 1)) > 2 * cell):
        return  # a part of it, or all, is too thin
    begin = slice(start, start + len(remaining))
    for name in ("mesh_facenormal", "mesh_facetexcoord"):
        write(name, begin, getattr(model, name)[start + remaining])
    write("mesh_face", begin, corners)
    write("mesh_facenum", mesh, len(remaining))


def _shrink_texture(model: Any, texture: Any, longest: int, write: Any) -> None:
    """Write it over its own beginning; a cube's six faces stand below each other."""
    start, channels = model.tex_adr[texture], model.tex_nchannel[texture]
    height, width = model.tex_height[texture], model.tex_width[texture]
    faces = 6 if height == 6 * width else 1
    pixels = model.tex_data[start : start + height * width * channels].reshape(faces, height // faces, width, channels)
    across = -(-width // longest)
    down = min(across, height // faces)
    rows, columns = height // faces // down, width // across
    blocks = pixels[:, : rows * down, : columns * across].reshape(faces, rows, down, columns, across, channels)
    sums = blocks.sum(axis=2, dtype=np.uint32).sum(axis=3, dtype=np.uint32)
    small = np.round(sums / (down * across)).astype(np.uint8).reshape(-1)
    write("tex_data", slice(start, start + len(small)), small)
    write("tex_height", texture, faces * rows)
    write("tex_width", texture, columns)


def cluster(vertices: np.ndarray, faces: np.ndarray, cell: float) -> tuple[np.ndarray, np.ndarray]:
    """The corners, int [m, 3], of the triangles that remain and their numbers, increasing, [m].

    Vertex clustering (Rossignac and Borrel, 1993, "Multi-resolution 3D approximations for rendering complex scenes"):
    all vertices in one cell of a cubic grid become that nearest to their mean, so none moves further than a cell's
    diagonal; triangles whose corners meet are dropped, and all but the first of those with the same corners in the same
    sense.

    vertices: [v, 3], m. faces: int [n, 3] into them. cell: its edge, m.
    """
    cells = np.floor((vertices - vertices.min(axis=0)) / cell).astype(np.int64)
    _, group = np.unique(cells @ _places(int(cells.max()) + 1), return_inverse=True)
    size = np.bincount(group)
    mean = np.stack([np.bincount(group, axis) / size for axis in vertices.T], axis=1)
    nearest_first = np.lexsort((np.square(vertices - mean[group]).sum(axis=1), group))
    chosen = nearest_first[np.cumsum(size) - size]  # one vertex of each group
    merged = group[faces]
    a, b, c = merged.T
    whole = np.flatnonzero((a != b) & (b != c) & (a != c))
    least = merged[whole].argmin(axis=1)[:, None]
    turned = np.take_along_axis(merged[whole], (least + np.arange(3)) % 3, axis=1)  # the least corner first
    _, distinct = np.unique(turned @ _places(len(size)), return_index=True)
    remaining = whole[np.sort(distinct)]
    return chosen[merged[remaining]], remaining


def _places(base: int) -> np.ndarray:
    """Three digits below ``base`` times these make one number, int [3]."""
    return np.array([base * base, base, 1], dtype=np.int64)
