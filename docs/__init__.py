# SPDX-License-Identifier: Apache-2.0
"""The documentation site: `make docs` builds it, `make docs-serve` serves it."""
