"""Which tile of C a workgroup computes: neighbours in time share rows of A and columns of B, within one die's L2.

Pure arithmetic on ints or kernel Values, so that the very function the kernels use is tested on every count of tiles.
"""

from __future__ import annotations

from flykernels.lang.values import minimum


def on_dies(i, count, dies: int):
    """A permutation of 0 .. count-1 after which a die's workgroups are consecutive numbers.

    The hardware deals workgroups out to the dies in turn: number i goes to die i % dies. Each die gets one run of
    ceil or floor(count / dies) numbers."""
    if dies == 1:
        return i
    die, nth = i % dies, i // dies
    each, over = count // dies, count % dies
    return die * each + minimum(die, over) + nth


def grouped(i, rows, columns, group_m: int):
    """(row, column) of tile number i of rows x columns: `group_m` rows at a time, down each column of the group."""
    size = group_m * columns
    first = i // size * group_m
    high = minimum(rows - first, group_m)
    within = i % size
    return first + within % high, within // high


def tile_of(i, rows, columns, layers, group_m: int, dies: int):
    """(layer, row, column) of workgroup i of layers x rows x columns; layers (batches, slices of K) vary slowest."""
    i = on_dies(i, rows * columns * layers, dies)
    if isinstance(layers, int) and layers == 1:
        return 0, *grouped(i, rows, columns, group_m)
    layer = i // (rows * columns)
    return layer, *grouped(i - layer * (rows * columns), rows, columns, group_m)
