# SPDX-License-Identifier: Apache-2.0
"""Runs Keras 3's `fit`, `evaluate` and `predict` on replicas.

`Replicator.keras_model` is model.py's `replicate`. Nothing here uses a private name of
Keras: what a model does per batch is defined by methods that users may override.
"""
