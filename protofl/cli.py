"""The command line: reads what was asked for and hands it on; holds no logic of its own."""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, Optional

import typer
from rich.console import Console

from . import __version__
from .errors import UserError, failure, nearest
from .sweeps import SWEEPS, Sweep

app = typer.Typer(
    name="protofl", no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="rich",
    help="Compare prototype-based federated learning methods: one runtime, one split, one initial model, fixed seeds.",
    epilog="Exit codes: 0 all runs finished; 1 a run failed or diverged; 2 bad input; 130 and 143 interrupted.",
)  # fmt: skip
datasets_app = typer.Typer(help="Data sets: which are known, where they are looked for, whether they are found.",
                           invoke_without_command=True)  # fmt: skip
app.add_typer(datasets_app, name="datasets")
suite_app = typer.Typer(help="Suites: the papers' tables and figures, each as one command.", no_args_is_help=True)
app.add_typer(suite_app, name="suite")
flower_app = typer.Typer(help="Flower: a method in a real federation, SuperLink and SuperNodes.", no_args_is_help=True)
app.add_typer(flower_app, name="flower")
out = Console(width=None if sys.stdout.isatty() or "COLUMNS" in os.environ else 120)

SHARED = "default: as the preset says"
Text = Optional[str]  # noqa: UP045 - typer reads it


def option(default: Any, names: str, help: str) -> Any:
    """An option of a command."""
    return typer.Option(default, *names.split(), help=help, show_default=default is not None)


DataDir = Annotated[
    Text, typer.Option("--data-dir", help="Where data sets lie (default: $PROTOFL_DATA, ./data, cache).")
]
Results = Annotated[Path, typer.Option("--results", help="Where runs are stored.")]


def _version(show: bool) -> None:
    if show:
        typer.echo(f"protofl {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of bad input too.")] = False,
) -> None:
    if debug:
        os.environ["PROTOFL_DEBUG"] = "1"


@app.command()
def bench(
    methods: Annotated[
        Text, typer.Option(help="Names (see `protofl methods`), all, METHOD+PLUGIN, files ./NAME.py, with commas; "
                                "default: the six methods.")
    ] = None,
    dataset: Annotated[
        Text, typer.Option(help="A name (see `protofl datasets`), a folder with train/ and test/, or a .npz; default: digits.")
    ] = None,
    data_dir: DataDir = None,
    beta: Annotated[Text, typer.Option(help="Dirichlet concentration, one or a list; smaller: more skewed; " + SHARED)] = None,
    partition: Annotated[
        Text, typer.Option(help="dir_class (also dirichlet) | dir_class_fednh | dir_client | iid | file; " + SHARED)
    ] = None,
    partition_seed: Annotated[
        Text, typer.Option(help="Seed of the split, or 'run': a split per run seed; default: 0, one split for the table.")
    ] = None,
    partition_file: Annotated[Text, typer.Option(help="A split saved by `protofl partition --save`.")] = None,
    clients: Annotated[Text, typer.Option(help="Number of clients; " + SHARED)] = None,
    participation: Annotated[Text, typer.Option(help="Share of the clients drawn per round, in (0, 1]; " + SHARED)] = None,
    rounds: Annotated[Text, typer.Option(help="Communication rounds; " + SHARED)] = None,
    local_epochs: Annotated[Text, typer.Option(help="Epochs of local training per round; " + SHARED)] = None,
    batch_size: Annotated[Text, typer.Option(help="Samples per step; " + SHARED)] = None,
    lr: Annotated[Text, typer.Option(help="The clients' learning rate; " + SHARED)] = None,
    net: Annotated[Text, typer.Option(help="Network; " + SHARED)] = None,
    seeds: Annotated[Text, typer.Option(help="Run seeds, a list; default: 0,1,2.")] = None,
    preset: Annotated[
        Text, typer.Option(help="A paper's setting, such as moon.cifar10 or fednh.cifar10; default: the data set chooses. "
                                "Explicit options win.")
    ] = None,
    set_: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Option("--set", help="key=value for any protocol field, or method.option=value; repeatable.")
    ] = None,
    suite: Annotated[
        Text, typer.Option(help="A suite: a name (see `protofl suite list`) or a TOML file; options given here win over it.")
    ] = None,
    scale: Annotated[Text, typer.Option(help="Of the suite: paper, laptop or smoke; default: laptop.")] = None,
    eval_every: Annotated[Text, typer.Option(help="Rounds between evaluations (the last is always one); default: 1.")] = None,
    device: Annotated[Text, typer.Option(help="cpu, cuda or cuda:N; default: cpu.")] = None,
    workers: Annotated[
        str, typer.Option(help="Processes, one thread each, over runs, then over the clients of a round; auto: one a core.")
    ] = "auto",
    engine: Annotated[
        Text, typer.Option(help="loop, batched, graphs (the loop, its step recorded; on a GPU) or auto: how clients are "
                                "computed; ray: the runs on a cluster of Ray (pip install 'protofl\\[ray]'); default: auto.")
    ] = None,
    address: Annotated[
        Text, typer.Option(help="Of Ray: auto or IP:PORT of a cluster that this machine is a node of; default: "
                                "$RAY_ADDRESS, or this machine alone.")
    ] = None,
    gpus_per_run: Annotated[Text, typer.Option(help="With Ray and cuda: a run's share of a GPU; default: 1.")] = None,
    results: Results = Path("results"),
    report: Annotated[bool, typer.Option("--report/--no-report", help="Write a report at the end.")] = True,
    reports: Annotated[Path, typer.Option(help="Where reports are written.")] = Path("reports"),
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show the cells, their digests and the time; run nothing.")] = False,
) -> None:  # fmt: skip
    """Run every (method, beta, seed) of a table; print it, store every run, write a report.

    Re-running a command reuses finished runs and resumes begun ones.
    """
    _table(locals())


