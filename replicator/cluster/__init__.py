# SPDX-License-Identifier: Apache-2.0
"""Several hosts: their descriptions, the connection to them, and its faults."""
