# SPDX-License-Identifier: Apache-2.0
"""Runs the code cells of pages in a kernel of their own, apart from the user's.

The kernel needs no network, uses logical CPU devices only, and ignores the user's
IPython and Jupyter settings. Its cells have short file names, so that an error says
`cell_3.py:4`, the third cell of the page, and is the same on every machine.

Pages are Markdown as GitHub shows it: a fence of "python" is a cell, one of "py" is not
run, a comment that begins with "cell" is a cell of which only the output is shown, and
one that begins with "site" is Markdown for the site alone, such as a directive.
"""

from __future__ import annotations

import hashlib
import os
import pathlib
import re
import shutil
from typing import Any

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

_SITE = re.compile(r"^<!-- site\n(.*?)^-->$", re.MULTILINE | re.DOTALL)
_HIDDEN = re.compile(r"^<!-- cell\n(.*?)^-->$", re.MULTILINE | re.DOTALL)
_KERNEL = {"name": "python3", "display_name": "Python 3"}


def read(text: str) -> Any:
    """Returns a page as a notebook, as myst_nb wants it.

    Args:
        text: Markdown.
    """
    from myst_nb.core import read as reading  # so that tests of the rest need no Sphinx

    text = _SITE.sub(r"\1", text)
    text = _HIDDEN.sub(r"```python\n:tags: [remove-input]\n\n\1```", text)
    notebook = reading.read_myst_markdown_notebook(
        text, code_directive="python", add_source_map=True
    )
    notebook.metadata["kernelspec"] = dict(_KERNEL)
    notebook.metadata["language_info"] = {
        "name": "python",
        "pygments_lexer": "ipython3",
    }
    if all(cell.cell_type != "code" for cell in notebook.cells):
        notebook.metadata["mystnb"] = {"execution_mode": "off"}
    return notebook


def cache(root: pathlib.Path) -> str:
    """Returns the cache folder of cell outputs for this state of what the cells run.

    Folders of other states are removed.
    """
    digest = hashlib.sha256()
    for folder_name in ("replicator", "examples", "docs/helpers"):
        for path in sorted((root / folder_name).rglob("*.py")):
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
        folder: The only place where IPython and Jupyter settings are written.
        root: The folder of this repository, imported in place of an installed package.
    """
    startup = folder / "ipython" / "profile_default" / "startup"
    startup.mkdir(parents=True, exist_ok=True)
    (startup / "cells.py").write_text(_STARTUP)
    # The kernel warns that it does not encrypt what it sends within this machine.
    quiet = "get_config().IPKernelApp.log_level = 40\n"
    (startup.parent / "ipython_kernel_config.py").write_text(quiet)
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
