"""Meshes of a MuJoCo model, drawn with fewer triangles."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

FIELDS = ("mesh_facenum", "mesh_face", "mesh_facenormal", "mesh_facetexcoord")
FEW = 200  # a mesh of fewer triangles stays as it is


@contextmanager
def coarse_meshes(model: Any, cell: float) -> Iterator[None]:
    """A renderer that is made within draws meshes without details smaller than ``cell`` [m]; the model stays as it is.

    Vertex clustering (Rossignac and Borrel, 1993, "Multi-resolution 3D approximations for rendering complex scenes"):
    all vertices in one cell of a cubic grid become that nearest to their mean, so none moves further than a cell's
    diagonal; triangles whose corners meet are dropped. Corners keep their normals and texture coordinates. 0: all.
    """
    kept = {name: getattr(model, name).copy() for name in FIELDS}
    try:
        if cell > 0:
            for mesh in np.flatnonzero(kept["mesh_facenum"] >= FEW):
                _simplify(model, int(mesh), cell)
        yield
    finally:
        for name, values in kept.items():
            getattr(model, name)[:] = values


def _simplify(model: Any, mesh: int, cell: float) -> None:
    """Write the triangles that remain over the first of the mesh's, and their number."""
    start, count = model.mesh_faceadr[mesh], model.mesh_facenum[mesh]
    first = model.mesh_vertadr[mesh]
    vertices = model.mesh_vert[first : first + model.mesh_vertnum[mesh]]
    corners, remaining = cluster(vertices, model.mesh_face[start : start + count], cell)
    end = start + len(remaining)
    for name in FIELDS[2:]:
        values = getattr(model, name)
        values[start:end] = values[start + remaining]
    model.mesh_face[start:end] = corners
    model.mesh_facenum[mesh] = len(remaining)


def cluster(vertices: np.ndarray, faces: np.ndarray, cell: float) -> tuple[np.ndarray, np.ndarray]:
    """The corners, int [m, 3], of the triangles that remain and their numbers, increasing, [m].

    vertices: [v, 3], m. faces: int [n, 3] into them. Of triangles with the same corners the first remains.
    """
    cells = np.floor((vertices - vertices.min(axis=0)) / cell).astype(np.int64)
    _, group = np.unique(cells, axis=0, return_inverse=True)
    group = group.reshape(-1)
    size = np.bincount(group)
    mean = np.stack([np.bincount(group, axis) / size for axis in vertices.T], axis=1)
    nearest_first = np.lexsort((np.square(vertices - mean[group]).sum(axis=1), group))
    chosen = nearest_first[np.cumsum(size) - size]  # one vertex of each group
    merged = group[faces]
    a, b, c = merged.T
    whole = np.flatnonzero((a != b) & (b != c) & (a != c))
    _, distinct = np.unique(np.sort(merged[whole], axis=1), axis=0, return_index=True)
    remaining = whole[np.sort(distinct)]
    return chosen[merged[remaining]], remaining
