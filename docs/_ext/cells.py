# SPDX-License-Identifier: Apache-2.0
"""Where the code cells of pages run: a kernel of their own, apart from the user's.

It needs no network, uses logical CPU devices only, and knows nothing of the user's
settings of IPython and Jupyter. Its lines have short names, so that an error says
`cell_3.py:4`, the third cell of the page, and the same on every machine.
"""

from __future__ import annotations

import hashlib
import os
import pathlib
import shutil

_STARTUP = '''\
"""Run in each kernel before the first cell of a page."""
import os
import warnings

# What TensorFlow writes while it is imported is about this machine.
_stderr, _nothing = os.dup(2), os.open(os.devnull, os.O_WRONLY)
os.dup2(_nothing, 2)
import tensorflow as _tensorflow
os.dup2(_stderr, 2)

ip = get_ipython()
ip.compile.get_code_name = lambda raw, code, number: f"cell_{number}.py"
warnings.formatwarning = lambda said, kind, *_: f"{kind.__name__}: {said}\\n"
'''


def cache(root: pathlib.Path) -> str:
    """Returns the folder that keeps what cells print, for this state of the library.

    Those of other states are removed.
    """
    digest = hashlib.sha256()
    for path in sorted((root / "replicator").rglob("*.py")):
        digest.update(path.read_bytes())
    folder = root / "docs" / "_build" / "cells" / digest.hexdigest()[:16]
    if folder.parent.exists():
        for other in folder.parent.iterdir():
            if other != folder:
                shutil.rmtree(other)
    return os.fspath(folder)


def prepare(folder: pathlib.Path, root: pathlib.Path) -> None:
    """Sets the environment that kernels inherit.

    Args:
        folder: Where settings of IPython and Jupyter are written, and nowhere else.
        root: The folder of this repository, imported in place of what is installed.
    """
    startup = folder / "ipython" / "profile_default" / "startup"
    startup.mkdir(parents=True, exist_ok=True)
    (startup / "cells.py").write_text(_STARTUP)
    paths = [os.fspath(root), *filter(None, [os.environ.get("PYTHONPATH")])]
    os.environ.update(
        IPYTHONDIR=os.fspath(folder / "ipython"),
        JUPYTER_CONFIG_DIR=os.fspath(folder / "jupyter"),
        JUPYTER_DATA_DIR=os.fspath(folder / "jupyter"),
        MPLCONFIGDIR=os.fspath(folder / "matplotlib"),
        PYTHONPATH=os.pathsep.join(paths),
        PYTHONHASHSEED="0",
        CUDA_VISIBLE_DEVICES="-1",
        TF_CPP_MIN_LOG_LEVEL="3",
        COLUMNS="88",
    )
