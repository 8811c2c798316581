"""Side-by-side programs: Replicator against what else TensorFlow offers.

`python -m benchmarks` runs them all and prints tables. In four small rooms:

- `workloads.py`: what is trained (models, batches, the step that everyone takes);
- `contenders.py`: the ways of running that step;
- `timing.py`: how contenders are measured against one another on a noisy machine;
- `report.py`: the tables and the JSON file.

Times are reported, never asserted: they say something about one machine on one day.
"""
