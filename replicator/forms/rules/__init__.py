# SPDX-License-Identifier: Apache-2.0
"""The rules of all ops, by their types; an op without one takes replicated inputs."""
