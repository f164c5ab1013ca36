"""Folders that are made once, however many processes run the tests."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

from filelock import FileLock


class SharedFolders:
    """Makes folders under a root that all workers of a test run have in common."""

    def __init__(self, own: Path):
        """`own` is the temporary folder of this worker; under pytest-xdist its parent is that of all."""
        self._root = (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "shared"
        self._own = own / "copies"
        self._root.mkdir(exist_ok=True)

    def once(self, name: str, fill: Callable[[Path], object]) -> Path:
        """Returns a folder that whoever comes first fills. Nobody may change it afterwards."""
        folder, done = self._root / name, self._root / f"{name}.done"
        with FileLock(self._root / f"{name}.lock"):
            if not done.exists():
                shutil.rmtree(folder, ignore_errors=True)
                folder.mkdir()
                fill(folder)
                done.touch()
        return folder

    def copied(self, name: str, fill: Callable[[Path], object]) -> Path:
        """Returns a copy of such a folder, of this worker's own."""
        copy = self._own / name
        return copy if copy.exists() else shutil.copytree(self.once(name, fill), copy)
