# SPDX-License-Identifier: Apache-2.0
"""What happens to a job, and how it ends: one table; servers and programs are stubs.

Whatever happens, no process of the job remains, no traceback is shown, and one line
says why it ends.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import subprocess
from collections.abc import Iterator

import pytest

from tests.launch import sshd
from tests.launch.stub import BEGIN, Place, ready, wait_until

# A scenario is its name, and below it, behind
#   $  the launcher's flags and the program; `ssh` for another host, and STUB=... for
#      what servers do, see tests/launch/stub.py;
#   !  what happens once all programs are ready: a function of Faults, and arguments;
#   =  the launcher's status, and what it says; [] if it says nothing;
#   >  all lines of programs with the word "did".
_SCENARIOS = """
the program fails
    $ fails.py
    = 7: the program has ended: status 7
the program is killed
    $ killed.py
    = 137: the program has ended: killed by SIGKILL
the program crashes
    $ crashes.py
    = 139: the program has ended: killed by SIGSEGV
the program leaves a process behind
    $ leaves.py
    = 0:
a server is killed
    $ --nnodes=2 --grace=5 wait.py
    ! kill_server 9
    = 137: its server has ended: killed by SIGKILL
a server is ended
    $ --nnodes=2 --grace=5 wait.py
    ! kill_server 15
    = 143: its server has ended: killed by SIGTERM
a server is stopped
    $ --nnodes=2 --heartbeat=1 wait.py
    ! kill_server 19
    = 137: silent for 0.7 seconds (it was stopped): killed
a program that fails by its server is not to blame
    $ wait.py
    ! kill_program_and_server
    = 143: localhost-0: its server has ended: killed by SIGTERM
a server ends that starts anew
    $ --max-restarts=1 wait_once.py
    ! kill_server 9
    = 0:
a server fails at once
    $ STUB=fail --max-restarts=5 wait.py
    = 1: its server ended before it was up: replicator.serve: no good
a server is never up
    $ STUB=mute --start-timeout=0.5 --max-restarts=5 wait.py
    = 1: localhost-0: not up after 0.5 seconds; --start-timeout allows
keepers are killed
    $ wait.py
    ! kill_keepers
    = 137:
a failure starts all anew
    $ --max-restarts=2 fails_twice.py
    = 0: restarting all, 2 of 2
    > did attempt 0, did attempt 1, did attempt 2
restarts come to an end
    $ --max-restarts=1 fails_twice.py
    = 4: restarting all, 1 of 1
    > did attempt 0, did attempt 1
a signal comes while servers start
    $ STUB=mute wait.py
    ! end_while_servers_start
    = 143: []
the program ends well after a signal
    $ --max-restarts=3 hears.py
    ! send 15
    = 0: []
    > did hear 15
the program does not end by SIGINT
    $ --grace=0.3 stubborn.py
    ! send 2
    = 137:
    > did not end
the program does not end by SIGTERM
    $ --grace=0.3 stubborn.py
    ! send 15
    = 137:
    > did not end
a second signal comes
    $ --grace=1000 stubborn.py
    ! send_twice 2
    = 137:
the launcher is killed
    $ --nnodes=2 --grace=0.3 stubborn.py
    ! send 9
    = -9:
between: the first that fails ends all
    $ --mode=between --nnodes=2 second_fails.py
    = 7: localhost-1: the program has ended: status 7
    > [localhost-0] did end
between: one is killed, and another does not end
    $ --mode=between --nnodes=2 --grace=0.3 stubborn.py
    ! kill_program localhost-0 9
    = 137: localhost-0: the program has ended: killed by SIGKILL
    > [localhost-1] did not end
between: what failed is said while others end
    $ --mode=between --nnodes=2 --grace=1000 stubborn.py
    ! end_when_one_is_named
    = 137:
between: who is killed is why others fail
    $ --mode=between --nnodes=2 second_is_killed.py
    = 137: localhost-1: the program has ended: killed by SIGKILL
between: who ends well leaves others alone
    $ --mode=between --nnodes=2 first_ends.py
    = 0: []
    > [localhost-1] did go on
between: SIGINT reaches all
    $ --mode=between --nnodes=2 --max-restarts=3 hears.py
    ! send 2
    = 0: []
    > [localhost-0] did hear 2, [localhost-1] did hear 2
between: SIGTERM reaches all, and one fails by it
    $ --mode=between --nnodes=2 --max-restarts=3 second_fails_by_signal.py
    ! send 15
    = 3: []
    > [localhost-0] did hear 15, [localhost-1] did hear 15
between: a second signal comes
    $ --mode=between --nnodes=2 --grace=1000 stubborn.py
    ! send_twice 15
    = 137:
