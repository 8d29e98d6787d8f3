"""Small kernels in PTX, each for one thing that a launch has to get right. The driver assembles them: no ptxas."""

from __future__ import annotations

from flykernels.codeobject import Argument, CodeObject, Extent, TensorMap

HEAD = ".version 8.4\n.target sm_90a\n.address_size 64\n"

NOTHING = HEAD + ".visible .entry nothing(.param .u64 a) .reqntid 32 { ret; }\n"

# out[block] = the grid's first axis once the last block has counted itself; the counter goes back to 0.
COUNT = (
    HEAD
    + """
.visible .entry count(.param .u64 out, .param .u64 n, .param .u64 space) .reqntid 32 {
  .reg .pred p; .reg .b32 t, old, blocks, last; .reg .b64 o, s;
  mov.u32 t, %tid.x; setp.ne.u32 p, t, 0; @p bra DONE;
  ld.param.u64 o, [out]; ld.param.u64 s, [space];
  mov.u32 blocks, %nctaid.x; sub.u32 last, blocks, 1;
  atom.global.add.u32 old, [s], 1;
  setp.ne.u32 p, old, last; @p bra DONE;
  red.global.add.u32 [o], 1;
  st.global.u32 [s], 0;
DONE: ret;
}
"""
)

# out[block * 2] = workgroups of a cluster, out[block * 2 + 1] = this one's number in it.
CLUSTER = (
    HEAD
    + """
.visible .entry cluster(.param .u64 out, .param .u64 n) .reqntid 32 {
  .reg .pred p; .reg .b32 t, size, rank, block; .reg .b64 o, at;
  mov.u32 t, %tid.x; setp.ne.u32 p, t, 0; @p bra DONE;
  ld.param.u64 o, [out]; mov.u32 block, %ctaid.x;
  mov.u32 size, %cluster_nctaid.x; mov.u32 rank, %cluster_ctaid.x;
  mad.wide.u32 at, block, 8, o;
  st.global.v2.u32 [at], {size, rank};
DONE: ret;
}
"""
)

# out[t] = what thread t has put at the end of dynamic shared memory: its own number.
SHARED = (
    HEAD
    + """
.extern .shared .align 16 .b8 room[];
.visible .entry shared(.param .u64 out, .param .u64 bytes) .reqntid 32 {
  .reg .b32 t, base, at, v; .reg .b64 o, n, where;
  ld.param.u64 o, [out]; ld.param.u64 n, [bytes];
  mov.u32 t, %tid.x; mov.u32 base, room; cvt.u32.u64 at, n; add.u32 at, at, base;
  mad.lo.u32 at, t, 4, at; st.shared.u32 [at + -128], t;
  bar.sync 0;
  ld.shared.u32 v, [at + -128];
  mad.wide.u32 where, t, 4, o; st.global.u32 [where], v;
  ret;
}
"""
)

# out = the (8, 64) box of 16-bit elements at (row 8 * ctaid.x, column 64 * ctaid.y) of a, through a tensor map.
TMA = (
    HEAD
    + """
.visible .entry tma(.param .u64 a, .param .u64 out, .param .u64 m, .param .u64 a_row, .param .align 64 .b8 map[128])
.reqntid 32 {
  .shared .align 128 .b8 tile[1024]; .shared .align 8 .b64 bar;
  .reg .pred p; .reg .b32 t, x, y, tb, bb, at, box, blocks; .reg .b64 o, mp, where; .reg .b32 v<4>;
  mov.u32 t, %tid.x; mov.u32 tb, tile; mov.u32 bb, bar;
  mov.u32 y, %ctaid.x; mov.u32 x, %ctaid.y; mov.u32 blocks, %nctaid.y;
  mad.lo.u32 box, y, blocks, x; shl.b32 y, y, 3; shl.b32 x, x, 6;
  setp.ne.u32 p, t, 0; @p bra READY;
  mbarrier.init.shared.b64 [bb], 1;
  fence.mbarrier_init.release.cluster;
  mov.b64 mp, map; cvta.param.u64 mp, mp;
  mbarrier.arrive.expect_tx.shared.b64 _, [bb], 1024;
  cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [tb], [mp, {x, y}], [bb];
READY: bar.sync 0;
WAIT: mbarrier.try_wait.parity.shared.b64 p, [bb], 0; @!p bra WAIT;
  ld.param.u64 o, [out]; mad.wide.u32 o, box, 1024, o;
  mad.lo.u32 at, t, 32, tb; mad.wide.u32 where, t, 32, o;
  ld.shared.v4.b32 {v0, v1, v2, v3}, [at]; st.global.v4.b32 [where], {v0, v1, v2, v3};
  ld.shared.v4.b32 {v0, v1, v2, v3}, [at + 16]; st.global.v4.b32 [where + 16], {v0, v1, v2, v3};
  ret;
}
"""
)

# Writes where it is told to, allowed or not.
STORE = (
    HEAD
    + """
.visible .entry store(.param .u64 out, .param .u64 n) .reqntid 32 {
  .reg .b64 o; ld.param.u64 o, [out]; st.global.u32 [o], 1; ret;
}
"""
)

OUT, N = Argument("out", "pointer", "i32"), Argument("n", "i64", "i64")
BLOCKS = ((Extent("n"),),)


def code(name: str, text: str, arguments, grid=BLOCKS, **more) -> CodeObject:
    return CodeObject("sm90a", "sm_90a", name, tuple(arguments), grid, 32, binary=text.encode(), **more)


nothing = code("nothing", NOTHING, [Argument("a", "i64", "i64")], ((Extent(1),),))
count = code("count", COUNT, [OUT, N, Argument("space", "pointer", "i32")], workspace=(Extent(4),))
store = code("store", STORE, [OUT, N])


def cluster(size: int) -> CodeObject:
    return code("cluster", CLUSTER, [OUT, N], cluster=size)


def shared(size: int) -> CodeObject:
    return code("shared", SHARED, [OUT, Argument("bytes", "i64", "i64")], ((Extent(1),),), dynamic_bytes=size)


def tma(columns: int) -> CodeObject:
    """(m, columns) 16-bit elements, read box by box; beyond the tensor are zeros."""
    given = Argument("a", "pointer", "bf16"), Argument("out", "pointer", "bf16"), Argument("m", "i64", "i64")
    described = TensorMap("map", "a", ((columns, 1), ("m", "a_row")), (64, 8), swizzle=0)
    grid = ((Extent("m", 8),), (Extent(columns, 64),))
    return code("tma", TMA, [*given, Argument("a_row", "i64", "i64")], grid, tensor_maps=(described,))
