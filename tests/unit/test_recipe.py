"""Recipes: complete in and out, and refused by name when wrong."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

import flatout
from flatout.config import Recipe, from_dict, known_keys, load_recipe
from flatout.config.jobs import load_job
from flatout.config.settings import parse_setting
from flatout.train.request import Progress
from flatout.train.run_dir import Checkpoint
from flatout.utils.errors import InputError

BASE = Recipe(model="fashion-cnn", image_size=28, epochs=2, batch_size=16)
FACTS = {"classes": ["a", "b"]}
START = Checkpoint(tensors={}, progress=Progress(), recipe=BASE, data=FACTS)


PUBLISHED = {
    "fashion-mnist": "epochs=50 batch_size=1024 drop_last=true seed=1 data.mean=[0.1307] data.std=[0.3081]"
    " optimizer.name=sgd optimizer.lr=0.08 optimizer.momentum=0.5",
    "cats-dogs": "image_size=128 batch_size=32 epochs=10 loss=binary-cross-entropy"
    " augment.shear=0.2 augment.zoom=0.2 augment.flip=true",
    "mnist-parallel": "batch_size=100 epochs=2 optimizer.name=sgd optimizer.lr=0.01 log_every=200",
    "fashion-mnist-keras": "batch_size=512 epochs=5 optimizer.name=adam optimizer.lr=0.001",
    "oct-vgg16": "image_size=224 batch_size=64 epochs=1 optimizer.name=adam pretrained=true freeze=all-but-last-4",
    "caltech101": "image_size=32 batch_size=32 epochs=50 schedule.name=plateau augment.flip=true"
    " optimizer.lr=0.001 optimizer.momentum=0.9 optimizer.dampening=0.1"
    " data.mean=[0.4948,0.4857,0.4468] data.std=[0.2458,0.2424,0.2603]",
}


@pytest.mark.parametrize("job", PUBLISHED)
def test_jobs_have_the_published_figures(job: str) -> None:
    published = dict(map(parse_setting, PUBLISHED[job].split()))
    assert load_job(job).override(published) == load_job(job)


@pytest.mark.parametrize("job", [*PUBLISHED, "digits"])
def test_a_written_recipe_reads_back_equal_and_complete(job: str, tmp_path) -> None:
    recipe = load_job(job)
    path = tmp_path / "recipe.toml"
    path.write_text(recipe.to_toml("a comment\nof two lines"), encoding="utf-8")
    assert load_recipe(path) == recipe
    text = path.read_text(encoding="utf-8")
    assert text.startswith("# a comment\n# of two lines\n")
    assert all(f"{key.rpartition('.')[2]} = " in text for key in known_keys())


def test_defaults_of_a_librarys_optimizer_stay_its_own(tmp_path) -> None:
    recipe = BASE.override({"optimizer.name": "torch:RMSprop", "optimizer.momentum": 0.5, "optimizer.layer_decay": 0.7})
    (tmp_path / "recipe.toml").write_text(recipe.to_toml(), encoding="utf-8")
    text = (tmp_path / "recipe.toml").read_text(encoding="utf-8")
    assert "momentum = 0.5" in text
    assert "\neps = " not in text
    assert load_recipe(tmp_path / "recipe.toml").optimizer == recipe.optimizer
    again = recipe.override({"optimizer.name": "adam"}).optimizer
    assert (again.eps, again.momentum, again.layer_decay, again.betas) == (1e-8, 0.0, 0.7, (0.9, 0.999))


WRONG = [
    ({"schedule.corrections": "204"}, "schedule.corrections = '204': must be pairs STEP:STEPS"),
    ({"epoch": 3}, "unknown recipe key 'epoch'; did you mean 'epochs'?"),
    ({"schedule.factor": 1.0}, "schedule.factor = 1.0: must be greater than 0 and less than 1"),
    ({"epochs": 0}, "epochs = 0: must be at least 1"),
    ({"augment.flip": 1}, "augment.flip = 1: must be true or false"),
    ({"optimizer.name": "adm"}, "optimizer.name = 'adm': did you mean 'adam'?"),
    ({"optimizer.name": "lamb"}, "optimizer.name = 'lamb': known: sgd, momentum, adagrad, adam, adamw, torch:NAME"),
    ({"optimizer.name": "timm:lion", "optimizer.betas": [1.5]}, "optimizer.betas = (1.5,): must be numbers, each"),
    ({"dropout": 1}, "dropout = 1.0: must be at least 0 and less than 1"),
    ({"optimizer.nesterov": True}, "optimizer.nesterov = True: needs a momentum"),
    ({"data.mean": [0.1, 0.2], "data.std": [1, 1]}, "data.mean"),
    ({"data.valid_fraction": 0.6, "data.test_fraction": 0.5}, "leaves no training images"),
    ({"norm": "frozen"}, "norm = 'frozen'"),
    ({"data.decode": "during"}, "data.decode = 'during': is no longer available"),
    ({"exact_sums": True}, "exact_sums = True: is no longer available"),
    ({"optimizer": 3}, "optimizer = 3"),
    ({"channels": 5, "augment.policy": "randaugment"}, "policy = 'randaugment': needs images of 1 or 3 channels"),
    ({"image_size": [0, 4]}, "image_size = (0, 4): must be at least 1 and at most 8192"),
    ({"image_size": "96x160"}, "image_size = '96x160': must be a whole number of pixels, or [height, width]"),
    ({"image_size": [24, 40], "data.stored_size": [40, 32]}, "stored_size = (40, 32): must be at least [24, 40], the"),
]


@pytest.mark.parametrize(("changes", "message"), WRONG)
def test_wrong_values_are_refused_by_name(changes: dict[str, object], message: str) -> None:
    with pytest.raises(InputError) as caught:
        BASE.override(changes)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_whole_numbers_and_empty_lists_are_read_as_such() -> None:
    assert type(BASE.override({"data.bits": 8.0}).data.bits) is int
    assert BASE.override({"data.class_names": ""}).data.class_names == ()


@pytest.mark.parametrize("decode", ["auto", "before"])
def test_keys_of_older_recipes_are_ignored_where_they_change_nothing(decode: str) -> None:
    older = {"exact_sums": False, "data.decode": decode, "augment.start_size": 0, "data.resize": "stretch"}
    assert BASE.override(older) == BASE


@pytest.mark.parametrize("changes", [{"epochs": 77}, {"max_steps": 5}, {"batch_size": 7}, {"schedule.name": "step"}])
def test_another_length_resets_its_corrections(changes: dict[str, object]) -> None:
    corrected = BASE.override({"schedule.corrections": "204:1171 409:1290"})
    assert corrected.override({"seed": 9}).schedule.earlier_lengths == ((204, 1171), (409, 1290))
    assert corrected.override(changes).schedule.corrections == ""


def test_missing_keys_and_files(tmp_path) -> None:
    with pytest.raises(InputError, match="'model' is missing"):
        from_dict({"epochs": 1})
    path = tmp_path / "r.toml"
    with pytest.raises(InputError, match=r"r\.toml"):
        load_recipe(path)
    path.write_text("epochs = [", encoding="utf-8")
    with pytest.raises(InputError, match=r"r\.toml: cannot be read as a recipe"):
        load_recipe(path)


def test_another_optimizer_resets_its_section_but_for_the_rate() -> None:
    recipe = load_job("fashion-mnist").override({"optimizer.name": "adam", "optimizer.lr": 0.001})
    assert recipe.optimizer == flatout.Adam(lr=0.001)
    assert load_job("mnist-parallel").override({"optimizer.name": "momentum"}).optimizer.momentum == 0.9
    assert load_job("caltech101").override({"optimizer.lr": 0.01}).optimizer.dampening == 0.1
    recipe = BASE.override({"optimizer.lr_base_batch": 256, "optimizer.lr_scaling": "sqrt"})
    assert recipe.override({"optimizer.lr": 0.1}).optimizer.lr_scaling == "sqrt"
    other = recipe.override({"optimizer.name": "momentum"}).optimizer
    assert (other.lr_base_batch, other.lr_scaling) == (256, "linear")
    assert recipe.override({"optimizer.name": "adamw"}).optimizer.lr_scaling == "sqrt"
    assert flatout.Adam(lr_scaling="linear").lr_scaling == "linear"


def test_a_run_may_go_on_with_other_memory_settings_but_no_other_training() -> None:
    START.check_resumable(BASE.override({"shard": "full", "micro_batch": 8}), FACTS, print)
    for key, value in (("dropout", 0.0), ("optimizer.lr_base_batch", 16)):
        with pytest.raises(InputError, match=key):
            START.check_resumable(BASE.override({key: value}), FACTS, print)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("epochs=3", ("epochs", 3)),
        ("optimizer.lr=1e-3", ("optimizer.lr", 1e-3)),
        ("augment.flip=true", ("augment.flip", True)),
        ("optimizer.name=adam", ("optimizer.name", "adam")),
        ("data.mean=[0.1, 0.2, 0.3]", ("data.mean", [0.1, 0.2, 0.3])),
        ("data.mean=0.1,0.2,0.3", ("data.mean", [0.1, 0.2, 0.3])),
        ("data.path=/a/b=c", ("data.path", "/a/b=c")),
        ("freeze=a.*,b.*", ("freeze", "a.*,b.*")),
    ],
)
def test_settings_are_parsed(text: str, expected: tuple[str, object]) -> None:
    assert parse_setting(text) == expected
    with pytest.raises(InputError, match="KEY=VALUE"):
        parse_setting(text.partition("=")[0])


def test_a_list_of_texts_needs_no_quotes() -> None:
    for text in ("data.class_names=cat,dog", "data.class_names=cat, dog"):
        assert BASE.override(dict([parse_setting(text)])).data.class_names == ("cat", "dog")


@given(
    st.dictionaries(
        st.sampled_from(known_keys()),
        st.one_of(st.integers(), st.floats(), st.text(max_size=5), st.booleans(), st.lists(st.floats(), max_size=3)),
        max_size=4,
    )
)
def test_any_override_gives_a_recipe_or_one_message(changes: dict[str, object]) -> None:
    try:
        recipe = BASE.override(changes)
    except InputError as error:
        assert str(error)
    else:
        assert from_dict(recipe.to_dict()) == recipe
