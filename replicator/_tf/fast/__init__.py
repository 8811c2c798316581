# SPDX-License-Identifier: Apache-2.0
"""What only makes the library faster; plain/ has the same names.

Each file looks up, when it is imported, what it needs of what is private to TensorFlow
and the rest of the library does not: where a name is gone, choice.py sees it in time.
"""
