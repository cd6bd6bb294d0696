"""Run the examples as a user does: the trainer alone, on several processes, and after its processes were killed."""

from __future__ import annotations

import json
import runpy
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from ringweave_lab.bench.launched import command, example, run, started

EXAMPLES = Path(__file__).parents[1] / "examples"
STEPS = 40
SAVED = 21
SMALL = ["--tokens", 701, "--width", 32, "--window", 64, "--sinks", 8]


def here(name: str, *options: object) -> None:
    """Run an example in this process, which has loaded torch already."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("sys.argv", [name, *map(str, options)])
        patched.syspath_prepend(EXAMPLES)
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")


def train(folder: Path, processes: int, *options: object) -> list[dict[str, Any]]:
    """Run a trainer to its end, in this process or in several, and return its metrics."""
    script, out = example(), folder / "metrics.jsonl"
    assert script is not None
    options = (*SMALL, "--out", out, *options)
    if processes == 1:
        here(script.name, *options)
    else:
        run(command(script, processes, *options), threads=1, until=time.monotonic() + 120)
    return metrics(out)


def metrics(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def losses(lines: list[dict[str, Any]]) -> list[float]:
    return [line["loss"] for line in lines]


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Run two processes that share each sequence, without a failure."""
    return train(tmp_path_factory.mktemp("shared"), 2, "--steps", STEPS)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run that one process started alone: its metrics, and a checkpoint from before its last steps."""
    folder = tmp_path_factory.mktemp("alone")
    train(folder, 1, "--steps", STEPS, "--checkpoint", folder / "lm.pt", "--every", SAVED)
    return folder


# the next test compares the steps after a checkpoint, and the demonstration, in lab, the first steps
@pytest.mark.long
def test_one_process_and_two_learn_the_same(shared: list[dict[str, Any]], folder: Path) -> None:
    alone = metrics(folder / "metrics.jsonl")
    assert [line["step"] for line in alone] == [line["step"] for line in shared] == list(range(STEPS))
    assert losses(shared) == pytest.approx(losses(alone), abs=1e-4)
    assert all(map(shares_its_sequence, shared))


def shares_its_sequence(line: dict[str, Any]) -> bool:
    """Return whether a step of two processes brought less than a full ring of keys and values."""
    # (ranks - 1) * local tokens * key heads * (D + Dv) * itemsize, of four layers
    assert line["full_ring"] == 1 * 384 * 2 * (8 + 8) * 4 * 4
    return bool(0 < line["received"] < 0.5 * line["full_ring"])


def test_two_processes_continue_from_the_checkpoint_of_one(folder: Path, tmp_path: Path) -> None:
    """They learn what one process learns without an interruption."""
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    alone, more = metrics(tmp_path / "metrics.jsonl"), STEPS + 2
    assert [line["step"] for line in alone] == list(range(STEPS))
    assert losses(alone)[-1] < 0.8 * losses(alone)[0]
    assert {(line["received"], line["full_ring"]) for line in alone} == {(0, 0)}
    lines = train(tmp_path, 2, "--steps", more, "--checkpoint", tmp_path / "lm.pt", "--every", SAVED)
    assert [line["step"] for line in lines] == list(range(more))
    # the steps after the checkpoint are repeated
    assert lines[:SAVED] == alone[:SAVED]
    assert all(map(shares_its_sequence, lines[SAVED:]))
    assert losses(lines)[:STEPS] == pytest.approx(losses(alone), abs=1e-4)


@pytest.mark.long
def test_sequences_side_by_side(tmp_path: Path) -> None:
    (tmp_path / "two").mkdir()
    (tmp_path / "four").mkdir()
    one_each = train(tmp_path / "two", 2, "--steps", 3, "--cp", 1)
    two_each = train(tmp_path / "four", 4, "--steps", 3, "--cp", 2)
    assert losses(two_each) == pytest.approx(losses(one_each), abs=1e-4)
    assert all(line["received"] == 0 for line in one_each)
    assert all(line["received"] > 0 for line in two_each)


def workers(torchrun: int) -> dict[int, psutil.Process]:
    """Return the worker processes of a torchrun, by rank."""
    found = {}
    for process in psutil.Process(torchrun).children(recursive=True):
        try:
            rank = process.environ().get("RANK")
        except psutil.Error:
            continue
        if rank is not None:
            found[int(rank)] = process
    return found


@pytest.fixture
def log() -> Iterator[Any]:
    with tempfile.TemporaryFile() as file:
        yield file


# the library's trainer, tested below, loses a worker in every run
@pytest.mark.long
def test_training_continues_from_the_checkpoint_after_a_kill(
    shared: list[dict[str, Any]], tmp_path: Path, log: Any
) -> None:
    script, out, every = example(), tmp_path / "metrics.jsonl", 6
    assert script is not None
    options = [*SMALL, "--steps", STEPS, "--checkpoint", tmp_path / "lm.pt", "--every", every, "--out", out]
    until = time.monotonic() + 150
    seen: dict[int, psutil.Process] = {}
    # the rank to kill after this many steps
    kills = [(1, 8), (0, 22)]
    with started(command(script, 2, *options, restarts=3), threads=1, log=log.fileno()) as process:
        while process.poll() is None:
            assert time.monotonic() < until
            if kills and len(metrics(out)) >= kills[0][1]:
                members = workers(process.pid)
                seen |= {member.pid: member for member in members.values()}
                members[kills[0][0]].kill()
                kills.pop(0)
            time.sleep(0.01)
    log.seek(0)
    printed = log.read().decode(errors="replace")
    assert process.returncode == 0, printed
    assert not kills
    assert printed.count("continues with step") == 2, printed
    lines = metrics(out)
    assert [line["step"] for line in lines] == list(range(STEPS))
    assert losses(lines) == pytest.approx(losses(shared), rel=1e-6)
    assert not psutil.wait_procs(seen.values(), timeout=5)[1]


def test_sparse_training_becomes_sparse_and_continues_from_its_checkpoint(tmp_path: Path) -> None:
    """Density falls from dense to the requested one, and a run from a checkpoint repeats the same steps."""
    out = tmp_path / "metrics.jsonl"
    options = ["--tokens", 128, "--width", 32, "--heads", 2, "--density", 0.3, "--steps", 12, "--every", 8]
    options += ["--checkpoint", tmp_path / "lm.pt", "--out", out]
    here("sparse_training.py", *options)
    # the last checkpoint is that of step 8
    here("sparse_training.py", *options)
    lines = metrics(out)
    assert [line["step"] for line in lines] == [*range(12), *range(8, 12)]
    whole, again = lines[:12], lines[12:]
    density = [line["density"] for line in whole]
    assert density[:3] == [1.0] * 3
    assert density == sorted(density, reverse=True)
    assert density[-1] == 0.3
    assert losses(whole)[-1] < 0.97 * losses(whole)[0]
    assert again == whole[8:]


def test_a_patched_llama(capsys: pytest.CaptureFixture[str]) -> None:
    here("patch_llama.py", "--tokens", 256, "--window", 16)
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(":")[0] for line in lines[::3]] == ["its own attention", "set in 2 layers"]
    assert float(lines[2].rpartition(" ")[2]) < 1e-5


def test_the_librarys_trainer_continues_after_a_process_is_killed(tmp_path: Path, log: Any) -> None:
    """Two processes that share sequences learn what one alone does, although one of them is killed on the way."""
    steps, until = 8, time.monotonic() + 400
    alone, shared = tmp_path / "alone", tmp_path / "shared"
    said = ["--tokens", 512, "--model", "gpt_oss", "--steps", steps, "--every", 2]
    here("train_hf_cp.py", *said, "--folder", alone)
    wanted = metrics(alone / "metrics.jsonl")
    assert [line["step"] for line in wanted] == list(range(1, steps + 1))
    killed = False
    several = command(EXAMPLES / "train_hf_cp.py", 2, *said, "--folder", shared, restarts=2)
    with started(several, threads=1, log=log.fileno()) as process:
        while process.poll() is None and time.monotonic() < until:
            if not killed and (shared / "checkpoint-2").exists() and len(metrics(shared / "metrics.jsonl")) >= 3:
                workers(process.pid)[1].kill()
                killed = True
            time.sleep(0.01)
    log.seek(0)
    printed = log.read().decode(errors="replace")
    assert process.returncode == 0, printed
    assert killed
    assert "continues from checkpoint-" in printed
    # the steps after the checkpoint were repeated
    found = {line["step"]: line for line in metrics(shared / "metrics.jsonl")}
    assert list(found) == list(range(1, steps + 1))
    assert [found[line["step"]]["loss"] for line in wanted] == pytest.approx(losses(wanted), abs=1e-4)
    # half of the tokens, keys and values of 2 heads of 16, two layers; the window's layer receives only near tokens
    assert {line["gathered"] for line in found.values()} == {256 * 2 * 2 * 16 * 4 * 2}
    assert all(0 < line["received"] < line["gathered"] for line in found.values())


# ---- a folder that is searched -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def searching() -> dict[str, Any]:
    return runpy.run_path(str(EXAMPLES / "search_folder.py"))


def searched(
    program: dict[str, Any], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *words: object
) -> list[str]:
    small = ["--passage", 90, "--row", 200, "--batch", 2]
    monkeypatch.setattr("sys.argv", ["search_folder.py", *map(str, words), *map(str, small)])
    program["main"]()
    return capsys.readouterr().out.splitlines()


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    """Return a folder with texts that differ in their letters, one of several passages, one empty, one hidden."""
    (tmp_path / "inner").mkdir()
    words = ["alpha", "omega", "kiwi", "zebra"]
    for n, word in enumerate(words):
        (tmp_path / "inner" / f"{word}.txt").write_text(f"{word} " * (10 + 30 * n))
    (tmp_path / "empty.md").write_text("")
    (tmp_path / ".hidden.txt").write_text("kiwi")
    return tmp_path


def test_a_folder_is_embedded_searched_and_embedded_again_where_it_changed(
    searching: dict[str, Any], texts: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(*words: object) -> list[str]:
        return searched(searching, capsys, monkeypatch, *words)

    assert run("search", texts, "kiwi")[0].startswith("nothing is embedded")
    assert run("embed", texts)[0] == "4 files, 4 new or changed"
    assert run("embed", texts)[0] == "4 files, 0 new or changed"
    assert "kiwi.txt" in run("search", texts, "kiwi kiwi kiwi", "--top", 1)[0]
    every = run("search", texts, "x", "--top", 99)
    assert len(every) == sum(-(-path.stat().st_size // 90) for path in texts.rglob("[!.]*.txt"))
    (texts / "inner" / "kiwi.txt").write_text("zebra " * 10)
    # what has changed is not shown until it is embedded again
    assert not any("kiwi.txt" in line for line in run("search", texts, "x", "--top", 99))
    assert run("embed", texts)[0] == "4 files, 1 new or changed"
    assert any("kiwi.txt, passage 1" in line for line in run("search", texts, "x", "--top", 99))


def test_an_interrupted_run_goes_on_where_it_stopped(
    searching: dict[str, Any], texts: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The result is that of a run without interruption, and what was stored is not computed again."""
    encoder, computed = searching["Encoder"], []
    packed = encoder.packed

    def counting(self: Any, passages: list[list[int]]) -> Any:
        if len(computed) == 4:
            raise KeyboardInterrupt
        computed.append(len(passages))
        return packed(self, passages)

    def run(*words: object) -> list[str]:
        return searched(searching, capsys, monkeypatch, *words)

    with monkeypatch.context() as patched:
        patched.setattr(encoder, "packed", counting)
        with pytest.raises(KeyboardInterrupt):
            run("embed", texts)
    capsys.readouterr()
    left = run("embed", texts)[0]
    assert left in {f"4 files, {n} new or changed" for n in (1, 2, 3)}
    assert run("embed", texts)[0] == "4 files, 0 new or changed"
    resumed = run("search", texts, "omega", "--top", 99)
    shutil.rmtree(texts / ".search")
    run("embed", texts)
    assert run("search", texts, "omega", "--top", 99) == resumed


