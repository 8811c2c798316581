# SPDX-License-Identifier: Apache-2.0
"""Everything the library needs of TensorFlow beyond its public API, with the reasons.

No other package imports `tensorflow.python` or touches an underscore of a TensorFlow
object. Each entry says why the public API does not suffice and which public call would
replace it. tests/_tf calls every entry, so a new TensorFlow that breaks one fails
there, by name.

The modules of this package are indispensable. Those in fast/ only save time or memory;
where a TensorFlow release lacks what they need, choice.py substitutes the module of the
same name in plain/.
"""