between: the launcher is killed
    $ --mode=between --nnodes=2 --grace=0.3 stubborn.py
    ! send 9
    = -9:
between: a program is stopped
    $ --mode=between --nnodes=2 --heartbeat=1 wait.py
    ! kill_program localhost-1 19
    = 137: localhost-1: the program has ended: killed by SIGKILL
async: others go on when one fails
    $ --mode=async --nnodes=3 second_fails_early.py
    = 7: localhost-1: the program has ended: status 7; 2 of 3 programs continue
    > [localhost-0] did 0, [localhost-2] did 0
async: the one that failed is started again alone
    $ --mode=async --nnodes=3 --max-restarts=2 second_fails_once.py
    = 0: status 7; restarting it, 1 of 2
    > [localhost-0] did 0, [localhost-1] did 1, [localhost-2] did 0
async: a server that ends ends all, and all start anew
    $ --mode=async --nnodes=3 --max-restarts=1 wait_once.py
    ! kill_all_servers
    = 0: localhost-0: its server has ended, with the variables on it
    > [localhost-0] did 1, [localhost-1] did 1, [localhost-2] did 1
SIGHUP ends all
    $ --nnodes=2 wait.py
    ! send 1
    = 143: []
ssh: a server is killed there
    $ ssh wait.py
    ! kill_server 9
    = 137: 127.0.0.2: its server has ended: killed by SIGKILL
ssh: the connection is closed
    $ ssh wait.py
    ! cut
    = 255: 127.0.0.2: its server has ended: the connection to its host is lost
ssh: a host comes back that is used again
    $ ssh --max-restarts=1 wait_once.py
    ! cut
    = 0:
ssh: a server is never up
    $ STUB=mute ssh --env=STUB --start-timeout=3 wait.py
    = 1: 127.0.0.2: not up after 3 seconds
ssh, between: a program is killed there
    $ ssh --mode=between wait.py
    ! kill_program 127.0.0.2 9
    = 137: 127.0.0.2: the program has ended: killed by SIGKILL
"""
_SIGNALLED = """
{place}: signal {number} leaves nothing behind
    $ {flags} wait.py
    ! send {number}
    = {status}: []
"""
_PLACES = {
    "here": "--nnodes=2",
    "async": "--mode=async --nnodes=3",
    "ssh": "ssh",
    "ssh, between": "ssh --mode=between",
}
_STATUSES = {2: 130, 15: 143, 9: -9}
_ALL = _SCENARIOS + "".join(
    _SIGNALLED.format(place=place, flags=flags, number=number, status=status)
    for place, flags in _PLACES.items()
    for number, status in _STATUSES.items()
)
_WAIT = "say('ready', os.getpid())\nsignal.pause()\n"
_HEARS = "signal.signal({0}, lambda n, _: (say('did hear', n), sys.exit({1})))\n"
_STUBBORN = """
for number in (2, 15):
    signal.signal(number, lambda *_: say("did not end"))
ignore = "import signal,time;signal.signal(15,signal.SIG_IGN);print(flush=1)"
command = [sys.executable, "-c", ignore + ";time.sleep(1000)"]
left = subprocess.Popen(command, start_new_session=True, stdout=-1)
left.stdout.readline()
say("ready", os.getpid())
while True:
    time.sleep(100)
"""
_FIRST_ENDS = """
if task == 0:
    open("pid.new", "w").write(str(os.getpid()))
    os.rename("pid.new", "pid")
    sys.exit()
wait("pid")
wait(lambda: not os.path.exists("/proc/" + open("pid").read()))
time.sleep(0.5)
say("did go on")
"""
_SECOND_IS_KILLED = """
if task == 0:
    open("failed", "w")
    sys.exit(7)
wait("failed")
time.sleep(0.2)
os.kill(os.getpid(), 9)
"""
_SECOND_FAILS = """
if task == 1:
    wait("up")
    sys.exit(7)
signal.signal(15, lambda *_: (say("did end"), sys.exit(3)))
open("up", "w")
signal.pause()
"""
_SECOND_FAILS_ONCE = """
if task == 1 and not restarts:
    sys.exit(7)
if task == 1:
    open("back", "w")
