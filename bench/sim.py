"""What the gfx950 simulator must reach: foreign kernels right with no false alarm, mutations noticed, timing in its
band, throughput. `python -m bench sim`; `--only` runs some parts, `--sample N` takes every Nth mutation.

All mutations take a quarter of an hour and more. With `--json FILE` what is done is kept beside it in a .journal: the
same command goes on from there, parts that were run before (`--only`) are taken over, and the journal goes when all are
done. `--minutes M` stops after that time (exit code 3).
"""

from __future__ import annotations

import hashlib
import statistics
import tarfile
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

from .common import Bar, Report, parser
from .simcases.case import Case
from .simcases.journal import Journal, OutOfTime, Steps, digest

PARTS = ("acceptance", "mutations", "timing", "throughput")
# Published on an MI355X, bf16 NT, 8192 cubed, TFLOP/s: Triton, and the best hand-written kernels (HipKittens,
# hipBLASLt)
PUBLISHED_TRITON, PUBLISHED_BEST = 1091, (1575, 1610)


def every_case() -> Iterator[Case]:
    """Triton's, IREE's (if its compiler is installed) and ours."""
    from .simcases import iree_cases, own_cases, triton_cases

    yield from triton_cases.cases()
    if iree_cases.tool() is not None:
        yield from iree_cases.cases()
    yield from own_cases.cases()


def acceptance(report: Report) -> None:
    from flykernels.sim import run_on_sim

    right = count = alarms = 0
    cases = list(every_case())
    with Steps("acceptance") as steps:
        steps.expect(len(cases), "cases")
        for case in cases:
            args = case.arguments()
            result = run_on_sim(case.binary, args, case.grid, **case.options)
            wrong = case.wrong(args)
            bad = [f for f in result.findings if f.severity == "error"]
            count, right, alarms = count + 1, right + (wrong <= 1), alarms + len(bad)
            report.row(
                case=case.name,
                error_over_bound=round(wrong, 3),
                alarms=len(bad),
                instructions=result.counters.instructions,
                per_second=round(result.counters.rate),
            )
            steps.step(case.name)
    report.bar("cases right against float64", right / count, at_least=1)
    report.bar("false alarms", alarms, at_most=0)


VERDICTS = ("found", "wrong", "refused", "harmless", "missed")


def mutations(report: Report, journal: Journal, sample: int) -> None:
    from .simcases import mutate

    total: Counter[str] = Counter()
    kinds: dict[str, Counter[str]] = {}
    with Steps("mutations") as steps:
        for case in every_case():
            loaded, hits, watch = mutate.survey(case)
            chosen = list(mutate.mutants(loaded, hits, watch))[::sample]
            steps.expect(len(chosen), case.name)
            code = hashlib.sha256(case.text.encode() + case.binary).hexdigest()[:16]
            tally: Counter[str] = Counter()
            for m in chosen:
                name = f"{case.name}/{code}/{m.kind}/{m.at}/{m.what}"
                verdict = journal.get(name)
                if verdict is None:
                    verdict = mutate.verdict(case, m)
                    journal.done(name, verdict)
                steps.step(verdict)
                tally[verdict] += 1
                kinds.setdefault(m.kind, Counter())[verdict] += 1
                if verdict == "missed":
                    report.note(f"missed: {case.name}: {m.kind}: {m.what}")
            total += tally
            report.row(mutations_of=case.name, **{n: tally[n] for n in VERDICTS})
    for kind, tally in sorted(kinds.items()):
        report.row(kind_of_mutation=kind, **{n: tally[n] for n in VERDICTS})
    caught = total["found"] + total["wrong"] + total["refused"]
    report.note(
        f"{total['harmless']} mutations changed nothing: same results with every load as late as the waits allow, and "
        "no operation that delay mode delayed changed a result"
    )
    report.bar("harmful mutations caught", caught / max(1, caught + total["missed"]), at_least=0.99)


