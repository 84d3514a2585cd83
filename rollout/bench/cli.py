"""The `moebius bench` commands. Options here, the work in the modules beside; imports wait until a command runs."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from moebius.rollout.errors import BadInput

if TYPE_CHECKING:
    from moebius.rollout.bench.engines import BenchSetup
    from moebius.rollout.bench.results import Results

app = typer.Typer(no_args_is_help=True, help="Benchmarks: ours beside stock vLLM. docs/benchmarks/README.md explains.")

Config = Annotated[Path | None, typer.Option(help="YAML file with the settings of the group; see configs/.")]
Sets = Annotated[list[str] | None, typer.Option("--set", help="Override a setting, as engine.max_num_seqs=64.")]
Ranks = Annotated[int | None, typer.Option(min=1, help="Ranks; default: as configured. One is allowed here.")]
Weights = Annotated[str, typer.Option(help="dummy: random weights, only config.json is read; or checkpoint.")]
Dir = Annotated[Path | None, typer.Option("--dir", help="Folder of `bench up`: use its engines, start none.")]
Out = Annotated[Path, typer.Option(help="Folder for the JSON, the PNG and the logs of engines.")]
Names = Annotated[
    str,
    typer.Option("--engines", help="Comma-separated: moebius, stock_tp, stock_ep, stock_dp_tp, stock_tp_ep, stock_mp."),
]
Largest = Annotated[int, typer.Option(min=1, help="Largest global batch that gets a CUDA graph of its own size.")]
Seed = Annotated[int, typer.Option(min=0, help="Of prompts and lengths.")]
Batches = Annotated[str, typer.Option(help="Comma-separated global batches.")]
Context = Annotated[int, typer.Option(min=1, help="Prompt tokens per request.")]
Iterations = Annotated[int, typer.Option(min=1, help="Whole-batch decode iterations per run.")]
Window = Annotated[int, typer.Option(min=1, help="Iterations averaged into one value.")]
Rounds = Annotated[int, typer.Option(min=1, help="Times everything is measured, engines taking turns.")]

STANDARD = "moebius,stock_tp,stock_ep"
BATCHES = "8,16,32,64,128,256,512,1024,2048"


@app.command()
def up(
    folder: Annotated[Path, typer.Option("--dir", help="Folder for jobs, answers and logs.")],
    config: Config,
    engines: Names = STANDARD,
    overrides: Sets = None,
    ranks: Ranks = None,
    weights: Weights = "dummy",
    largest_batch: Largest = 2048,
) -> None:
    """Keep engines running for several benchmarks, until `bench down`. Stays in the foreground."""
    from moebius.rollout.bench.daemon import serve

    serve(folder, _setup(config, overrides, ranks, largest_batch, weights, folder), _names(engines))


@app.command()
def down(folder: Annotated[Path, typer.Option("--dir", help="Folder of `bench up`.")]) -> None:
    """End the engines that `bench up` keeps running."""
    from moebius.rollout.bench.daemon import stop

    stop(folder)
    typer.echo(f"the engines in {folder} have ended")


@app.command()
def sweep(
    out: Out,
    config: Config = None,
    folder: Dir = None,
    engines: Names = STANDARD,
    overrides: Sets = None,
    ranks: Ranks = None,
    weights: Weights = "dummy",
    batches: Batches = BATCHES,
    context: Context = 512,
    iterations: Iterations = 60,
    window: Window = 10,
    rounds: Rounds = 3,
    seed: Seed = 0,
) -> None:
    """Milliseconds per decode iteration against the global batch. Times mean something on CUDA only."""
    options = _sweep_options(batches, context, iterations, window, rounds, seed)
    setting = (config, overrides, ranks, max(options["batches"]), weights, out)
    _finish(_run("sweep", options, engines, folder, setting), out)


@app.command()
def rollout(
    out: Out,
    config: Config = None,
    folder: Dir = None,
    engines: Names = STANDARD,
    overrides: Sets = None,
    ranks: Ranks = None,
    weights: Weights = "dummy",
    trace: Annotated[str, typer.Option(help="deepmath, long-tail or captured.")] = "deepmath",
    lengths: Annotated[Path | None, typer.Option(help="captured: file of `moebius rollout --capture-lengths`.")] = None,
    requests: Annotated[int, typer.Option(min=2, help="Requests; a captured trace has its own number.")] = 1024,
    prompt: Annotated[int, typer.Option(min=1, help="Prompt tokens per request.")] = 120,
    scale: Annotated[float, typer.Option(min=0.0, help="deepmath: factor on all lengths.")] = 1.0,
    cap: Annotated[int, typer.Option(min=1, help="deepmath: longest output.")] = 32768,
    body: Annotated[int, typer.Option(min=1, help="long-tail: output tokens of most requests.")] = 400,
    tail: Annotated[int, typer.Option(min=1, help="long-tail: output tokens of the stragglers.")] = 2400,
    stragglers: Annotated[int | None, typer.Option(min=1, help="long-tail: how many; default one in 16.")] = None,
    curves: Annotated[
        Path | None, typer.Option(help="long-tail: choose tail and stragglers by this sweep.json, for most gain.")
    ] = None,
    threshold: Annotated[
        int | None, typer.Option(min=0, help="Switch at this many live requests; default: best by the first round.")
    ] = None,
    repeats: Rounds = 3,
    update_weights: Annotated[bool, typer.Option(help="Also time a full weight update.")] = True,
    seed: Seed = 0,
) -> None:
    """One trace of output lengths under static layouts and with our switch. Times mean something on CUDA only."""
    from moebius.rollout.bench.rollout_trace import curves_of_sweep
    from moebius.rollout.bench.traces import captured

    options: dict[str, Any] = {
        "trace": trace, "requests": requests, "prompt": prompt, "scale": scale, "cap": cap, "body": body, "tail": tail,
        "stragglers": stragglers, "threshold": threshold, "repeats": repeats, "weights": update_weights, "seed": seed,
    }  # fmt: skip
    if lengths is not None:
        options["lengths"] = captured(lengths)
        options["requests"] = len(options["lengths"])
    if curves is not None:
        options["sweep"] = curves_of_sweep(curves)
    _finish(_run("rollout", options, engines, folder, (config, overrides, ranks, requests, weights, out)), out)


@app.command()
def switch(
    out: Out,
    config: Config = None,
    folder: Dir = None,
    overrides: Sets = None,
    ranks: Ranks = None,
    weights: Weights = "dummy",
    live: Annotated[int, typer.Option(min=1, help="Live requests.")] = 256,
    fills: Annotated[
        str, typer.Option(help="Comma-separated tokens of KV at the first switch; what does not fit is left out.")
    ] = "35000,135000,270000,540000,800000",
    switches: Annotated[int, typer.Option(min=1, help="Live switches at each fill, to and fro.")] = 4,
    every: Annotated[int, typer.Option(min=1, help="Iterations between two of them.")] = 6,
    prepare: Annotated[
        int, typer.Option(min=0, help="Prepare switches to TP so many iterations before; 0: measure none such.")
    ] = 8,
    prepare_layers: Annotated[
        str | None, typer.Option(help="Comma-separated: layers to send ahead; default: as many as there is room for.")
    ] = None,
    drained: Annotated[int, typer.Option(min=1, help="Switches without requests, in each direction.")] = 10,
    kv_tokens: Annotated[int, typer.Option(min=1, help="Tokens of KV that the movers move.")] = 524288,
    repeats: Annotated[int, typer.Option(min=1, help="Times each mover is timed, in each direction.")] = 5,
    soak: Annotated[int, typer.Option(min=0, help="Live switches of the soak; 0: none.")] = 200,
    soak_live: Annotated[int, typer.Option(min=1, help="Live requests of the soak.")] = 64,
    soak_context: Annotated[int, typer.Option(min=1, help="Their prompt tokens.")] = 256,
    update_every: Annotated[int, typer.Option(min=1, help="Switches between two weight updates.")] = 25,
    mover_json: Annotated[
        Path | None, typer.Option(help="Speeds of `python -m moebius.rollout.bench.mover`, instead of measuring.")
    ] = None,
    memory_json: Annotated[Path | None, typer.Option(help="Results of `bench memory`, for the overhead.")] = None,
    seed: Seed = 0,
) -> None:
    """What a switch costs: drained, with live requests, the movers alone, bytes, a soak. Means something on CUDA."""
    from moebius.rollout.bench.switch_numbers import Movers, memory_overhead

    options: dict[str, Any] = {
        "live": live, "fills": _integers(fills, "--fills"), "switches": switches, "every": every, "prepare": prepare,
        "prepare_layers": _integers(prepare_layers, "--prepare-layers") if prepare_layers else [], "drained": drained,
        "kv_tokens": kv_tokens, "repeats": repeats, "soak": soak, "soak_live": soak_live, "soak_context": soak_context,
        "update_every": update_every, "seed": seed,
    }  # fmt: skip
    if mover_json is not None:
        options["movers"] = Movers.load(mover_json).model_dump()
    if memory_json is not None:
        options["memory_overhead_pct"] = memory_overhead(memory_json)
    setting = (config, overrides, ranks, max(live, soak_live), weights, out)
    _finish(_run("switch", options, "moebius", folder, setting), out)


@app.command()
def serving(
    out: Out,
    config: Config = None,
    folder: Dir = None,
    overrides: Sets = None,
    ranks: Ranks = None,
    weights: Weights = "dummy",
    largest_batch: Largest = 1024,
    file: Annotated[
        Path | None, typer.Option(help="CSV of TIMESTAMP,ContextTokens,GeneratedTokens, instead of the two bursts.")
    ] = None,
    first: Annotated[
        float | None, typer.Option("--first-s", min=0.001, help="Only the first seconds of --file.")
    ] = None,
    time_scale: Annotated[float, typer.Option(min=1e-6, help="Factor on all times.")] = 1.0,
    requests_scale: Annotated[float, typer.Option(min=1e-6, help="Factor on the number of requests.")] = 1.0,
    length_scale: Annotated[float, typer.Option(min=1e-6, help="Factor on prompts and outputs.")] = 1.0,
    policies: Annotated[str, typer.Option(help="Comma-separated.")] = "static_ep,static_tp,interactive",
    threshold: Annotated[int | None, typer.Option(min=0, help="interactive: T_h; default: as configured.")] = None,
    low: Annotated[int | None, typer.Option("--threshold-low", min=0, help="interactive: T_l; likewise.")] = None,
    window: Annotated[int | None, typer.Option(min=1, help="interactive: W; likewise.")] = None,
    cooldown: Annotated[float | None, typer.Option("--cooldown-s", min=0.0, help="interactive: C; likewise.")] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Times the trace is replayed under each policy.")] = 1,
    soak: Annotated[int, typer.Option(min=0, help="Alternating live switches afterwards; 0: none.")] = 100,
    seed: Seed = 0,
) -> None:
    """Requests that come in bursts, under static layouts and the interactive policy. Means something on CUDA only."""
    from moebius.rollout.bench.serving_traces import arrivals_of, read_csv

    options: dict[str, Any] = {
        "policies": _names(policies), "threshold": threshold, "threshold_low": low, "window": window,
        "cooldown_s": cooldown, "repeats": repeats, "soak": soak, "seed": seed,
    }  # fmt: skip
    scales = {"time_scale": time_scale, "requests_scale": requests_scale, "length_scale": length_scale}
    options |= scales
    if file is not None:
        options |= {"trace": "csv", "arrivals": arrivals_of(read_csv(file, seed=seed, first_s=first, **scales))}
    _finish(_run("serving", options, "moebius", folder, (config, overrides, ranks, largest_batch, weights, out)), out)


@app.command()
def policies(
    out: Out,
    config: Config = None,
    folder: Dir = None,
    overrides: Sets = None,
    ranks: Ranks = None,
    weights: Weights = "dummy",
    requests: Annotated[int, typer.Option(min=2, help="Samples per step.")] = 512,
    prompt: Annotated[int, typer.Option(min=1, help="Prompt tokens per sample.")] = 120,
    scale: Annotated[float, typer.Option(min=0.0, help="Factor on DeepMath's lengths.")] = 0.1,
    cap: Annotated[int, typer.Option(min=1, help="Longest output.")] = 896,
    steps: Annotated[int, typer.Option(min=1, help="Fresh steps, each under every policy.")] = 3,
    threshold: Annotated[
        int | None, typer.Option(min=1, help="Of the fixed policy; default: where the calibrated costs cross.")
    ] = None,
    batches: Annotated[
        str, typer.Option(help="Comma-separated global batches to calibrate.")
    ] = "1,2,8,32,64,128,256,512",
    contexts: Annotated[str, typer.Option(help="Comma-separated prompt lengths to calibrate.")] = "128,1024",
    iterations: Annotated[int, typer.Option(min=4, help="Calibration: iterations per layout and point.")] = 32,
    seed: Seed = 0,
) -> None:
    """The simulator against real steps, and the predictive policy against fixed ones. Means something on CUDA only."""
    options = {
        "requests": requests, "prompt": prompt, "scale": scale, "cap": cap, "steps": steps, "threshold": threshold,
        "batches": _integers(batches, "--batches"), "contexts": _integers(contexts, "--contexts"),
        "iterations": iterations, "seed": seed,
    }  # fmt: skip
    _finish(_run("policies", options, "moebius", folder, (config, overrides, ranks, requests, weights, out)), out)


@app.command()
def graphs(
    out: Out,
    config: Config = None,
    folder: Dir = None,
    engines: Names = "moebius,moebius+eager",
    overrides: Sets = None,
    ranks: Ranks = None,
    weights: Weights = "dummy",
    batches: Batches = "1,2,4,8,16,32,64,128,256",
    context: Context = 512,
    iterations: Iterations = 60,
    window: Window = 10,
    rounds: Rounds = 3,
    seed: Seed = 0,
) -> None:
    """Decode with and without CUDA graphs, in both layouts; stock engines may be added. Needs CUDA."""
    options = _sweep_options(batches, context, iterations, window, rounds, seed)
    setting = (config, overrides, ranks, max(options["batches"]), weights, out)
    _finish(_run("graphs", options, engines, folder, setting), out)


@app.command()
def kernels(
    out: Out,
    config: Config = None,
    folder: Dir = None,
    engines: Names = STANDARD,
    overrides: Sets = None,
    ranks: Ranks = None,
    weights: Weights = "dummy",
    batches: Batches = "8,512",
    context: Context = 64,
    iterations: Annotated[int, typer.Option(min=1, help="Decode iterations that are counted.")] = 32,
    top: Annotated[int, typer.Option(min=1, help="Largest differences told for each pair of engines.")] = 12,
    traces: Annotated[bool, typer.Option(help="Also write Chrome traces of host and device to OUT/traces.")] = False,
    seed: Seed = 0,
) -> None:
    """Device time of a decode iteration by kernel, ours beside stock. On CPU, operators instead of kernels."""
    sizes = _integers(batches, "--batches")
    options = {"batches": sizes, "context": context, "iterations": iterations, "top": top, "seed": seed}
    if traces:
        options["traces"] = str((out / "traces").absolute())
    _finish(_run("kernels", options, engines, folder, (config, overrides, ranks, max(sizes), weights, out)), out)


@app.command()
def memory(
    out: Out,
    config: Config,
    engines: Names = "moebius,stock_ep,stock_tp",
    overrides: Sets = None,
    ranks: Ranks = None,
    weights: Weights = "dummy",
    largest_batch: Largest = 512,
) -> None:
    """Memory per rank of each engine, started alone. Needs CUDA, and GPUs that nothing else uses."""
    from moebius.rollout.bench.memory import run_memory

    setup = _setup(config, overrides, ranks, largest_batch, weights, out)
    _finish(run_memory(setup, out / "logs", _names(engines), command=_line()), out)


@app.command()
def strawmen(
    out: Out,
    config: Config,
    overrides: Sets = None,
    ranks: Ranks = None,
    weights: Weights = "dummy",
    largest_batch: Largest = 512,
    live: Annotated[int, typer.Option(min=1, help="Live requests at our switch.")] = 64,
    context: Context = 512,
    repeats: Rounds = 3,
) -> None:
    """Restart, reload and recapture against our switch. Needs CUDA; starts five engines one after another."""
    from moebius.rollout.bench.strawmen import run_strawmen

    setup = _setup(config, overrides, ranks, largest_batch, weights, out)
    _finish(run_strawmen(setup, out / "logs", live=live, context=context, repeats=repeats, command=_line()), out)


@app.command()
def sampler(
    out: Out,
    rows: Annotated[str, typer.Option(help="Comma-separated numbers of rows.")] = "8,32,128,512",
    vocab: Annotated[int, typer.Option(min=2, help="Vocabulary.")] = 151936,
    repeats: Annotated[int, typer.Option(min=1, help="Calls that are timed.")] = 50,
) -> None:
    """Our sampler alone, beside vLLM's."""
    from moebius.rollout.bench.results import make_results
    from moebius.rollout.bench.sampler import measure

    measured = measure(_integers(rows, "--rows"), vocab, repeats)
    numbers: dict[str, float] = {}
    for row in measured:
        fields = {key: value for key, value in row.items() if key != "rows"}
        numbers |= {f"{key.removesuffix('_ms')}_{row['rows']:.0f}_rows_ms": value for key, value in fields.items()}
    options = {"rows": rows, "vocab": vocab, "repeats": repeats}
    _finish(make_results("sampler", command=_line(), options=options, results=numbers, series={"rows": measured}), out)


