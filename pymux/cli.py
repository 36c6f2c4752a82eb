"""The ``pymux`` command."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import sys
from pathlib import Path
from typing import Any

import click

from pymux import config
from pymux.errors import BrokerLost, ProtocolError, PymuxError

_SERVES = "serves\n"


class _Group(click.Group):
    """Shows pymux's own errors as one line."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except PymuxError as e:
            raise click.ClickException(f"{type(e).__name__}: {e}") from e
        except OSError as e:
            raise click.ClickException(f"{config.clip(str(e.filename or ''), 100)}: {e.strerror or e}") from e


class _Seconds(click.ParamType):  # type: ignore[type-arg]  # generic from click 8.2 on
    """A length of time: a number that is neither negative nor without end."""

    name = "seconds"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Return the number."""
        try:
            seconds = float(value)
        except (TypeError, ValueError):
            seconds = -1.0
        if not 0 <= seconds < float("inf"):
            self.fail(f"{config.clip(value)}: give seconds, such as 2.5.", param, ctx)
        return seconds


_SECONDS = _Seconds()


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="pymux-cuda", prog_name="pymux")
def main() -> None:
    """Share a GPU between reinforcement-learning jobs."""


@main.command(context_settings={"ignore_unknown_options": True})
@click.option("--job", envvar="PYMUX_JOB", help="Name of the job; default $PYMUX_JOB, or the script's name.")
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
def run(*, job: str | None, command: tuple[str, ...]) -> None:
    """Run a program with its cudaMalloc served from a region: pymux run [--job NAME] -- python train.py.

    The memory moves out and back at unchanged addresses, without a change to the program. Who gives the device
    away when is for the phases to say: an integration's, or the program's own.
    """
    from pymux.run import prepare

    path, environ = prepare(command, job, os.environ)
    try:
        os.execve(path, list(command), environ)  # noqa: S606 - as it was asked for
    except OSError as e:
        raise click.ClickException(f"{path}: {e.strerror}") from e


@main.command()
@click.argument("pid", type=int)
@click.option("--job", envvar="PYMUX_JOB", help="Name of the job; default $PYMUX_JOB, or pid-PID.")
@click.option("--device", default=0, show_default=True, help="Ordinal of the device that it uses.")
@click.option(
    "--device-memory", default="0", help="The most that it will use there, such as 20G; default what it does."
)
@click.option(
    "--slice", "seconds", type=_SECONDS, default=10.0, show_default=True, help="Seconds of a turn while others wait."
)
def opaque(*, pid: int, job: str | None, device: int, device_memory: str, seconds: float) -> None:
    """Share the device with a process that uses it without pymux, as a whole, until it ends."""
    from pymux.guest import opaque as take_over

    with take_over(pid, job=job or f"pid-{pid}", device=device, device_memory=device_memory) as guest:
        click.echo(f"process {pid} has {guest.nbytes / 2**20:.0f} MiB on the device, and takes turns of {seconds:g} s")
        guest.share(seconds)


@main.command()
@click.option(
    "--linger",
    type=_SECONDS,
    default=30.0,
    show_default=True,
    help="Seconds without clients before it ends; 0: never.",
)
@click.option("--host-budget", default=None, help="Host memory for swapped-out pages, such as 64G; default 80 %.")
@click.option(
    "--spill-dir",
    type=click.Path(path_type=Path),
    default=None,
    help="Directory on a fast disk for what the host budget has no room for.",
)
@click.option(
    "--config",
    "config_path",
    type=click.Path(dir_okay=False, path_type=Path),
    default=None,
    help="TOML file with the policy and what jobs may have; default $PYMUX_BROKER_CONFIG.",
)
@click.option("--policy", default=None, help="fifo, fair, priority or srpt.")
@click.option("--max-wait", type=_SECONDS, default=None, help="Seconds of waiting after which nobody is overtaken.")
@click.option("--job", "jobs", multiple=True, help="NAME:weight=2,priority=-1,device=20G,host=64G; may be repeated.")
@click.option(
    "--unresponsive-after", type=_SECONDS, default=None, help="Seconds of silence until others get the lease."
)
@click.option("--kill-unresponsive", is_flag=True, help="Also kill a process that is silent for so long.")
@click.option("--allow-group", "groups", multiple=True, help="Unix group whose members may connect, too.")
@click.option("--background", is_flag=True, help="Return at once and serve in the background, logging to a file.")
@click.option("--driver", default=None, help="Path of the driver library whose NVML to ask.")
@click.option("--stop", is_flag=True, help="Stop the broker that runs.")
@click.option("-v", "--verbose", is_flag=True, help="Log who comes and goes.")
def broker(
    *,
    linger: float,
    host_budget: str | None,
    spill_dir: Path | None,
    config_path: Path | None,
    policy: str | None,
    max_wait: float | None,
    jobs: tuple[str, ...],
    unresponsive_after: float | None,
    kill_unresponsive: bool,
    groups: tuple[str, ...],
    background: bool,
    driver: str | None,
    stop: bool,
    verbose: bool,
) -> None:
    """Run this node's broker. Jobs start one by themselves when none runs."""
    from dataclasses import replace

    from pymux import _core, rules
    from pymux.broker import AlreadyRunning, serve

    settings = config.load()
    if stop:
        pid = _request_status(settings.socket)["pid"]
        os.kill(pid, signal.SIGTERM)
        click.echo(f"told broker {pid} to stop")
        return
    path = config_path or settings.broker_config
    said = {
        "policy": policy,
        "max_wait": max_wait,
        "unresponsive_after": unresponsive_after,
        "kill_unresponsive": kill_unresponsive or None,
        "allow_groups": groups or None,
    }
    decided = rules.load(path) if path else rules.Rules()
    decided = replace(decided, **{k: v for k, v in said.items() if v is not None})  # type: ignore[arg-type]
    decided = rules.with_jobs(decided, jobs)
    started = _to_background() if background else None
    handler: logging.Handler = logging.StreamHandler()
    if background:
        with contextlib.suppress(OSError):  # then serving fails, and says why
            settings.runtime_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
            handler = logging.FileHandler(settings.runtime_dir / "broker.log")
    handler.setFormatter(logging.Formatter("%(asctime)s %(name)s %(levelname)s %(message)s"))
    logging.getLogger("pymux").addHandler(handler)
    logging.getLogger("pymux").setLevel(logging.INFO if verbose or background else logging.WARNING)
    try:
        serve(
            settings.runtime_dir,
            driver or _core.load_driver(settings.driver),
            capacity=settings.capacity,
            host_budget=config.parse_size(host_budget) if host_budget else settings.host_budget,
            spill_dir=spill_dir or settings.spill_dir,
            rules=decided,
            linger=linger or None,
            serving=lambda: _tell(started, ""),
        )
    except AlreadyRunning:
        if not background:
            raise
        _tell(started, "")
    except Exception as e:
        if background or not isinstance(e, PymuxError):
            logging.getLogger("pymux.broker").exception("the broker ends")
        _tell(started, f"{type(e).__name__}: {e}")
        raise