def options_of(
    other: Callable[..., None], only: Sequence[str] | None = None
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """The decorated command has the options of another, or some of them, behind its own."""

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        own = [p for p in inspect.signature(command, eval_str=True).parameters.values() if p.kind != p.VAR_KEYWORD]
        others = inspect.signature(other, eval_str=True).parameters
        parameters = [*own, *(p for name, p in others.items() if only is None or name in only)]
        command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        command.__annotations__ = {p.name: p.annotation for p in parameters}
        return command

    return decorate


SWEEP_HELP = """Run a table at every point of a grid; show what accuracy does over what was varied.

The grid: a named sweep, any --over, or both; \\[over] in a suite file says the same. """ + "\n\n".join(
    ["Sweeps by name:", *(f"[bold]{name}[/bold]: {one.what}; {one.shown}" for name, one in SWEEPS.items())]
)


@app.command(help=SWEEP_HELP)
@options_of(bench)
def sweep(
    name: Annotated[Text, typer.Argument(help="A sweep by name, see above.", show_default=False)] = None,
    over: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Option("--over", help="key=a,b or method.option=a,b: values to vary, in place of the named sweep's or beside "
                                    "them; repeatable, every combination is run.")
    ] = None,
    **given: Any,
) -> None:  # fmt: skip
    """Run a table at every point of a grid."""
    if name is None and not over and given["suite"] is None:
        raise UserError(f"sweep what? a name ({', '.join(SWEEPS)}), --over key=a,b, or a --suite with a table [over]")
    if name is not None and name not in SWEEPS:
        raise UserError(f"there is no sweep {name!r}{nearest(name, SWEEPS)}; there are {', '.join(SWEEPS)}")
    _table(given, SWEEPS[name] if name else None, over or [])


APART = ("set_", "suite", "scale", "workers", "address", "gpus_per_run", "results", "report", "reports", "dry_run")
"""Options of `bench` that are no settings of a run."""


def _table(given: dict[str, Any], named: Sweep | None = None, over: Sequence[str] = ()) -> None:
    """What `bench`, `sweep` and `suite run` do with their options."""
    from . import inputs, suites
    from .experiment import Settings, cells

    apart = _apart(given)
    read = suites.read(apart["suite"], apart["scale"]) if apart["suite"] is not None else None
    if apart["scale"] is not None and read is None:
        raise UserError("--scale is a scale of a suite: give --suite as well")
    if read is not None and read.ablate:
        if given["methods"] is not None:
            raise UserError(f"--methods: this suite is an ablation of {read.ablate} alone; see `protofl ablate METHOD`")
        return _ablation(read.parts[0], given, apart, read.choices, read.pairs, read)
    parts = read.parts if read is not None else (Settings(),)
    asked = []
    for settings in parts:
        if named is not None and named.methods:
            settings.take("methods", named.methods, "sweep")
        _take(settings, dict(given), apart["set_"])
        settings.take_grid(over, named.over if named else {})
        asked += cells(settings)
    inputs.check(asked)
    count = _workers(apart["workers"])
    _warm(asked, 1 if apart["place"] else count, apart["dry_run"])

    from . import bench as tables  # from here on torch is needed, which takes seconds to import

    planned = tables.plan(asked, apart["results"], here=apart["place"] is None)
    for line in read.notes if read is not None else ():
        out.print(line, highlight=False, markup=False)
    out.print(tables.setting(planned), highlight=False, markup=False)
    if apart["dry_run"]:
        out.print(tables.priced(planned, min(count, len(planned))))
        return None
    _places(apart)
    outcome = tables.bench(planned, apart["results"], count, out, apart["place"])
    if read is not None:
        outcome.named(read.name, read.scale, read.title, read.notes)
    raise typer.Exit(_finish(outcome, apart))


