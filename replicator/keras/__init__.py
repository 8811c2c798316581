# SPDX-License-Identifier: Apache-2.0
"""Keras 3's `fit`, `evaluate` and `predict` on replicas.

`Replicator.keras_model` is model.py's `replicate`. Nothing here knows a private name of
Keras: what a model does per batch is asked for by methods that users may override.
"""
