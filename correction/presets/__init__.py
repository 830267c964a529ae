"""Named methods of the literature, each a few lines of data over the same parts. A preset is no code path.

`methods.py` has them all by name. What differs from a paper, and constants that no paper prints, stand next to the preset; where sources
disagree, docs/correction.md says what was decided and why. Symbols: rho = prox/mu, r = theta/prox, q = theta/mu, A advantage, w weight.
"""