def _places(apart: dict[str, Any]) -> None:
    """Refuse folders that cannot be written."""
    from .bench import writable

    writable("results", apart["results"])
    if apart["report"]:
        writable("reports", apart["reports"])


def _apart(given: dict[str, Any]) -> dict[str, Any]:
    """What is no setting of a run is taken out of the options; place: the cluster, if one is asked for."""
    from .engine import place

    apart = {key: given.pop(key) for key in APART}
    most = None if apart["workers"] == "auto" else _workers(apart["workers"])
    apart["place"] = place.asked(given["engine"], apart["address"], apart["gpus_per_run"], most)
    if apart["place"] is not None:
        given["engine"] = None  # where runs are computed, and not how
    return apart


def _warm(asked: Sequence[Any], count: int, dry_run: bool) -> None:
    """Let the processes that will do the work begin to import."""
    if count > 1 and not dry_run:
        from .engine.workers import warm

        warm(["protofl.bench", *{f"protofl.methods.{c.method.name}" for c in asked if c.method.name.isidentifier()}])


def _ablation(
    settings: Any, given: dict[str, Any], apart: dict[str, Any], choices: Sequence[str], pairs: Sequence[Any], read: Any = None
) -> None:  # fmt: skip
    """What `ablate` and suites that are ablations do with their options."""
    from . import inputs, registry
    from .experiment import cells

    if settings.seeds is None and given["seeds"] is None:
        settings.seeds = list(range(5))
    _take(settings, given, apart["set_"])
    asked = cells(settings)
    inputs.check(asked)
    count = _workers(apart["workers"])
    _warm(asked, count, apart["dry_run"])

    from . import ablation
    from . import bench as tables

    method = registry.label(settings.methods[0])
    studied = ablation.study(settings, choices, pairs)
    for line in read.notes if read is not None else ():
        out.print(line, highlight=False, markup=False)
    if not apart["dry_run"]:
        _places(apart)
        ablation.prove_all(studied, count, out)
    wanted = [cell for one in studied if not one.idle for cell in (*one.base, *one.cells)]
    planned = tables.plan([*asked, *wanted], apart["results"])
    out.print(ablation.extent(studied), highlight=False, markup=False)
    if apart["dry_run"]:
        out.print(tables.priced(planned, min(count, len(planned))))
        return
    outcome = tables.bench(planned, apart["results"], count, out, apart["place"])
    outcome.ablation = ablation.document(studied, method)
    title = f"Open choices of {method}: {outcome.title}" if read is None else read.title
    outcome.named(
        read.name if read else f"ablate-{method}", read.scale if read else None, title, read.notes if read else ()
    )
    raise typer.Exit(_finish(outcome, apart))


def _take(settings: Any, given: dict[str, str | None], assignments: list[str] | None) -> None:
    """The options that were given, then those of --set. A stored split is used where no other scheme is named."""
    if given["partition_file"] is not None and given["partition"] is None:
        given["partition"] = "file"
    for name, value in given.items():
        if value is not None:
            settings.take(name, value, "--" + name.replace("_", "-"))
    for assignment in assignments or []:
        settings.take_text(assignment)


def _workers(text: str) -> int:
    from .engine.workers import cores

    if text == "auto":
        return cores()
    if not (text.isascii() and text.isdigit() and int(text) > 0):
        raise UserError(f"--workers {text!r}: a whole number >= 1, or auto")
    return int(text)


