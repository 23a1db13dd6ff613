"""The fork server: a file in a fork of a process that has imported torch behaves like one in a fresh interpreter."""

import json
import re
import signal
import textwrap
import unittest
from pathlib import Path
from typing import Any

from trees import CHECKOUT, PASS, TreeCase, alive, all_end, body, little_torch

# The first file makes the dispatcher start the server, and waits until the server's file in the run's directory exists.
FIRST = f"""
import tempfile
sys.path.insert(0, {str(CHECKOUT)!r})
class TestFirst(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        from torch_fsdp_tests.verdict import events
        events.record(torch="any", device="cpu")  # the CPU is the subject
    def test_first(self):
        while not os.path.exists(os.path.join(tempfile.gettempdir(), "..", "..", "forkserver")): time.sleep(0.02)
"""
FORKED = "assert 'torch' in sys.modules\n"

# A file that writes everything that its process can observe about how it was started.
SEES = """
import __main__, gc, tempfile, threading
FILE = {file!r}
seen = dict(
    main=(__main__.__file__, __main__.__name__, str(__main__.__spec__)),
    arguments=sys.argv,
    path=[path for path in sys.path if not os.path.basename(path).startswith("tmp")],  # torch 2.9 adds a folder
    flags=str(sys.flags),
    folder=os.getcwd(),
    environment={{name: value for name, value in os.environ.items() if name != "TMPDIR"}},
    temporary=tempfile.gettempdir() == os.environ["TMPDIR"],
    leads=(os.getsid(0) == os.getpid(), os.getpgid(0) == os.getpid()),
    threads=threading.active_count(),
    streams=[(s.fileno(), s.encoding, s.errors, s.line_buffering) for s in (sys.stdin, sys.stdout, sys.stderr)],
    files=[os.path.basename(os.readlink(f"/proc/self/fd/{{n}}")) for n in range(3)],
    descriptors=len(os.listdir("/proc/self/fd")),
    signals=[(n, str(signal.getsignal(n))[:20]) for n in sorted(signal.valid_signals())],
    blocked=sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
    collector=(gc.isenabled(), gc.get_threshold()),
)
with open(FILE, "w") as file: json.dump([seen, os.getppid(), "torch" in sys.modules], file)
"""


@unittest.skipUnless(Path("/proc/self/task").exists(), "needs Linux, where a process may fork once torch is imported")
class TestForkServer(TreeCase):
    """Without it, a file could pass or fail only because it was forked, or its processes could outlive the run."""

    def check_forked(self, files: dict[str, str], passed: int, **expected: Any) -> str:
        """Like ``check``, for files that the server forks, one at a time."""
        named = {f"test_{number}_{name}": text for number, (name, text) in enumerate(files.items(), 1)}
        return self.check({"test_0": FIRST, **named}, ["-j1", "--keep-going"], passed + 1, **expected)

    def test_nothing_shows(self):
        """A forked process observes the same as a fresh interpreter. This uses the installed torch."""
        sight = self.root / "sight"
        look = SEES.format(file=str(sight)) + PASS
        self.check({"test_1_look": look}, passed=1)
        fresh, dispatcher, has_torch = json.loads(sight.read_text())
        self.assertFalse(has_torch)
        self.check_forked({"look": look, "other": PASS, "third": PASS}, passed=3)
        forked, another_dispatcher, has_torch = json.loads(sight.read_text())
        self.assertTrue(has_torch)
        self.maxDiff = None
        self.assertEqual(fresh, forked)
        self.assertNotEqual(dispatcher, another_dispatcher)  # the parent of a fork is its own run

    def test_bad_ends_and_processes_left_by_forked_files(self):
        """The processes that a file leaves are a program and a fork, both outside of its process group."""
        program = "print('pid', subprocess.Popen(['sleep', '61'], start_new_session=True).pid)"
        fork = "pid = os.fork(); pid or (os.setsid(), time.sleep(1000)); print('pid', pid)"
        ends = {
            "fails": body("print('words'), self.fail('on purpose')"),
            "leaves": body("os._exit(3)"),
            "dies": body("os.kill(os.getpid(), signal.SIGSEGV)"),
            "breaks": "import no_such_module\n",
            "passes": body(program, fork),
        }
        says = ["words(.|\n)*on purpose", "exited with code 3", "SIGSEGV", "no_such_module"]
        forked = {name: FORKED + text for name, text in ends.items()}
        env = little_torch(self.root) | {"VERBOSE_TEST_LOGS": "1"}
        out = self.check_forked(forked, passed=2, failed=4, says=says, env=env)
        left = set(map(int, re.findall(r"pid (\d+)", out)))
        self.assertEqual(len(left), 2, out)
        self.assertEqual(set(map(int, re.findall(r"note: the process (\d+) .*was left running", out))), left, out)
        self.assertFalse(any(map(alive, left)))

    def test_death_of_the_fork_server_fails_no_file(self):
        kill = """
        def test_kill(self):
            for task in os.listdir(f"/proc/{os.getppid()}/task"):
                for pid in open(f"/proc/{os.getppid()}/task/{task}/children").read().split():
                    if b"forkserver" in open(f"/proc/{pid}/cmdline", "rb").read():
                        os.kill(int(pid), signal.SIGKILL)
                        return
            self.fail("there is none")
        """
        killer = FORKED + "class TestKill(unittest.TestCase):\n" + textwrap.indent(textwrap.dedent(kill), "    ")
        alone = "assert 'torch' not in sys.modules\n" + PASS
        files = {"kills": killer, "alone": alone, "third": alone}
        self.check_forked(files, passed=3, env=little_torch(self.root))

    def test_the_projects_own_files_wait_for_it(self):
        self.write_own_program()
        files = {f"test_{number}": FORKED + PASS for number in range(3)}
        self.check(files, ["-j1"], passed=3, env=little_torch(self.root))

    def test_it_goes_with_the_dispatcher(self):
        for number in (signal.SIGINT, signal.SIGKILL):
            file = self.root / f"{number}"
            tell = f"open({str(file)!r}, 'w').write(f'{{os.getpid()}} {{os.getsid(0)}}.'); time.sleep(1000)"
            self.write({"test_0": FIRST, "test_1": FORKED + body(tell), "test_2": PASS, "test_3": PASS})
            process = self.start("-j1", env=little_torch(self.root))
            self.wait_for(process, file)
            tasks = Path(f"/proc/{process.pid}/task").glob("*/children")
            children = [int(pid) for task in tasks for pid in task.read_text().split()]
            self.assertEqual(len(children), 3)  # the reaper, the server and the file
            process.send_signal(number)
            process.communicate()
            self.assertTrue(all_end(children))


if __name__ == "__main__":
    unittest.main()