def test_packed_rows_are_compared_with_padded_batches(
    searching: dict[str, Any], texts: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = searched(searching, capsys, monkeypatch, "compare", texts)
    assert [line.split(":")[0] for line in lines[1:3]] == [
        "packed rows, ringweave", "padded batches of 2 by length, SDPA",
    ]  # fmt: skip
    assert float(lines[-1].rpartition(" ")[2]) < 1e-5


def test_a_sparse_model_is_trained_beside_its_dense_twin(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Both learn a text that repeats itself far apart, on the same excerpts."""
    text, out = tmp_path / "text.txt", tmp_path / "metrics.jsonl"
    text.write_text("".join(f"{n % 7} and {n % 5}; " for n in range(2000)))
    options = ["--tokens", 192, "--steps", 24, "--layers", 2, "--width", 32, "--heads", 4, "--block", 16, "--top", 4]
    here("train_nsa.py", *options, "--window", 24, "--lr", 1e-2, "--text", text, "--out", out)
    bits = {line.split()[0]: float(line.split()[1]) for line in capsys.readouterr().out.splitlines()[-2:]}
    lines = metrics(out)
    for name in ("dense", "sparse"):
        own = losses([line for line in lines if line["model"] == name])
        assert len(own) == 24
        assert own[0] == pytest.approx(5.55, abs=0.35)
        # the frequencies of the bytes alone cost 3.02 bits
        assert bits[name] < 3.0
    with pytest.raises(SystemExit, match="pass a longer one"):
        here("train_nsa.py", "--text", text, "--tokens", 30000)
