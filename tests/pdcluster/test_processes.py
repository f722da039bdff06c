import os
import signal
import subprocess
import sys

import psutil
import pytest

from pdcluster import processes
from pdcluster.processes import Session

# A leader that starts a child which ignores SIGTERM, says so, and waits.
LEADER = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c",
    "import signal,time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(600)"],
    stdout=subprocess.PIPE)
child.stdout.readline()
print(child.pid, flush=True)
time.sleep(600)
"""


@pytest.fixture
def leader():
    process = subprocess.Popen(
        [sys.executable, "-c", LEADER], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    child = int(process.stdout.readline())
    yield process, child, Session(process.pid, processes.start_time(process.pid))
    for pid in (process.pid, child):
        if psutil.pid_exists(pid):
            os.kill(pid, signal.SIGKILL)
    process.wait()
    process.stdout.close()


def test_members_are_the_leader_and_what_it_started(leader):
    process, child, session = leader
    assert {member.pid for member in processes.members([session])} == {process.pid, child}


def test_children_of_a_killed_leader_are_found_and_ended(leader):
    process, child, session = leader
    process.kill()
    process.wait()
    assert [member.pid for member in processes.members([session])] == [child]
    assert processes.end([session], grace=5) == 1
    assert not psutil.pid_exists(child) or psutil.Process(child).status() == psutil.STATUS_ZOMBIE


def test_what_ignores_the_request_to_end_is_killed(leader):
    process, child, session = leader
    assert processes.end([session], grace=5) == 1
    process.wait(timeout=5)
    assert process.returncode == -signal.SIGTERM
    assert not processes.is_running(child, processes.start_time(child))


def test_a_process_that_took_over_the_id_is_left_alone(leader):
    process, _, session = leader
    other = Session(session.leader, session.started - 3600)
    assert processes.members([other]) == []
    assert processes.end([other], grace=0) == 0
    assert process.poll() is None
    assert not processes.is_running(other.leader, other.started)


def test_a_finished_process_is_not_running(leader):
    process, _, session = leader
    process.kill()
    process.wait()
    assert not processes.is_running(session.leader, session.started)
    assert not processes.is_running(None, None)
