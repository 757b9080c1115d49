"""Starts a prepared stack, keeps it running, stops it: one task per process, state in ``status.json``."""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import aiohttp

from kvpilot.config import Config
from kvpilot.stack import StackError, plan, shm
from kvpilot.stack.engine_env import engine_environment
from kvpilot.stack.plan import ProcessSpec
from kvpilot.stack.prepare import Prepared
from kvpilot.stack.report import Reporter, last_words
from kvpilot.stack.state import ProcessStatus, Status, kill_groups, start_time, write_status

_STEADY_S = 30.0
"""A process that lived this long failed for a new reason: its pauses between restarts begin anew."""
_LONGEST_PAUSE_S = 30.0
_GRACE_S = {"own": 5.0, "engines": 10.0}
_PR_SET_PDEATHSIG = 1


def restart_pause(failures: int, *, at_once: bool) -> float:
    """Seconds before the next start after ``failures`` (≥ 1) deaths in a row: 0 or 1, then doubling."""
    if at_once:
        return 0.0 if failures == 1 else min(_LONGEST_PAUSE_S, 0.25 * 2 ** (failures - 2))
    return min(_LONGEST_PAUSE_S, 2.0 ** (failures - 1))


class Supervisor:
    """Runs one stack. ``run`` returns after ``stop`` was called; it raises StackError if the start fails."""

    def __init__(self, prepared: Prepared, reporter: Reporter) -> None:
        self._specs = prepared.specs
        self._listener = prepared.listener
        self._config = prepared.config
        self._state_dir = prepared.config.state_dir
        self._reporter = reporter
        self._stopping = asyncio.Event()
        self._hurry = False
        self._all_ready = False
        self._ready = {spec.name: asyncio.Event() for spec in self._specs}
        self._processes: dict[str, asyncio.subprocess.Process] = {}
        self._status = Status(
            pid=os.getpid(),
            started=start_time(os.getpid()),
            endpoints=endpoints(self._config),
            processes={spec.name: ProcessStatus(log=str(self._log(spec.name))) for spec in self._specs},
            config=self._config,
        )

    def stop(self) -> None:
        """Begin a clean stop; called again, stop waiting for processes to end by themselves."""
        self._hurry = self._stopping.is_set()
        self._stopping.set()

    async def run(self) -> None:
        self._publish()
        guard = self._start_guard()
        tasks: list[asyncio.Task[None]] = []
        try:
            async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=2)) as http:
                stop = asyncio.create_task(self._stopping.wait())
                tasks = [asyncio.create_task(self._keep(spec, http)) for spec in self._specs]
                tasks.append(asyncio.create_task(self._watch()))
                # Of these only the stop ends by itself; another one that does has failed.
                done, _ = await asyncio.wait([stop, *tasks], return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self._end_all()
            with suppress(BrokenPipeError):
                guard.communicate(b"done")

    # ------------------------------------------------------------------ one process

    async def _keep(self, spec: ProcessSpec, http: aiohttp.ClientSession) -> None:
        for name in spec.after:
            await self._ready[name].wait()
        status = self._status.processes[spec.name]
        failures = 0
        while True:
            begun = time.monotonic()
            process = await self._start(spec)
            exited = asyncio.create_task(process.wait())
            answering = asyncio.create_task(self._until_ready(spec, http))
            try:
                await asyncio.wait([exited, answering], return_when=asyncio.FIRST_COMPLETED)
                if not exited.done():
                    status.state, status.ready_s = "ready", round(time.monotonic() - begun, 3)
                    self._ready[spec.name].set()
                    self._publish()
                code = await exited
            finally:
                answering.cancel()
                exited.cancel()
            self._after_death(spec, code)
            if not self._all_ready:
                log = self._log(spec.name)
                raise StackError(
                    f"{spec.name} stopped during start ({status.last_exit}): {last_words(log)} (log: {log})"
                )
            failures = 1 if time.monotonic() - begun > _STEADY_S else failures + 1
            pause = restart_pause(failures, at_once=spec.own)
            status.state, status.restarts = "restarting", status.restarts + 1
            self._publish()
            when = f"again in {pause:.0f} s" if pause >= 1 else "started again"
            self._reporter.say(f"{spec.name} died ({status.last_exit}), {when}")
            await asyncio.sleep(pause)

    async def _start(self, spec: ProcessSpec) -> asyncio.subprocess.Process:
        with self._log(spec.name).open("ab") as log:
            process = await asyncio.create_subprocess_exec(
                *spec.argv,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**(os.environ if spec.own else engine_environment()), **spec.env},
                pass_fds=spec.pass_fds,
                process_group=0,
                preexec_fn=_die_with_supervisor,
            )
        self._processes[spec.name] = process
        status = self._status.processes[spec.name]
        status.pid, status.started, status.ready_s = process.pid, start_time(process.pid), None
        if status.state != "restarting":
            status.state = "starting"
        self._publish()
        return process

    async def _until_ready(self, spec: ProcessSpec, http: aiohttp.ClientSession) -> None:
        pause = 0.1 if spec.own else 0.25
        while True:
            with suppress(aiohttp.ClientError, TimeoutError, OSError):
                async with http.get(spec.ready_url) as reply:
                    if reply.status == 200 or spec.any_answer:
                        return
            await asyncio.sleep(pause)

    def _after_death(self, spec: ProcessSpec, code: int) -> None:
        """Record how it ended, and end what it leaves: vLLM's children outlive a killed server process."""
        status = self._status.processes[spec.name]
        status.last_exit = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        with suppress(ProcessLookupError):
            os.killpg(status.pid, signal.SIGKILL)
        shm.remove_orphans(self._status.shm)

    # ------------------------------------------------------------------ the whole

    async def _watch(self) -> None:
        """Tell when all is ready, and keep the list of segments that a hard kill would leave."""
        while True:
            self._note_memory()
            if not self._all_ready and all(event.is_set() for event in self._ready.values()):
                self._all_ready = True
                self._status.state = "ready"
                self._publish()
                for line in self._welcome():
                    self._reporter.say(line)
            self._reporter.show(self._status)
            await asyncio.sleep(5 if self._all_ready else 0.5)

    def _note_memory(self) -> None:
        pids = [process.pid for process in self._processes.values() if process.returncode is None]
        noted = {**self._status.shm, **shm.segments_of(pids)}
        present = {name: inode for name, inode in noted.items() if (Path("/dev/shm") / name).exists()}
        if present != self._status.shm:
            self._status.shm = present
            self._publish()

    def _publish(self) -> None:
        write_status(self._state_dir, self._status)
        self._reporter.show(self._status)

    def _start_guard(self) -> subprocess.Popen[bytes]:
        guard = subprocess.Popen(
            [sys.executable, "-m", "kvpilot.stack.guard", str(self._state_dir), str(os.getpid())],
            stdin=subprocess.PIPE,
            start_new_session=True,
        )
        self._status.guard = guard.pid
        self._publish()
        return guard

    async def _end_all(self) -> None:
        self._status.state = "stopping"
        self._publish()
        self._listener.close()
        pids = [process.pid for process in self._processes.values() if process.returncode is None]
        noted = {**self._status.shm, **shm.segments_of(pids)}
        own = [spec.name for spec in self._specs if spec.own]
        engines = [spec.name for spec in self._specs if not spec.own]
        # Gateway and coordinator first: they finish what they hold while the engines still answer.
        for kind, names in (("own", own), ("engines", engines)):
            groups = [self._status.processes[name].pid for name in names if name in self._processes]
            grace = 0.0 if self._hurry or not self._all_ready else _GRACE_S[kind]
            await asyncio.to_thread(kill_groups, groups, grace)
        for process in self._processes.values():
            with suppress(TimeoutError):
                await asyncio.wait_for(process.wait(), 5)
        shm.remove_orphans(noted)
        self._status.state, self._status.shm = "stopped", {}
        for status in self._status.processes.values():
            status.pid, status.state = 0, "stopped"
        self._publish()

    def _welcome(self) -> list[str]:
        where, config = self._status.endpoints, self._config
        took = time.time() - self._status.started
        return [
            f"kvpilot is up ({took:.0f} s), Ctrl-C or `kvpilot down` stops it",
            f"  OpenAI API   {where['gateway']}/v1  (model {config.engine.served_model_name})",
            f"  control API  {where['control']}/kvpilot/v1  (mode {config.coordinator.mode})",
            f"  logs         {self._state_dir / 'logs'}",
        ]

    def _log(self, name: str) -> Path:
        return self._state_dir / "logs" / f"{name}.log"


def endpoints(config: Config) -> dict[str, str | list[str]]:
    """Where things answer, as ``status.json`` and the Python interface show it."""
    return {
        "gateway": plan.http_base(config.gateway.host, config.gateway.port),
        "control": plan.http_base(config.coordinator.host, config.coordinator.port),
        "engine": config.engine.url,
        "lmcache": list(config.lmcache.nodes),
        "lmcache_coordinator": config.lmcache.coordinator,
        "kv_events": config.engine.kv_events,
    }


_libc = ctypes.CDLL(None, use_errno=True)


def _die_with_supervisor() -> None:
    """In the child: ask the kernel for SIGTERM should the supervisor die without stopping it (Linux)."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
