"""Executes every notebook from its first cell to its last, in a temporary folder; an error fails the build.

python -m notebooks.execute            as CI does
python -m notebooks.execute --write    also keep the outputs in the files
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

import nbformat
from nbclient import NotebookClient

FOLDER = Path(__file__).parent


def main() -> None:
    for path in sorted(FOLDER.glob("*.ipynb")):
        notebook = nbformat.read(path, as_version=4)
        started = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            NotebookClient(notebook, timeout=600, resources={"metadata": {"path": folder}}).execute()
        print(f"{path.name}: {len(notebook.cells)} cells in {time.monotonic() - started:.0f} s")
        if "--write" in sys.argv[1:]:
            nbformat.write(without_progress(notebook), path)


def without_progress(notebook: nbformat.NotebookNode) -> nbformat.NotebookNode:
    """Kept outputs are results alone; times and progress bars would change with every execution."""
    for cell in notebook.cells:
        cell.metadata = {}
        if cell.cell_type == "code":
            cell.outputs = [one for one in cell.outputs if one.get("name") != "stderr"]
    return notebook


if __name__ == "__main__":
    main()
