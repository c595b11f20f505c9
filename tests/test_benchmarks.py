"""The benchmarks run, at their smallest size."""

import json
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent.parent / "benchmarks"
RUN = "import json, runpy, sys; path, *sys.argv[1:] = json.loads(sys.argv[1]); sys.path.insert(0, path.rpartition('/')[0]); runpy.run_path(path, run_name='__main__')"
SMALLEST = {
    "steps.py": ["--shape", "tiny", "--rounds", "1", "--threads", "1", "--no-memory", "--only", "scores"],
    "ad_drop.py": ["--small", "--rounds", "1", "--threads", "1", "--no-integrated"],
    "variance.py": ["--oracle", "2", "--updates", "2", "--only", "1,10,13"],
    "planted.py": ["--output-dir", "out"],
    "shift.py": ["--output-dir", "out"],
    "kill_and_resume.py": ["--kills", "1"],
}


@pytest.mark.parametrize("name", [pytest.param(name, marks=[] if name == "steps.py" else pytest.mark.slow) for name in SMALLEST])  # fmt: skip
def test_a_benchmark_runs_at_its_smallest_size(warm, tmp_path, name):
    code, output = warm.run("-c", RUN, json.dumps([str(FOLDER / name), *SMALLEST[name]]), cwd=tmp_path, timeout=300)
    assert code == 0, output
    assert output.strip()
