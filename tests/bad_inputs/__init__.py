# SPDX-License-Identifier: Apache-2.0
"""Bad inputs by the thousand: `python -m tests.bad_inputs --count=2000 --seed=1`.

values.py has the values, programs.py the programs that take them; cases.py combines
both, judge.py decides whether the outcome is right, and workers.py runs them in
processes that may hang or die.
"""
