# SPDX-License-Identifier: Apache-2.0
"""Several hosts: which there are, and the connection to them."""
