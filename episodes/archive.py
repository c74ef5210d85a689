"""A zarr v3 group in one ZIP_STORED file: written front to back, read through a memory map.

    [local header | member | local header | member | ... | central directory | zip64 end | end] [sha256 of all before]

Members are stored uncompressed at 64-byte aligned offsets, and every array is one chunk, so an array is a slice of the
mapped file. The zip comment at the end holds the SHA-256 of all bytes before it, headers included, so any missing or
altered byte is found. Sizes and offsets are always zip64, so files over 4 GiB need no special case. (The standard
library's writer seeks back to patch headers, and cannot align members.)
"""

from __future__ import annotations

import hashlib
import json
import struct
import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch

from episodes.schema import CorruptEpisode

_ALIGN = 64
_COMMENT = b"sha256:"
_COMMENT_BYTES = len(_COMMENT) + 64
_DOS_DATE = 0x0021  # 1980-01-01: the same arrays give the same bytes
_MAX32 = 0xFFFFFFFF

# name in the group -> (offset in the file, dtype, shape)
ArrayLocations = dict[str, tuple[int, str, tuple[int, ...]]]


def write_archive(file: BinaryIO, *, arrays: Mapping[str, np.ndarray], attributes: Mapping[str, Any]) -> ArrayLocations:
    """Write a zarr group; nested names ("images/wrist") become nested groups. Returns the location of each array."""
    out = _Writer(file)
    out.member("zarr.json", _group_json(attributes))
    for group in sorted({name.rsplit("/", 1)[0] for name in arrays if "/" in name}):
        out.member(f"{group}/zarr.json", _group_json({}))
    locations: ArrayLocations = {}
    for name, array in arrays.items():
        array = np.ascontiguousarray(array)
        out.member(f"{name}/zarr.json", _array_json(array))
        chunk = "/".join(["c"] + ["0"] * array.ndim)
        offset = out.member(f"{name}/{chunk}", array.reshape(-1).view(np.uint8).data)
        locations[name] = (offset, str(array.dtype), array.shape)
    out.finish()
    return locations


class _Writer:
    def __init__(self, file: BinaryIO):
        self._file, self._offset, self._hash = file, 0, hashlib.sha256()
        self._directory: list[bytes] = []

    def _put(self, data: bytes | memoryview) -> None:
        self._file.write(data)
        self._hash.update(data)
        self._offset += len(data)

    def member(self, name: str, data: bytes | memoryview) -> int:
        """Returns the offset of ``data`` in the file."""
        header_at, path = self._offset, name.encode()
        crc, size = zlib.crc32(data), len(data)
        common = struct.pack("<HHHHHIIIH", 45, 0x800, 0, 0, _DOS_DATE, crc, _MAX32, _MAX32, len(path))
        zip64 = struct.pack("<HHQQ", 1, 16, size, size)
        padding = -(header_at + 30 + len(path) + len(zip64) + 4) % _ALIGN
        extra = zip64 + struct.pack("<HH", 0xD935, padding) + bytes(padding)
        self._put(b"PK\3\4" + common + struct.pack("<H", len(extra)) + path + extra)
        data_at = self._offset
        self._put(data)
        extra = struct.pack("<HHQQQ", 1, 24, size, size, header_at)
        tail = struct.pack("<HHHHII", len(extra), 0, 0, 0, 0o644 << 16, _MAX32)
        self._directory.append(b"PK\1\2" + struct.pack("<H", 3 << 8 | 45) + common + tail + path + extra)
        return data_at

    def finish(self) -> None:
        start, count = self._offset, len(self._directory)
        directory = b"".join(self._directory)
        end = start + len(directory)
        zip64_end = struct.pack("<4sQHHIIQQQQ", b"PK\6\6", 44, 45, 45, 0, 0, count, count, len(directory), start)
        locator = struct.pack("<4sIQI", b"PK\6\7", 0, end, 1)
        plain_end = struct.pack("<4sHHHHIIH", b"PK\5\6", 0, 0, 0xFFFF, 0xFFFF, _MAX32, _MAX32, _COMMENT_BYTES)
        self._put(directory + zip64_end + locator + plain_end)
        self._file.write(_COMMENT + self._hash.hexdigest().encode())


