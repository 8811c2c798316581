# SPDX-License-Identifier: Apache-2.0
"""Programs for one device, of whole batches, on replicas: forms, rules, replay."""
