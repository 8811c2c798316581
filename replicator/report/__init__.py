# SPDX-License-Identifier: Apache-2.0
"""What a step communicates, as rows, tables and pictures; what other reports share."""