def _group_json(attributes: Mapping[str, Any]) -> bytes:
    return json.dumps({"zarr_format": 3, "node_type": "group", "attributes": dict(attributes)}).encode()


def _array_json(array: np.ndarray) -> bytes:
    codec = {"name": "bytes", **({"configuration": {"endian": "little"}} if array.itemsize > 1 else {})}
    node = {
        "zarr_format": 3,
        "node_type": "array",
        "shape": array.shape,
        "data_type": str(array.dtype),
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": array.shape}},
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
        "fill_value": False if array.dtype == np.bool_ else 0,
        "codecs": [codec],
        "attributes": {},
    }
    return json.dumps(node).encode()


def read_directory(path: Path) -> tuple[ArrayLocations, dict[str, Any]]:
    """Locations of the arrays and attributes of the group. Where the file is damaged, raises almost any error."""
    with zipfile.ZipFile(path) as archive:
        attributes = json.loads(archive.read("zarr.json"))["attributes"]
        locations: ArrayLocations = {}
        for info in archive.infolist():
            name, _, _ = info.filename.rpartition("/c/")
            if name and not info.filename.endswith("/zarr.json"):  # that of a camera named "c"
                node = json.loads(archive.read(f"{name}/zarr.json"))
                offset = _data_offset(archive, info)
                locations[name] = (offset, node["data_type"], tuple(node["shape"]))
    return locations, attributes


def _data_offset(archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> int:
    file = archive.fp
    assert file is not None
    file.seek(info.header_offset + 26)
    name_bytes, extra_bytes = struct.unpack("<HH", file.read(4))
    return info.header_offset + 30 + name_bytes + extra_bytes


def corrupt(path: Path, problem: str) -> CorruptEpisode:
    store = path.parent
    mend = f"vla-rl data verify {store}; with a good copy of the store: vla-rl data merge {store} --source COPY"
    return CorruptEpisode(f"{path}: corrupt episode file ({problem}). Run: {mend}")


def verify_archive(path: Path) -> None:
    """Raises CorruptEpisode unless the content matches its SHA-256."""
    try:
        digest, size = hashlib.sha256(), path.stat().st_size
    except FileNotFoundError as error:
        raise corrupt(path, "the file is missing") from error
    with path.open("rb") as file:
        remaining = size - _COMMENT_BYTES
        while remaining > 0 and (block := file.read(min(remaining, 1 << 20))):
            digest.update(block)
            remaining -= len(block)
        if file.read() != _COMMENT + digest.hexdigest().encode():
            raise corrupt(path, "its content does not match its SHA-256")


def map_arrays(path: Path, locations: ArrayLocations, *, size: int) -> dict[str, np.ndarray]:
    """The arrays of an archive of ``size`` bytes as views of one private memory map; pages are read on access.

    torch closes the file descriptor after mapping. ``mmap.mmap`` keeps one open per file, so large stores would exceed
    the limit of open files. Raises CorruptEpisode if the file is missing or of another size.
    """
    try:
        found = path.stat().st_size
    except FileNotFoundError as error:
        raise corrupt(path, "the file is missing") from error
    if found != size:
        raise corrupt(path, f"it has {found} bytes, {size} were written")
    mapped = torch.from_file(str(path), shared=False, size=size, dtype=torch.uint8).numpy()
    return {name: view_array(mapped, *entry) for name, entry in locations.items()}


def view_array(mapped: np.ndarray, offset: int, dtype: str, shape: tuple[int, ...]) -> np.ndarray:
    count = int(np.prod(shape)) * np.dtype(dtype).itemsize
    return mapped[offset : offset + count].view(dtype).reshape(shape)
