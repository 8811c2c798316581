# SPDX-License-Identifier: Apache-2.0
"""Bad inputs by the thousand: `python -m tests.bad_inputs --count=2000 --seed=1`.

values.py is what is passed, programs.py where; cases.py makes cases of both, judge.py
says whether what came of one is right, and workers.py runs them in processes that may
hang or die.
"""
