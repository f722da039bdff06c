import stat

import pytest

from pdcluster.cluster_view import look, sessions_of
from pdcluster.errors import StateError
from pdcluster.processes import start_time
from pdcluster.state import ClusterRecord, ProcessRecord, RunDirectory, boot_id, default_home


@pytest.fixture
def directory(tmp_path):
    made = RunDirectory.of(tmp_path, "trial")
    made.create()
    return made


def record(**changes):
    values = {"name": "trial", "run_id": "r", "phase": "ready", "launcher_pid": 1, "launcher_started": 0.0}
    values |= {"boot_id": boot_id(), "url": "http://127.0.0.1:8000", "model": "tiny"}
    return ClusterRecord(**(values | changes))


def test_a_record_reads_back_as_it_was_written(directory):
    written = record(excluded_pairs=(("p", "d"),)).with_process(
        ProcessRecord("decode-0", "decode", "u", "healthy", 7, 1.5)
    )
    directory.write(written)
    read = directory.read()
    assert read.processes == written.processes
    assert read.excluded_pairs == (("p", "d"),)
    assert read.written > 0


def test_no_record_is_none_and_naming_it_is_an_error_that_lists_the_others(directory):
    assert directory.read() is None
    directory.write(record())
    with pytest.raises(StateError, match=r"cluster other: not found.*known: trial"):
        RunDirectory.of(directory.path.parent.parent, "other").must_read()


@pytest.mark.parametrize("text", ["", "{", "[]", '{"name": 1}'])
def test_a_damaged_record_says_which_file_and_what_to_do(directory, text):
    (directory.path / "cluster.json").write_text(text)
    with pytest.raises(StateError, match=r"cluster\.json: cannot be read .* remove its directory"):
        directory.read()


def test_a_second_launcher_is_refused_while_the_first_holds_the_lock(directory):
    with directory.lock(), pytest.raises(StateError, match="another launcher runs it"), directory.lock():
        pass
    with directory.lock():
        pass


def test_the_directory_is_its_owners_alone(directory):
    assert stat.S_IMODE(directory.path.stat().st_mode) == 0o700


def test_home_follows_the_environment(tmp_path):
    assert default_home({"PDCLUSTER_HOME": str(tmp_path)}) == tmp_path
    assert default_home({"XDG_STATE_HOME": "/s"}).parts[-2:] == ("s", "pdcluster")


def test_a_cluster_whose_launcher_died_is_lost_and_so_are_its_dead_processes():
    dead = record().with_process(ProcessRecord("decode-0", "decode", "u", "healthy", pid=2**22 + 1, started=1.0))
    view = look(dead)
    assert view.phase == "lost"
    assert not view.ready
    assert view.process_phase(dead.processes["decode-0"]) == "lost"


def test_a_cluster_of_another_boot_is_lost_whatever_its_process_ids_say():
    import os

    me = os.getpid()
    view = look(record(boot_id="other", launcher_pid=me, launcher_started=start_time(me)))
    assert view.phase == "lost"


def test_a_cluster_is_ready_when_all_of_it_runs_and_is_healthy():
    import os

    me = os.getpid()
    healthy = record(launcher_pid=me, launcher_started=start_time(me)).with_process(
        ProcessRecord("decode-0", "decode", "u", "healthy", me, start_time(me))
    )
    assert look(healthy).ready
    restarting = healthy.with_process(ProcessRecord("prefill-0", "prefill", "u", "restarting"))
    assert not look(restarting).ready
    assert [session.leader for session in sessions_of(restarting)] == [me]
