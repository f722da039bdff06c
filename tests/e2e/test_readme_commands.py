"""The README's block of commands under "Use", run as it stands."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

README = (Path(__file__).parent.parent.parent / "README.md").read_text()


def test_the_commands_under_use_work_as_they_stand(tmp_path):
    block = re.findall(r"## Use\n.*?```bash\n(.*?)```", README, re.DOTALL)[0]
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PDCLUSTER_HOME": str(tmp_path),
    }
    done = subprocess.run(["bash", "-euc", block], capture_output=True, text=True, env=environment, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "ready: tiny at http://127.0.0.1:8000/v1 (1 prefill, 1 decode" in done.stderr
    assert done.stdout.count("data: {") >= 8
    assert "data: [DONE]" in done.stdout
    assert "cluster default: stopped" in done.stdout