def _finish(outcome: Any, apart: dict[str, Any]) -> int:
    """The table, the report, where they are, and what went wrong."""
    from . import records
    from .report import ablation, asked, report, tables

    results = apart["results"]
    if outcome.summaries:
        folders = [p.folder for p in outcome.planned if p.folder.is_dir()]
        path = records.write_table(results, outcome.name, title=outcome.title, command=_command(), notes=outcome.notes,
                                   runs=folders, ablation=outcome.ablation)  # fmt: skip
        told = asked.find([path])
        out.print(ablation.terminal(told.runs, told.ablation) if told.ablation else tables.terminal(told.runs))
        for odd in tables.odd(told.runs) if told.ablation is None else ():
            out.print(f"look twice: {odd}", highlight=False, markup=False)
        if apart["report"]:
            page = report(told.runs, apart["reports"] / outcome.name, title=told.title, command=told.command,
                          notes=told.notes, ablation=told.ablation)  # fmt: skip
            out.print(f"report: {page}", highlight=False, soft_wrap=True)
        out.print(f"runs:   {results}, listed in {path}", highlight=False, soft_wrap=True)
    for planned in outcome.planned:
        summary = outcome.summaries.get(planned.ready.digest, {})
        if summary.get("status") == "diverged":
            typer.echo(f"{planned.label} diverged: {summary['error']}", err=True)
    for digest, (line, trace) in outcome.failures.items():
        label = next(p.label for p in outcome.planned if p.ready.digest == digest)
        if trace:
            typer.echo(trace, err=True)
        typer.echo(f"{label} failed: {line}", err=True)
    return int(outcome.code)


def _command() -> str:
    import shlex

    return shlex.join(["protofl", *sys.argv[1:]])


@app.command()
@options_of(bench)
def ablate(
    method: Annotated[str, typer.Argument(help="A method (see `protofl methods`), METHOD+PLUGIN, or a file ./NAME.py.")],
    choices: Annotated[
        Text, typer.Option(help="Open choices, `a` or one reading `a=reading`, with commas (see `protofl methods NAME`); "
                          "default: all of them.")
    ] = None,
    pairs: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Option(help="Two choices, with a comma, that are tried in full; repeatable.")
    ] = None,
    **given: Any,
) -> None:  # fmt: skip
    """Try every reading of a method's open choices, one at a time, against the method as it is set.

    Readings that the method's file claims to change nothing are proved equal instead of run. Default seeds: 0 to 4.
    """
    from . import registry
    from .experiment import Settings

    if given["methods"] is not None:
        raise UserError("--methods: an ablation is of the one method that is named first")
    apart = _apart(given)
    if apart["suite"] is not None or apart["scale"] is not None:
        raise UserError("--suite: `protofl suite run NAME` runs an ablation that is a suite")
    wanted = [c.strip() for c in (choices or "").split(",") if c.strip()]
    crossed = [tuple(c.strip() for c in pair.split(",")) for pair in pairs or []]
    if any(len(pair) != 2 or not all(pair) for pair in crossed):
        raise UserError("--pairs takes two choices, such as --pairs z_normalize,client_lr")
    registry.check_choices(registry.known(method), [*wanted, *(c for pair in crossed for c in pair)])
    _ablation(Settings(methods=[method]), given, apart, wanted, crossed)


@suite_app.command("list")
def suite_list() -> None:
    """List the suites: what each is about, and its command."""
    from . import describe

    out.print(describe.all_suites())


@suite_app.command("run")
@options_of(bench)
def suite_run(
    name: Annotated[str, typer.Argument(help="A suite (see `protofl suite list`), or a file ./NAME.toml.")],
    **given: Any,
) -> None:
    """Run a suite, or what is left of it: as `protofl bench --suite NAME`, whose options it has."""
    if given["suite"] is not None:
        raise UserError("--suite: the suite is the one that is named first")
    _table({**given, "suite": name})


@app.command()
def methods(name: Annotated[Text, typer.Argument(help="A method; default: list them all.")] = None) -> None:
    """List the methods, or show one: idea, citation, every option with its readings, default, reason and source."""
    from . import describe

    out.print(describe.one(name) if name else describe.all_methods())


@app.command()
def verify(
    methods: Annotated[list[str], typer.Argument(help="Names, METHOD+PLUGIN, or files ./NAME.py.")],
    set_: Annotated[Optional[list[str]], typer.Option("--set", help="method.option=value; repeatable.")] = None,  # noqa: UP045
) -> None:
    """Check that methods keep their contract, on small made-up federations: seconds, no data (exit code 1 if not)."""
    from . import registry

    for name in methods:
        registry.known(name)
    from . import verify as contract  # from here on torch is needed

    raise typer.Exit(contract.report(methods, set_ or [], out))


