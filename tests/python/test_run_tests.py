"""tests/gpu/run_tests.py over a program that stands in for a GoogleTest one."""

import concurrent.futures
import os
import pathlib
import re
import subprocess
import sys
import time

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "tests/gpu/run_tests.py"

PROGRAM = """#!{python}
import os, sys, time
names = ["Small/A.Case/" + str(i) for i in range(9)] + ["B.Skips", "B.Fails", "B.Dies", "B.Last"]
chosen = next(a for a in sys.argv if a.startswith("--gtest_filter=")).split("=", 1)[1]
if "--gtest_list_tests" in sys.argv:
    print("Small/A.")
    for i in range(9 * (chosen != "Nothing*")):
        print(f"  Case/{{i}}  # GetParam() = {{i}}")
    print("B.")
    for name in ("Skips", "Fails", "Dies", "Last"):
        if chosen != "Nothing*" and name in os.environ["WITH"].split() + ["Skips", "Last"]:
            print("  " + name)
    sys.exit()
for name in chosen.split(":"):
    assert name in names, name
    print(f"[ RUN      ] {{name}}", flush=True)
    with open(os.environ["BEGUN"], "a") as file:
        file.write(name + "\\n")
    with open(os.path.join(os.path.dirname(os.environ["BEGUN"]), "devices"), "a") as file:
        file.write(os.environ["CUDA_VISIBLE_DEVICES"] + "\\n")
    if "Slow" in os.environ["WITH"]:
        time.sleep(0.3)
    if name == "B.Dies":
        os._exit(9)
    if name == "B.Fails":
        print("a failure's words")
    result = {{"B.Fails": "  FAILED  ", "B.Skips": "  SKIPPED "}}.get(name, "       OK ")
    where = ", where GetParam() = 3" if name == "B.Fails" else ""
    print(f"[{{result}}] {{name}}{{where}} (7 ms)", flush=True)
"""


