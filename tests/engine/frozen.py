"""Imported last by the process that ranks are forked from: what it has imported is never garbage.

Else each rank's first full collection looks through all of it, which takes longer than the rest of its start.
"""

import gc

gc.freeze()
