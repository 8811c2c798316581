# SPDX-License-Identifier: Apache-2.0
"""Does what each file of fast/ does by the public API, in more time."""