def write_program(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return path


@pytest.fixture
def run(tmp_path):
    program = write_program(tmp_path / "tests", PROGRAM.format(python=sys.executable))

    def call(kinds, *options, gpus="0,3"):
        begun = tmp_path / "begun"
        begun.write_text("")
        done = subprocess.run(
            [sys.executable, SCRIPT, program, "--workers=3", "--chunk=4", *options],
            env={
                "WITH": kinds,
                "BEGUN": str(begun),
                "PATH": f"{tmp_path}:/usr/bin:/bin",
                "CUDA_VISIBLE_DEVICES": gpus,
            },
            capture_output=True,
            text=True,
            timeout=60,
        )
        return done.returncode, done.stdout + done.stderr, begun.read_text().split()

    return call


def test_all_run_once_and_not_again(run):
    code, said, begun = run("")
    assert code == 0 and "10 of 11 passed, 1 skipped, 0 failed" in said, said
    assert len(begun) == 11 == len(set(begun))
    code, said, begun = run("")
    assert code == 0 and not begun and "11 before" in said, said
    code, said, begun = run("", "--again")
    assert code == 0 and len(begun) == 11 and "0 before" in said, said


def test_without_a_gpu_they_are_skipped(run):
    code, said, begun = run("", gpus="")
    assert code == 77 and "no GPU" in said and not begun, said


def test_workers_take_the_gpus_in_turn(run, tmp_path):
    code, said, begun = run("", "--chunk=1", "--workers=4")
    assert code == 0 and set((tmp_path / "devices").read_text().split()) == {"0", "3"}, said


def test_each_worker_gets_some_of_few_tests(run, tmp_path):
    # Slow ones, so that the last worker has started before the first one is through with its tests.
    code, said, begun = run("Slow", "--workers=6", "--chunk=12", gpus="0,1,2,3,4,5")
    assert code == 0 and len(set((tmp_path / "devices").read_text().split())) == 6, said


def test_it_tells_when_the_last_tests_have_begun(run, tmp_path):
    mark = tmp_path / "handed_out"
    code, said, begun = run("Slow", "--workers=1", "--chunk=4", "--seconds=0.5", f"--handed-out={mark}")
    assert code == 4 and not mark.exists(), said
    code, said, begun = run("", f"--handed-out={mark}")
    assert code == 0 and mark.exists(), said


def test_what_a_run_beside_it_has_ended_is_left_out(run, tmp_path):
    with concurrent.futures.ThreadPoolExecutor() as pool:
        this = pool.submit(run, "Slow", "--workers=1", "--chunk=1")
        while not (ended := list(tmp_path.glob("ended-*.txt"))):
            time.sleep(0.01)
        with ended[0].open("a") as file:
            file.writelines(f"OK {name} 7\n" for name in [f"Small/A.Case/{i}" for i in range(9)] + ["B.Last"])
        code, said, begun = this.result()
    assert code == 0 and len(begun) <= 3 and re.search("1[01] of 11 passed", said), said


def test_one_that_fails_is_told_and_runs_again(run):
    for _ in range(2):
        code, said, begun = run("Fails")
        assert code == 1 and "a failure's words" in said and "1 failed" in said, said
        assert "B.Fails" in begun


def test_a_process_that_dies_fails_one_test_and_the_others_run(run):
    code, said, begun = run("Dies")
    assert code == 1 and "10 of 12 passed, 1 skipped, 1 failed" in said, said
    assert "within this test" in said and len(begun) == len(set(begun)) == 12


def test_a_run_that_was_cut_off_goes_on(run):
    code, said, first = run("Slow", "--seconds=0.8")
    assert code == 4 and len(first) < 11, said
    code, said, second = run("")
    assert (
        code == 0 and len(second) < 11 and set(first + second) >= {f"Small/A.Case/{i}" for i in range(9)}
    ), said


def test_tests_pass_under_a_sanitizer_only_if_it_says_that_it_found_nothing(run, tmp_path):
    tool = tmp_path / "compute-sanitizer"
    for verdict, passed in (("echo '========= ERROR SUMMARY: 0 errors'", 10), ("true", 0)):
        found = "*Case/4*) echo an invalid read; echo '========= ERROR SUMMARY: 2 errors'; exit 9;;"
        write_program(tool, f'#!/bin/sh\nshift 6\n"$@" || exit\ncase "$*" in {found} *) {verdict};; esac\n')
        code, said, _ = run("", "--sanitizer=memcheck", "--chunk=1", f"--folder={tmp_path / str(passed)}")
        assert code == 1 and "an invalid read" in said, said
        assert f"{max(passed - 1, 0)} of 11 passed" in said, said


def test_wrong_calls_are_refused(run, tmp_path):
    assert run("", "--workers=0")[0] == 2
    code, said, _ = run("", "--filter=Nothing*")
    assert code == 2 and "no test is called 'Nothing*'" in said
    done = subprocess.run([sys.executable, SCRIPT, tmp_path / "none"], capture_output=True, text=True)
    assert done.returncode == 2 and "there is no program" in done.stderr


def test_the_script_of_all_gpu_tests_calls_it(tmp_path):
    for name in ("tools/test_gpu.sh", "tests/gpu/run_tests.py"):
        write_program(tmp_path / name, (ROOT / name).read_text())
    for name in ("gpu", "emulated"):
        write_program(tmp_path / f"build/tests/flashjit_{name}_tests", PROGRAM.format(python=sys.executable))
    write_program(tmp_path / "bin/nvidia-smi", "#!/bin/sh\necho 'GPU 0: a card'\n")
    done = subprocess.run(
        ["bash", tmp_path / "tools/test_gpu.sh", "tests", "emulated"],
        env={"WITH": "", "BEGUN": str(tmp_path / "begun"), "PATH": f"{tmp_path}/bin:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0 and done.stdout.count("10 of 11 passed, 1 skipped, 0 failed") == 2, done
