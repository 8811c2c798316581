# SPDX-License-Identifier: Apache-2.0
"""Random programs of whole batches, which replicas compute as one device does."""