def _to_background() -> int:
    """Go on in a child; this process ends when the child has told how its start went, and with what it said.

    Returns:
        In the child: the descriptor to tell that through.
    """
    hears, tells = os.pipe2(os.O_CLOEXEC)
    if os.fork():
        os.close(tells)
        with os.fdopen(hears, encoding="utf-8", errors="replace") as pipe:
            said = pipe.read()
        if said != _SERVES:
            click.echo(f"Error: {said.strip() or 'the broker ended while it started; its log says why'}", err=True)
        sys.stderr.flush()
        os._exit(said != _SERVES)
    os.close(hears)
    silent = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):  # whoever waits for the starter's output waits for no more
        os.dup2(silent, fd)
    os.close(silent)
    return tells


def _tell(started: int | None, error: str) -> None:
    """Tell the starter of a broker in the background, once, that it serves, or why it does not."""
    if started is not None:
        with contextlib.suppress(OSError):
            os.write(started, (error or _SERVES).encode())
            os.close(started)


@main.command()
@click.option("--json", "as_json", is_flag=True, help="Print plain data.")
def status(*, as_json: bool) -> None:
    """Show devices, leases, the queue, and memory by process and region; docs/status.md says what --json has."""
    import json

    data = _request_status(config.load().socket)
    if as_json:
        click.echo(json.dumps(data, indent=2))
        return
    from rich.console import Console

    from pymux.status_view import show

    show(data, Console())