def timing(report: Report) -> None:
    replay(report)
    from flykernels.sim.gemm_grid import Tiling, estimate, grouped
    from flykernels.sim.report import profile
    from flykernels.sim.timing import Machine950, Unit

    from .simcases import own_cases, triton_cases

    def recordings(make):
        out = []
        for k in (512, 1024):
            case = make(k)
            out.append(profile(case.text, case.arguments(), case.grid, check=False, **case.options).recorder)
        return out

    machine, figures = Machine950(), {}
    kernels = {
        "HTI (ours)": (recordings(lambda k: own_cases.hti(256, 256, k)), grouped(4, int(machine.dies))),
        "Triton 256x256x64": (
            recordings(lambda k: triton_cases.matmul("bf16", 256, 256, k, (256, 256, 64), 8)),
            grouped(4),
        ),
    }
    for n in (2048, 4096, 8192):
        for name, ((short, long), order) in kernels.items():
            tiling = Tiling(n, n, n, 256, 256, 64, 2, order)
            low, middle, high = (
                estimate(short, long, (8, 16), tiling, c) for c in (machine.end("low"), machine, machine.end("high"))
            )
            figures[name, n] = middle.tflops
            report.row(
                cube=n,
                kernel=name,
                simulated_tflops=round(middle.tflops),
                band="{:.0f} to {:.0f}".format(*(f(e.tflops for e in (low, middle, high)) for f in (min, max))),
                cycles_a_k_tile=round(middle.each),
                bound=middle.bound,
            )
    triton, best = figures["Triton 256x256x64", 8192], figures["HTI (ours)", 8192]
    report.bar("simulated Triton 8192 cubed over published", triton / PUBLISHED_TRITON, at_least=0.85, at_most=1.25)
    hardware = [b / PUBLISHED_TRITON for b in PUBLISHED_BEST]
    report.note(f"hand-written over Triton: published {hardware[0]:.2f} to {hardware[1]:.2f}")
    report.bar(
        "simulated hand-written over Triton", best / triton, at_least=hardware[0] / 1.15, at_most=hardware[1] * 1.15
    )
    recorder = kernels["HTI (ours)"][0][1]
    run = lambda streams, code: Unit([(streams, code)], machine).run().cycles
    base = run(recorder.waves(), recorder.instructions)
    for name, slower in regressions(recorder).items():
        report.bar(f"simulated HTI with {name}", run(*slower) / base, at_least=1.005, unit="times its cycles")


def regressions(recorder):
    """The HTI recording with a known mistake in it: (streams, instructions)."""
    import dataclasses

    from flykernels.sim.trace import kind_of

    code = recorder.instructions
    drained = [
        dataclasses.replace(i, mods={**i.mods, "vmcnt": 0}) if i.name == "s_waitcnt" and "vmcnt" in i.mods else i
        for i in code
    ]
    vector = next(k for k, i in enumerate(code) if kind_of(i) == "valu")
    matrix = {k for k, i in enumerate(code) if kind_of(i) == "mfma"}
    padded = [[y for x in w for y in (([vector, 0, 0], x) if x[0] in matrix else (x,))] for w in recorder.waves()]
    return {"vmcnt(0) at every wait": (recorder.waves(), drained), "a vector instruction a matrix one": (padded, code)}


def replay(report: Report) -> None:
    """The recorded MI350X traces, if they are here."""
    from flykernels.sim.replay import compare, load_recorded, measured_latency

    from .simcases.traces import archive

    found = archive()
    if found is None:
        report.note("recorded MI350X traces are not here: their replay is in bench/results/sim_replay.json")
        return
    ratios = []
    with tempfile.TemporaryDirectory() as d:
        with tarfile.open(found) as f:
            f.extractall(d, filter="data")
        for code in sorted(Path(d).rglob("code.json")):
            for engine in sorted({p.name.split("_")[0] for p in code.parent.glob("se*.json")}):
                kernel = load_recorded(code.parent, f"{engine}_*.json")
                c = compare(kernel)
                ratios.append(c.ratio)
                report.row(
                    replayed=kernel.name,
                    engine=engine,
                    waves=len(kernel.streams),
                    recorded_cycles=round(statistics.median(c.recorded)),
                    simulated_cycles=round(statistics.median(c.simulated)),
                    ratio=round(c.ratio, 3),
                    latency=round(measured_latency(kernel) or 0),
                )
    report.note("replay: warm main loop; memory latency is each recording's own, since other units' traffic sets it")
    report.bar("lowest simulated over recorded", min(ratios), at_least=0.85)
    report.bar("highest simulated over recorded", max(ratios), at_most=1.15)
    report.bar("median simulated over recorded", statistics.median(ratios), at_least=0.85, at_most=1.15)


