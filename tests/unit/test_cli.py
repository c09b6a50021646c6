"""The words of the command line: operands, flags, and what is suggested for those that do not exist."""

import json
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from flatout.cli.commands import COMMANDS, changes_of
from flatout.cli.flags import parse
from flatout.cli.main import main
from flatout.config.settings import parse_setting
from flatout.train.recipes import start_of
from tests.conftest import Command


@pytest.mark.parametrize(
    "words",
    [
        "evaluate --run runs/a photos --json",
        "evaluate --run=runs/a --data photos --json",
        "evaluate runs/a --data photos --json",
        "evaluate --data photos --json runs/a",
    ],
)
def test_operands_are_given_by_position_or_by_name(words: str) -> None:
    args = parse([*words.split(), "--devices", "AUTO"])
    assert (args.run, args.data, args.json, args.devices) == ("runs/a", "photos", True, "auto")


@pytest.mark.parametrize("words", ["a --json -- -x.jpg", "--json -- a -x.jpg", "--json a -- -x.jpg"])
def test_names_after_two_dashes_may_begin_with_one(words: str) -> None:
    args = parse(["predict", *words.split()])
    assert (args.run, args.files, args.json) == ("a", ["-x.jpg"], True)


def test_published_weights_are_required_or_refused_or_left_to_the_data() -> None:
    refused = {"pretrained": False, "weights": ""}
    for words, changes in (("", {}), ("--pretrained", {"pretrained": True}), ("--no-pretrained", refused)):
        assert changes_of(parse(["train", "photos", *words.split()])) == changes


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("trian digits", "flatout: 'trian': did you mean 'train'?"),
        ("train digits --epoch 3", "there is no flag --epoch; did you mean '--epochs'?"),
        ("train digits more", "unexpected argument 'more'"),
        ("train digits --epochs many", "argument --epochs: invalid int value: 'many'"),
        ("fly", "flatout: 'fly': "),
        ("predict R", "FILE... is missing"),
        ("pack photos --out x", "--size"),
        ("predict R ", "an argument is empty"),
        ("train --data= --epochs 1", "an argument is empty"),
    ],
)
def test_wrong_words_get_one_line_and_2(words: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        parse(words.split(" "))
    said = capsys.readouterr().err
    assert ended.value.code == 2
    assert message in said
    assert said.count("\n") == 1


SMALL = "plan --model timm:resnet18 --images 1000 --classes 10 --image-size 64"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("check photos --epochs 0", "--epochs requires --labels"),
        ("check photos --labels --minutes 1 --job digits", "needs a generated recipe: remove --job"),
        ("lr digits --model no-such-net", "no-such-net"),
        ("lr digits --set data.std=0", "data.std"),
        ("scale digits --devices cpu,gpu", "--devices gpu"),
        ("scale digits --devices cpu,,2xcpu", "is empty or named twice"),
        ("scale digits --devices cpu,2xcpu,cpu", "is empty or named twice"),
        ("scale digits --devices cpu,99xcuda", "99xcuda"),
        ("scale digits --devices cpu --data nowhere", "nowhere"),
        ("plan caltech101", "--topology v5e:2x4"),
        ("plan caltech101 --topology v5e:2x4 --gpu h100", "either --gpu or --topology"),
        ("plan caltech101 --topology v5e:2x4", "--images N and --classes K"),
        ("plan caltech101 --topology v5e:2x4 --inference", "--inference: requires --gpu"),
        ("plan caltech101 --topology v9:2x4", "v2, v3"),
        ("plan caltech101 --topology v5e:3x3", "2x2, 2x4, 4x4"),
        ("plan caltech101 --topology v5e:2x4,v5e:2x4", "a topology is named twice"),
        ("plan caltech101 --topology v5e:2x4 --price nan", "--price nan"),
        ("plan caltech101 --topology v5e:2x4 --images 0", "--images 0"),
        ("plan --gpu l4", "plan needs a JOB, or --gpu with --model NAME, --images N and --classes K"),
        (f"{SMALL} --topology v5e:2x2", "plan needs a JOB"),
        (f"{SMALL} --gpu l4,rtx4091", "did you mean 'rtx4090'"),
        (f"{SMALL} --gpu t4 --set precision=bf16", "--gpu t4: does not compute in bf16"),
        (f"{SMALL} --gpu l4 --set linear_probe=true --epochs 0", "epochs = 0: the job fits the head"),
    ],
)
def test_wrong_input_gets_one_message_and_leaves_nothing(
    words: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: Command
) -> None:
    monkeypatch.chdir(tmp_path)
    said = command(*words.split(), code=2).splitlines()[-1]
    assert said.startswith("flatout: ")
    assert message in said
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "words", ["look sklearn:digits", "lr digits", "scale digits --devices cpu", "plan digits --gpu h100"]
)
def test_a_folder_in_use_is_left_alone(words: str, tmp_path: Path, command: Command) -> None:
    """By every command that writes a folder."""
    (tmp_path / "mine.txt").write_text("mine")
    assert "not an empty folder; choose another --out" in command(*words.split(), "--out", tmp_path, code=2)
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