@main.command()
@click.option("--json", "as_json", is_flag=True, help="Print plain data.")
def doctor(*, as_json: bool) -> None:
    """Check driver, devices and host, and say how to mend what is wrong."""
    import json

    from pymux.doctor import examine

    findings = examine()
    if as_json:
        click.echo(json.dumps([f.as_dict() for f in findings], indent=2))
    else:
        for f in findings:
            click.echo(f"{'ok  ' if f.ok else 'BAD '} {f.what}: {f.found}")
            if f.remedy:
                click.echo(f"      {f.remedy}")
    if not all(f.ok for f in findings):
        sys.exit(1)


@main.command()
@click.option(
    "--mode",
    type=click.Choice(["sync", "async"]),
    default="sync",
    show_default=True,
    help="async: each job is a sampler and a trainer process.",
)
@click.option("--staleness", type=click.IntRange(0), default=1, show_default=True, help="Steps, with --mode async.")
@click.option("--jobs", type=click.IntRange(1, 8), default=3, show_default=True, help="How many jobs share the device.")
@click.option("--steps", type=click.IntRange(1), default=None, help="Training steps of each job.")
@click.option("--capacity", default=None, help="Memory of the simulated device, such as 416M.")
@click.option("--device", type=int, default=0, show_default=True, help="Ordinal of the device.")
@click.option(
    "--json",
    "json_path",
    type=click.Path(dir_okay=False, path_type=Path),
    default=None,
    help="Also write report.json here.",
)
@click.option(
    "--output",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path("pymux-demo"),
    show_default=True,
)
def demo(
    *,
    mode: str,
    staleness: int,
    jobs: int,
    steps: int | None,
    capacity: str | None,
    device: int,
    json_path: Path | None,
    output: Path,
) -> None:
    """Run real GRPO jobs one after the other, with snapshots, and with pymux; compare."""
    try:
        from pymux.demo.run import run
    except ImportError as e:
        raise click.ClickException(
            f"the demo needs torch and matplotlib: pip install 'pymux-cuda[torch,plot]' ({e})"
        ) from e
    ok = run(
        mode=mode,
        staleness=staleness,
        jobs=jobs,
        steps=steps,
        capacity=capacity,
        device=device,
        json_path=json_path,
        output=output,
    )
    if not ok:
        sys.exit(1)


def _request_status(path: Path) -> dict[str, Any]:
    """Ask the broker how things are.

    Raises:
        BrokerLost: none answers.
    """
    import json

    from pymux import wire

    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
        sock.settimeout(5)
        try:
            sock.connect(str(path))
            sock.send(wire.encode("hello", version=wire.VERSION, pid=os.getpid(), flags=wire.OBSERVER))
            name, m = wire.decode(sock.recv(wire.MAX_MESSAGE))
            if name != "welcome":
                raise ProtocolError(m.get("text", f"the broker answered with {name}"))
            sock.send(wire.encode("status"))
            data: dict[str, Any] = json.loads(wire.decode_status_reply(sock.recv(wire.MAX_MESSAGE)))
        except OSError as e:
            raise BrokerLost(f"no broker answers at {path} ({e}). It starts with the first job's connect().") from e
    return data


if __name__ == "__main__":
    main()