def throughput(report: Report) -> None:
    from flykernels.sim import run_on_sim

    from .simcases import own_cases

    several = own_cases.hti(512, 512, 2048)  # four workgroups of eight waves, 164000 wave-instructions
    rates = {}
    for case, check in ((several, True), (several, False), (own_cases.hti(), True)):
        runs = [run_on_sim(case.text, case.arguments(), case.grid, check).counters.rate for _ in range(7)]
        rates[case.name, check] = max(runs)
        report.row(
            throughput_of=case.name,
            checked=str(check),
            wave_instructions_per_second=round(max(runs)),
            median=round(statistics.median(runs)),
            lowest=round(min(runs)),
        )
    report.note(
        "throughput: best of 7 runs, since other work can only slow them, measured on CPU; wave-instructions a second "
        "of the process's processor time (one thread), without loading and binding the code. Waves that run together "
        "share numpy's call overhead, so a launch of few waves is slower"
    )
    report.bar(
        "throughput with all checks, measured on CPU",
        rates[several.name, True],
        at_least=200e3,
        unit="wave-instructions/s",
    )


def main(argv: list[str]) -> int:
    options = parser("sim", "the gfx950 simulator: acceptance, mutations, timing, throughput")
    options.add_argument("--only", default=",".join(PARTS), help=f"parts to run, of {','.join(PARTS)}")
    options.add_argument("--sample", type=int, default=1, metavar="N", help="every Nth mutation")
    options.add_argument(
        "--minutes", type=float, metavar="M", help="stop after so long; the same command goes on (with --json)"
    )
    chosen = options.parse_args(argv)
    parts = chosen.only.split(",")
    if unknown := set(parts) - set(PARTS):
        options.error(f"no part {', '.join(sorted(unknown))}; parts are {', '.join(PARTS)}")
    if chosen.minutes and not chosen.json:
        options.error("--minutes needs --json FILE, beside which the journal is kept")
    report = Report("sim", "simulated")
    journal = Journal(
        chosen.json and chosen.json.with_suffix(".journal"), digest(code_under_test()),
        chosen.minutes and 60 * chosen.minutes,
    )  # fmt: skip
    work = {
        "acceptance": acceptance,
        "mutations": lambda part: mutations(part, journal, chosen.sample),
        "timing": timing,
        "throughput": throughput,
    }
    own = digest([Path(__file__), *(Path(__file__).parent / "simcases").glob("*.py")])
    try:
        for name in PARTS:
            if name in parts:
                kept(f"part {name} {chosen.sample} {own}", work[name], report, journal)
    except OutOfTime:
        print(f"sim: stopped after {chosen.minutes:g} minutes with {len(journal.steps)} steps done; run it again")
        return 3
    except BaseException:
        journal.save()
        raise
    journal.save()
    status = report.close(chosen.json)
    if set(parts) == set(PARTS):
        journal.close()
    return status


def kept(step: str, run: Callable[[Report], None], report: Report, journal: Journal) -> None:
    """Adds a part to the report: as it was in an earlier run with this journal, or run now."""
    found = journal.get(step)
    if found is None:
        part = Report(report.name, report.label)
        run(part)
        found = {"rows": part.rows, "bars": [vars(b) for b in part.bars], "notes": part.notes}
        journal.done(step, found)
    report.rows += found["rows"]
    report.bars += [Bar(**b) for b in found["bars"]]
    report.notes += found["notes"]


def code_under_test() -> list[Path]:
    """The simulator and the mutations: what a kept verdict depends on, besides the kernel itself."""
    here = Path(__file__).parent
    simulator = [f for f in (here.parent / "flykernels" / "sim").iterdir() if f.suffix in (".py", ".tsv")]
    return [*simulator, here / "simcases" / "mutate.py"]
