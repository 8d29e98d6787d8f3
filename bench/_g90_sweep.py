import json, os, sys, time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from templates.grouped_gemm.sm90a_config import GroupedSm90aConfig as C
from templates.grouped_gemm.problem import GroupedGemmProblem as P
def cfgs(tokens):
    c = lambda m, n, k, s, g=(1, 1), **kw: C(tile_m=m, tile_n=n, tile_k=k, stages=s, groups=g, persistent=True, **kw)
    if tokens == 16:
        return [c(16,64,128,8,evict='b'), c(32,64,64,12,evict='b'), c(64,64,64,12,evict='b'), c(64,64,64,12,evict='b',lines=2), c(64,128,64,8,evict='b'), c(32,64,64,12,evict='b',lines=2), c(32,64,128,7,evict='b')]
    if tokens == 128:
        return [x for l in (1,2,4) for x in (c(128,128,64,6,(2,1),evict='b',lines=l), c(64,128,64,8,evict='b',lines=l), c(128,192,64,5,(2,1),lines=l), c(64,160,64,7,evict='b',lines=l), c(128,256,64,4,(2,1),tma_store=l==1,lines=l))]
    return [c(128,256,64,4,(2,1)), c(128,256,64,4,(2,1),lines=2), c(128,256,64,4,(2,1),lines=4), c(128,256,64,4,(2,1),group_m=16), c(128,256,64,4,(2,1),tma_store=True), c(128,256,64,4,(2,1),tma_store=True,lines=2), c(128,128,64,5,(2,1),tma_store=True)]
def build_one(a):
    p, c = a
    from flykernels.targets import sm90a
    from templates.grouped_gemm.build import build
    try:
        return build(p, c, sm90a).to_bytes()
    except Exception as e:
        return repr(e)[:300]
def main():
    from bench._grouped_suite import GROUPS, TOKENS, SIZES_NK, Case
    out = open(os.environ['OUT'] + '/sweep.jsonl', 'a')
    t0 = time.time()
    jobs = {}
    for n, k in SIZES_NK:
        for g in GROUPS:
            for t in TOKENS:
                p = P('m', g, n=n, k=k, tokens_hint=g * t)
                for c in cfgs(t):
                    jobs[(p, c)] = None
    with ProcessPoolExecutor(int(os.environ.get('JOBS', '14'))) as ex:
        for key, r in zip(jobs, ex.map(build_one, list(jobs), chunksize=4)):
            jobs[key] = r
    print('built', len(jobs), time.time() - t0, flush=True)
    for (p, c), r in jobs.items():
        if isinstance(r, str): print('FAILED', p.groups, p.tokens_hint, c, r, flush=True)
    if '--build' in sys.argv: return
    import torch
    from flykernels.codeobject import CodeObject
    from flykernels.launch.current import Launcher
    from templates.grouped_gemm.arguments import scalar_values
    from bench._gpu_replay import repeated, replay_us
    for n, k in SIZES_NK:
        A = torch.randn(128 * 1024, k, device='cuda', dtype=torch.bfloat16)
        W = torch.randn(128, n, k, device='cuda', dtype=torch.bfloat16) * k ** -0.5
        for t in TOKENS:
            for g in GROUPS:
                p = P('m', g, n=n, k=k, tokens_hint=g * t)
                for share in ('balanced', 'zipf', 'third empty'):
                    case = Case(g, t, share, n, k)
                    a, b = A[:case.total], W[:g].transpose(-2, -1)
                    offs = torch.tensor(case.offs, dtype=torch.int32, device='cuda')
                    cc = torch.empty(case.total, n, device='cuda', dtype=torch.bfloat16)
                    want = torch._grouped_mm(a, b, offs)
                    ways, names = [], []
                    floor = max((g * n * k * 2 * (2/3 if share == 'third empty' else 1) + case.total * (n + k) * 2) / 4.25e6, 2 * case.total * n * k / 790e6)
                    ways.append(repeated(lambda: torch._grouped_mm(a, b, offs), floor)); names.append('aten')
                    for c in cfgs(t):
                        r = jobs[p, c]
                        if isinstance(r, str): continue
                        try:
                            l = Launcher(CodeObject.from_bytes(r))
                            call = lambda l=l: l(a.data_ptr(), b.data_ptr(), offs.data_ptr(), cc.data_ptr(), *scalar_values(p, a, b, cc))
                            cc.fill_(float('nan')); call(); torch.cuda.synchronize()
                            err = ((cc.float() - want.float()).norm() / want.float().norm()).item()
                            if not err < 5e-3: print('WRONG', case, c, err, flush=True)
                            ways.append(repeated(call, floor)); names.append(f'{c} gm{c.group_m} l{c.lines}')
                        except Exception as e:
                            print('ERR', case, c, repr(e)[:200], flush=True)
                            if 'CUDA' in repr(e) or 'sticky' in repr(e): raise
                    us = replay_us(ways, rounds=3)
                    row = dict(g=g, t=t, share=share, n=n, k=k, floor=floor, aten=us[0], ours=dict(zip(names[1:], us[1:])))
                    best = min(row['ours'], key=row['ours'].get)
                    print(f"{str(case):45s} floor {floor:7.1f} aten {us[0]:7.1f} ours {row['ours'][best]:7.1f} x{us[0]/row['ours'][best]:.3f} {best}", flush=True)
                    out.write(json.dumps(row) + '\n'); out.flush()
                    del ways
                    if time.time() - t0 > float(os.environ.get('SECONDS_MOST', '1e9')): return
main()