def test_without_a_command_help_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([])
    assert ended.value.code == 2
    assert "train a job" in capsys.readouterr().err


def test_the_folder_beside_is_suggested(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: Command) -> None:
    (tmp_path / "my-photos").mkdir()
    monkeypatch.chdir(tmp_path)
    for words in (["train", "my-photoz"], ["train", "digits", "--data", "my-photoz"], ["check", "my-photoz"]):
        assert "did you mean 'my-photos'?" in command(*words, code=2)


def test_printed_json_has_null_for_a_value_that_is_not_a_number(
    monkeypatch: pytest.MonkeyPatch, command: Command
) -> None:
    def evaluate(*arguments: object) -> tuple[dict[str, float], list[str]]:
        """Return the result of a model that has diverged."""
        return {"test_loss": math.nan}, []

    monkeypatch.setitem(COMMANDS, "evaluate", replace(COMMANDS["evaluate"], do=evaluate))
    printed = command("evaluate", "runs/a", "--json")
    assert json.loads(printed, parse_constant=pytest.fail) == {"test_loss": None}


def test_the_cache_is_shown_and_cleared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: Command) -> None:
    monkeypatch.setenv("FLATOUT_CACHE", str(tmp_path))
    mine = [tmp_path / "photos" / "1.jpg", tmp_path / "weights" / "resnet50.safetensors"]
    for file in (*mine, download := tmp_path / "downloads" / "photos.zip"):
        file.parent.mkdir()
        file.touch()
    download.write_bytes(bytes(2_000_000))
    assert "2.0 MB" in command("cache")
    assert [entry["bytes"] for entry in json.loads(command("cache", "--json"))["entries"]] == [2_000_000]
    assert "in 1 entries removed" in command("cache", "--clear")
    assert not download.exists()
    assert all(file.is_file() for file in mine)


REFUSED_AT_ONCE = {
    "--set optimizer.lr=high": "flatout: optimizer.lr = 'high': must be a finite number",
    "--set learning_rate=1": "flatout: unknown recipe key 'learning_rate'; did you mean 'optimizer.lr'?",
    "--set Flip=true": "flatout: unknown recipe key 'Flip'; did you mean 'augment.flip'?",
    "--epochs -1": "flatout: epochs = -1: must be at least 0",
    "--out old": "flatout: old: exists; choose another --out",
    "--restarts -1": "flatout: --restarts -1: must be 0 or more",
    "--hang-timeout 0": "flatout: --hang-timeout 0: must be a finite number greater than 0",
    "--devices nonsense": "flatout: --devices nonsense: must be auto, cpu",
}


def test_wrong_flags_are_refused_before_torch_is_imported_and_the_data_is_looked_at(tmp_path: Path) -> None:
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "file").touch()
    (tmp_path / "photos").mkdir()
    code = (
        "import sys; from flatout.cli.main import main\n"
        f"codes = [main(['train', 'photos', *words.split()]) for words in {list(REFUSED_AT_ONCE)}]\n"
        "assert set(codes) == {2} and not {'torch', 'matplotlib'} & sys.modules.keys(), codes"
    )
    ended = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=100)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout == "looking at photos\n"
    for line, message in zip(ended.stderr.splitlines(), REFUSED_AT_ONCE.values(), strict=True):
        assert line.startswith(message)


@pytest.mark.parametrize("key", ["epochs=0", "optimizer.nesterov=true"])
def test_settings_that_suit_some_recipe_wait_for_it(key: str) -> None:
    _, is_complete = start_of(None, dict([parse_setting(key)]))
    assert not is_complete


def test_an_address_is_shown_without_what_may_be_secret(capsys: pytest.CaptureFixture[str]) -> None:
    address = "https://me:secret@example.test/pets.zip?token=secret"
    assert main(["train", address, "--devices", "nonsense"]) == 2
    assert capsys.readouterr().out == "looking at pets.zip\n"