@datasets_app.callback()
def datasets(context: typer.Context, data_dir: DataDir = None) -> None:
    """List the data sets, where they are looked for, and whether they are found."""
    if context.invoked_subcommand is None:
        from . import describe

        out.print(describe.all_datasets(Path(data_dir) if data_dir else None))


@datasets_app.command()
def fetch(
    name: Annotated[str, typer.Argument(help="A data set that can be downloaded.")], data_dir: DataDir = None
) -> None:
    """Download a data set (through torchvision, or the official archive)."""
    from .data import fetch as download

    out.print(f"{name}: {download(name, Path(data_dir) if data_dir else None)}", highlight=False, soft_wrap=True)


@app.command("partition")
def partition_(
    dataset: Annotated[str, typer.Option(help="A data set (see `protofl datasets`), a folder or a .npz.")] = "digits",
    data_dir: DataDir = None,
    scheme: Annotated[Text, typer.Option("--partition", help="dir_class | dir_class_fednh | dir_client | iid | file.")] = None,
    beta: Annotated[Text, typer.Option(help="Dirichlet concentration; smaller: more skewed.")] = None,
    clients: Annotated[Text, typer.Option(help="Number of clients.")] = None,
    partition_seed: Annotated[Text, typer.Option(help="Seed of the split.")] = None,
    partition_file: Annotated[Text, typer.Option(help="Show a saved split.")] = None,
    preset: Annotated[Text, typer.Option(help="Take the split of a preset; default: the data set chooses.")] = None,
    set_: Annotated[Optional[list[str]], typer.Option("--set", help="key=value for any protocol field.")] = None,  # noqa: UP045
    figure: Annotated[Text, typer.Option(help="Draw the heat map into this PNG.")] = None,
    save: Annotated[Text, typer.Option(help="Save the split (.npz or .json) for --partition-file.")] = None,
) -> None:  # fmt: skip
    """Show a split: client by class counts, skew, fingerprint; draw or save it."""
    from .experiment import Settings, cells

    settings = Settings(methods=["fedavg"], seeds=[0])
    given = dict(dataset=dataset, data_dir=data_dir, partition=scheme, beta=beta, clients=clients,
                 partition_seed=partition_seed, partition_file=partition_file, preset=preset)  # fmt: skip
    _take(settings, given, set_)
    from . import describe

    asked = cells(settings)
    if len(asked) > 1 and (figure or save):
        raise UserError("--figure and --save take one split: give one --beta")
    for cell in asked:
        describe.split(cell, out, figure, save)


@app.command("report")
def report_(
    folders: Annotated[
        list[Path] | None,
        typer.Argument(help="Results folders or runs, one table (results/tables/NAME.json), or one archive; default: results.")
    ] = None,
    to: Annotated[Path, typer.Option("--out", help="Where the report is written.")] = Path("reports/report"),
    baseline: Annotated[Text, typer.Option(help="Method that others are compared with; default: fedavg, else the first.")] = None,
    target: Annotated[Text, typer.Option(help="Accuracy (GM, %) whose cost is told; default: the baseline's.")] = None,
    gradcam: Annotated[
        Text, typer.Option(help="Test images, as positions with commas, on which Grad-CAM shows where the models look.")
    ] = None,
    formats: Annotated[str, typer.Option(help="What figures are written as, besides PNG: svg, pdf, or none.")] = "svg,pdf",
    archive: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(help="Pack the table and its runs, without weights, into NAME.tar.xz: enough for the report.")
    ] = None,
    data_dir: DataDir = None,
) -> None:  # fmt: skip
    """Write a report (HTML, Markdown; figures and tables as files) over stored runs."""
    from .report import ablation, asked, figures, report, tables

    also = [] if formats == "none" else [name.strip() for name in formats.split(",")]
    if unknown := [name for name in also if name not in figures.VECTOR]:
        raise UserError(f"--formats: no {unknown[0]!r}; svg, pdf, both with a comma, or none")

    told = asked.find(folders or [Path("results")])
    stored = told.runs
    goal = _percent(target)
    methods = {run.method for run in stored} | {run.name for run in stored}
    if baseline is not None and baseline not in methods:
        raise UserError(
            f"--baseline {baseline!r}: there is no run of it; there are {', '.join(sorted(filter(None, methods)))}"
        )
    if archive is not None:
        asked.pack(told, archive)
    if gradcam is not None:
        _look(stored, gradcam, data_dir)
    page = report(stored, to, title=told.title, command=told.command or _command(), baseline=baseline, target=goal,
                  formats=also, notes=told.notes, ablation=told.ablation)  # fmt: skip
    out.print(ablation.terminal(stored, told.ablation) if told.ablation else tables.terminal(stored))
    out.print(f"report: {page}", highlight=False, soft_wrap=True)


