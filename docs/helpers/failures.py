"""What an error of a running step says, without the places in the graph around it."""

from __future__ import annotations

import re

import tensorflow as tf


def said(error: tf.errors.OpError) -> str:
    """Returns the text of the assertion that failed, as its parts stand in the message.

    Args:
        error: What a step raised while it ran.
    """
    found = re.search(r"assertion failed: (.*)", error.message)
    if found is None:
        return error.message.splitlines()[-1]
    return "\n".join(re.findall(r"\[(.*?)\](?= |$)", found[1].strip()))