@app.command()
def publish(
    source: Annotated[Path, typer.Argument(metavar="RESULTS", help="JSON of a benchmark.")],
    target: Annotated[Path, typer.Argument(help="File to write, as docs/benchmarks/sweep_30b_x2.json.")],
) -> None:
    """Copy results to where they are kept, without this host's paths, and draw their picture beside them."""
    from moebius.rollout.bench import results

    typer.echo(results.publish(source, target))


def _sweep_options(batches: str, context: int, iterations: int, window: int, rounds: int, seed: int) -> dict[str, Any]:
    if iterations < window:
        raise BadInput(f"--iterations {iterations} does not fill one window of {window}: raise it or lower --window")
    return {
        "batches": _integers(batches, "--batches"), "context": context, "iterations": iterations, "window": window,
        "rounds": rounds, "seed": seed,
    }  # fmt: skip


def _integers(text: str, what: str) -> list[int]:
    try:
        found = [int(part) for part in text.split(",")]
    except ValueError:
        raise BadInput(f"{what}: expected whole numbers and commas, as 8,16,32, got '{text}'") from None
    if min(found) < 1:
        raise BadInput(f"{what}: all must be at least 1, got '{text}'")
    return found


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def _setup(
    config: Path | None, overrides: list[str] | None, ranks: int | None, largest: int, weights: str, folder: Path
) -> BenchSetup:
    from moebius.rollout.bench.engines import BenchSetup
    from moebius.rollout.config import load_config

    if config is None:
        raise BadInput("give --config C.yaml to start engines, or --dir RUN to use those of `moebius bench up`")
    if weights not in ("dummy", "checkpoint"):
        raise BadInput(f"--weights: dummy or checkpoint, got '{weights}'")
    settings = load_config(config, overrides or [])
    return BenchSetup.of(settings, ranks=ranks, largest_batch=largest, weights=weights, folder=folder)


def _run(command: str, options: dict[str, Any], engines: str, folder: Path | None, setting: Any) -> Results:
    from moebius.rollout.bench import daemon
    from moebius.rollout.bench.engines import Engines, need_cuda

    if folder is not None:
        if setting[0] is not None or setting[1]:
            raise BadInput("--config and --set belong to `bench up`: leave them out with --dir")
        return daemon.submit(folder, command, json.loads(json.dumps(options)), _line(), typer.echo)
    out: Path = setting[-1]
    setup = _setup(*setting)
    if command == "graphs":
        need_cuda(setup, command, "there are no CUDA graphs on CPU")  # before engines are started
    with Engines(setup, _names(engines), out / "logs", typer.echo) as running:
        return daemon.execute(running, command, options, _line())


def _line() -> str:
    return shlex.join(["moebius", *sys.argv[1:]])


def _finish(results: Results, out: Path) -> None:
    console = Console()
    results.show(console)
    console.print(f"results: {results.write(out)}", soft_wrap=True, highlight=False)
