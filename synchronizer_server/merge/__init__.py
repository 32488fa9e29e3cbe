"""Pure tensor mathematics of the merge (design section 4): torch in, torch out, no I/O.

``validate`` looks at one contribution, ``accumulate`` merges contributions into one outer gradient,
``outer`` applies the outer optimizer, ``fragment_state`` keeps the three tensors of a fragment and
makes its updates. Nothing here knows rounds, learners or the wire.
"""