def _percent(text: str | None) -> float | None:
    try:
        share = None if text is None else float(text) / 100
    except ValueError:
        share = -1.0
    if share is not None and not 0 < share <= 1:
        raise UserError(f"--target {text!r}: a percentage above 0, at most 100")
    return share


def _look(stored: Any, images: str, data_dir: str | None) -> None:
    """Make Grad-CAM for the finished runs; say of each method why there is none."""
    parts = [part.strip() for part in images.split(",")]
    if not all(part.isascii() and part.isdigit() for part in parts):
        raise UserError(f"--gradcam {images!r}: positions of test images, such as 0,17")
    from . import gradcam

    finished = [run for run in stored if run.status == "finished"]
    told = {run.name: gradcam.store(run.path, list(map(int, parts)), data_dir) for run in finished}
    for name, reason in told.items():
        if reason:
            typer.echo(f"no Grad-CAM for {name}: {reason}", err=True)


@app.command("eval")
def eval_(run: Annotated[Path, typer.Argument(help="The folder of a run.")], data_dir: DataDir = None) -> None:
    """Evaluate a stored run again: the same numbers to the last digit (exit code 1 if not)."""
    from . import describe
    from .run import replay

    told = replay(run, data_dir)
    out.print(describe.replayed(told))
    raise typer.Exit(0 if told["stored"] == told["again"] else 1)


EXPORTED = ("dataset", "data_dir", "beta", "partition", "partition_file", "clients", "participation", "rounds", "local_epochs",
            "batch_size", "lr", "net", "preset", "set_", "device")  # fmt: skip
"""Options of `bench` that an app has too."""


@flower_app.command("export")
@options_of(bench, EXPORTED)
def flower_export(
    method: Annotated[str, typer.Argument(help="A method (see `protofl methods`), METHOD+PLUGIN, or a file ./NAME.py.")],
    to: Annotated[Path, typer.Option("--out", help="The folder of the app; it must be new or empty.", show_default=False)],
    seed: Annotated[str, typer.Option(help="Run seed.")] = "0",
    **given: Any,
) -> None:  # fmt: skip
    """Write a Flower app that runs this method from this package, with your own data loader.

    Until the loader is yours, the app trains on the split that the options name, one SuperNode for each client.
    """
    from . import flower, inputs
    from .experiment import Settings, cells

    flower.need()
    assignments = given.pop("set_")
    settings = Settings(methods=[method])
    _take(settings, {**given, "seeds": seed}, assignments)
    asked = cells(settings)
    if len(asked) > 1:
        raise UserError("an app is one method in one setting: give one --beta and one --seed")
    inputs.check(asked)
    from .flower.export import export  # from here on torch is needed

    export(asked[0], to)
    out.print(f"app: {to}; {to / 'README.md'} says how to start it", highlight=False, soft_wrap=True)


OURS = """This is a fault of protofl or of a method file, not of what you asked for. Please report the lines above with
the command ({command}), protofl {version} and Python {python}; what was computed until here is kept."""


def main() -> None:
    """The script `protofl`."""
    try:
        app()
    except UserError as e:
        if os.environ.get("PROTOFL_DEBUG") == "1":
            raise
        typer.echo(f"Error: {e}", err=True)
        sys.exit(2)
    except Exception as e:
        line, trace = failure(e)
        if not trace:
            typer.echo(f"Error: {line}", err=True)
            sys.exit(1)
        typer.echo(trace, err=True)
        typer.echo(OURS.format(command=_command(), version=__version__, python=sys.version.split()[0]), err=True)
        sys.exit(1)
    except KeyboardInterrupt:
        typer.echo("interrupted: finished rounds are stored, the same command resumes", err=True)
        sys.exit(130)