wait("back")
say("did", restarts)
"""
_PROGRAMS = {
    "wait": _WAIT,
    "wait_once": f"if restarts:\n    say('did', restarts)\n    sys.exit()\n{_WAIT}",
    "hears": f"for n in (2, 15):\n    {_HEARS.format('n', 0)}{_WAIT}",
    "second_fails_by_signal": _HEARS.format(15, "3 * task") + _WAIT,
    "stubborn": _STUBBORN,
    "fails": "sys.exit(7)",
    "killed": "os.kill(os.getpid(), 9)",
    "crashes": "os.kill(os.getpid(), 11)",
    "leaves": "subprocess.Popen(['sleep', '1000'], start_new_session=True, stdout=-3)",
    "fails_twice": "say('did attempt', restarts)\nsys.exit(4 * (restarts < 2))",
    "second_fails": _SECOND_FAILS,
    "second_is_killed": _SECOND_IS_KILLED,
    "first_ends": _FIRST_ENDS,
    "second_fails_early": "sys.exit(7) if task == 1 else time.sleep(1)\nsay('did 0')",
    "second_fails_once": _SECOND_FAILS_ONCE,
}


@dataclasses.dataclass(frozen=True)
class Faults:
    """What may happen to a job whose programs are ready.

    Attributes:
        place: Where it was launched.
        started: The launcher.
        pids: Its programs, by host.
        remote: The SSH server, if there is one.
    """

    place: Place
    started: subprocess.Popen[str]
    pids: dict[str, int]
    remote: sshd.Server | None

    def kill_server(self, number: str) -> None:
        os.kill(self.place.servers()[0], int(number))

    def kill_all_servers(self) -> None:
        for pid in sorted(self.place.processes("replicator.serve")):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, 9)

    def kill_program(self, name: str, number: str) -> None:
        os.kill(self.pids[name], int(number))

    def kill_program_and_server(self) -> None:
        for pid in (*self.pids.values(), *self.place.processes("replicator.serve")):
            with contextlib.suppress(ProcessLookupError):  # ended by the launcher
                os.kill(pid, 15)

    def kill_keepers(self) -> None:
        for pid in self.place.processes("-I -c"):
            os.kill(pid, 9)

    def cut(self) -> None:
        assert self.remote
        for pid in self.remote.connections():
            os.kill(pid, 9)

    def send(self, number: str) -> None:
        assert len(self.place.processes()) > 3
        self.started.send_signal(int(number))

    def send_twice(self, number: str) -> None:
        self.send(number)
        assert self.started.stdout
        while "did not end" not in self.started.stdout.readline():
            pass
        self.send(number)

    def end_while_servers_start(self) -> None:
        wait_until(lambda: self.place.processes("replicator.serve"))
        self.started.terminate()

    def end_when_one_is_named(self) -> None:
        """Others are being ended meanwhile: a signal kills them."""
        self.kill_program("localhost-1", "9")
        message = "localhost-1: the program has ended: killed by SIGKILL"
        assert self.started.stderr
        while message not in (line := self.started.stderr.readline()):
            assert line
        assert self.pids["localhost-0"] in self.place.processes()
        self.started.terminate()


def _parsed(text: str) -> Iterator[object]:
    """Yields the scenarios of a text."""
    name, rows = "", {}
    for line in [*text.splitlines(), "end"]:
        if line.startswith("    "):
            rows[line[4]] = line[6:]
        elif line:
            if rows:
                yield pytest.param(rows, id=name)
            name, rows = line, {}


@pytest.mark.parametrize("rows", [*_parsed(_ALL)])
def test_a_job_ends_as_the_table_says(
    rows: dict[str, str], place: Place, request: pytest.FixtureRequest
) -> None:
    *words, name = rows["$"].split()
    place.program(BEGIN + _PROGRAMS[name.removesuffix(".py")], name)
    env = dict(word.split("=") for word in words if word.startswith("STUB="))
    flags = [word for word in words if word.startswith("--")]
    count = 3 if "--mode=async" in flags else 2 if "--mode=between" in flags else 1
    remote = request.getfixturevalue("remote") if "ssh" in words else None
    if remote:
        hosts, *more = remote.flags
        flags += [f"{hosts},localhost" if count == 2 else hosts, *more]
    status, _, said = rows["="].partition(":")
    with place.start(*flags, name, **env) as started:
        if "!" in rows:
            fault, *arguments = rows["!"].split()
            pids = {} if env else ready(started, count)
            getattr(Faults(place, started, pids, remote), fault)(*arguments)
        stdout, stderr = started.communicate(timeout=120)
    assert started.returncode == int(status), stderr
    assert "Traceback" not in stderr
    if said.strip() == "[]":
        assert "replicator.launch: " not in stderr
    else:
        assert said.strip() in stderr
    if "--max-restarts" not in rows["$"]:
        lines = stderr.splitlines()
        assert sum(line.startswith("replicator.launch: ") for line in lines) <= 1
    if ">" in rows:
        did = {line for line in stdout.splitlines() if "did " in line}
        assert did == {*rows[">"].split(", ")}
    place.expect_nothing_left()
