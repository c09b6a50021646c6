"""Keras 3 models on the XLA engine, against a loop written by hand with Keras and JAX alone."""

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import flatout
from flatout.data.batches import training_batches
from flatout.models.layers import freeze
from tests.engine.engines import make_engine
from tests.engine.test_against_plain_loop import make_recipe, make_samples
from tests.engine.test_xla import assert_same, trained

# Keras reads it once, when it is first imported.
os.environ["KERAS_BACKEND"] = "jax"
keras = pytest.importorskip("keras", reason="needs Keras 3: pip install 'flatout[dev]'")
pytest.importorskip("jax", reason="needs JAX: pip install 'flatout[tpu]'")
# Starts JAX with the devices that all tests share, before Keras does.
make_engine("xla 1", nn.Flatten(), make_recipe())

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402

from flatout.models.keras import KerasModule  # noqa: E402

pytestmark = pytest.mark.usefixtures("no_pictures_in_module")
layers = keras.layers
SGD = {"lr": 0.05, "momentum": 0.9}


def pets_net(dropout: float = 0.0) -> Any:
    """The second system's net, a third as deep."""
    keras.utils.set_random_seed(3)
    body = [layers.Conv2D(8, 3, padding="same", activation="relu", kernel_initializer="he_uniform")]
    body += [layers.MaxPooling2D(), layers.Flatten(), layers.Dense(16, activation="relu"), layers.Dropout(dropout)]
    return beginning(*body, layers.Dense(1, activation="sigmoid"))


def normed_net() -> Any:
    """A functional model with a nested one, batch statistics in both and of both kinds, and softmax as a layer."""
    keras.utils.set_random_seed(3)
    inner = keras.Sequential([keras.Input((10, 10, 6)), layers.BatchNormalization(), layers.ReLU()])
    x = images = keras.Input((12, 12, 1))
    x = inner(layers.Conv2D(6, 3, use_bias=False)(x))
    x = layers.Add()([x, layers.Conv2D(6, 1)(x)])
    x = layers.Flatten()(layers.MaxPooling2D()(x))
    x = layers.BatchNormalization(scale=False)(layers.Dense(16)(x))
    return keras.Model(images, layers.Softmax()(layers.Dense(5)(keras.ops.relu(x))))


def beginning(*rest: Any) -> Any:
    return keras.Sequential([keras.Input((12, 12, 1)), *rest])


def ending(*last: Any) -> Any:
    return beginning(layers.Flatten(), *last)


def recipe_for(**changes: Any) -> flatout.Recipe:
    sgd = {f"optimizer.{key}": value for key, value in SGD.items()}
    return make_recipe(**{"epochs": 1, "optimizer.name": "momentum", **sgd, **changes})


def splits(classes: int) -> dict[str, Any]:
    """Fifty images make three batches of 16 and one of 2, which fourteen samples of padding fill."""
    parts = {"train": make_samples(50, classes=classes), "valid": make_samples(20, classes=classes)}
    return {name: (samples.images, samples.labels) for name, samples in parts.items()}


def fitted(model: Any, data: Any, out: Path, **changes: Any) -> flatout.Run:
    options = {"engine": "auto", "devices": "2xcpu", "resume": False, **changes}
    given = {key: options.pop(key) for key in ("engine", "devices", "resume")}
    return flatout.fit(model, data, job=recipe_for(**options), out=out, quiet=True, **given)


def weights_of(model: Any) -> list[np.ndarray]:
    return [np.array(variable.value) for variable in model.weights]


def normalised(images: np.ndarray) -> np.ndarray:
    return ((images / np.float32(255) - 0.4) / 0.3).astype(np.float32)


def calibrated(run: flatout.Run, scores: np.ndarray) -> np.ndarray:
    """Return probabilities [N, K] as the run's temperature makes them, from those of Keras."""
    powers = scores ** (1 / run.task.temperature)
    return powers / powers.sum(axis=1, keepdims=True)


def plain_loop(model: Any, images: np.ndarray, labels: np.ndarray, seed: int) -> list[np.ndarray]:
    """Train as anybody would by hand, the last activation and the short last batch as they are; return the weights."""

    @jax.jit
    def step(trained: Any, others: Any, velocities: Any, x: jax.Array, y: jax.Array) -> Any:
        def mean_loss(trained: Any) -> Any:
            scores, after = model.stateless_call(trained, others, x, training=True)
            scores = jnp.concatenate([1 - scores, scores], axis=1) if scores.shape[1] == 1 else scores
            return -jnp.log(scores[jnp.arange(len(y)), y]).mean(), after

        gradients, after = jax.grad(mean_loss, has_aux=True)(trained)
        velocities = [SGD["momentum"] * v + g for v, g in zip(velocities, gradients, strict=True)]
        return [t - SGD["lr"] * v for t, v in zip(trained, velocities, strict=True)], after, velocities

    trained = [v.value for v in model.trainable_variables]
    others = [v.value for v in model.non_trainable_variables]
    velocities = [jnp.zeros_like(t) for t in trained]
    for batch in training_batches(seed, 0, len(labels), 16):
        chosen = batch.samples[: batch.count]
        trained, others, velocities = step(trained, others, velocities, normalised(images[chosen]), labels[chosen])
    for variables, values in ((model.trainable_variables, trained), (model.non_trainable_variables, others)):
        for variable, value in zip(variables, values, strict=True):
            variable.assign(value)
    return weights_of(model)


def test_an_epoch_equals_a_plain_loops(tmp_path: Path) -> None:
    model, data = normed_net(), splits(5)
    before = weights_of(model)
    run = fitted(model, data, tmp_path / "run")
    oracle = normed_net()
    expected = plain_loop(oracle, *data["train"], seed=run.recipe.seed)
    trained = run.model.to_keras()  # pyright: ignore[reportCallIssue]
    assert all(map(np.array_equal, weights_of(model), weights_of(trained))), "the user's model is the trained one"
    assert trained.layers[-1].name == model.layers[-1].name
    for found, value, old in zip(weights_of(trained), expected, before, strict=True):
        np.testing.assert_allclose(found, value, rtol=1e-4, atol=1e-5)
        assert not np.array_equal(found, old)

    # What Keras says of new images is what the run says, loaded anew too, into a model of the same build.
    images, labels = data["valid"]
    scores = oracle.predict(normalised(images), verbose=0)
    loaded = flatout.load(tmp_path / "run", model=normed_net())
    np.testing.assert_allclose(loaded.probabilities(images), calibrated(loaded, scores), atol=1e-4)
    np.testing.assert_array_equal([int(p.classes[0]) for p in run.predict(images, top=1)], scores.argmax(1))
    assert run.summary["valid_correct"] == (scores.argmax(1) == labels).sum()
    assert loaded.evaluate(data, devices="cpu")["valid_correct"] == run.summary["valid_correct"]


def test_a_model_that_rescales_gets_pixels_that_are_not_normalised(tmp_path: Path) -> None:
    flip_and_scale = [layers.RandomFlip(), layers.Rescaling(1 / 127.5, offset=-1)]
    model, data = beginning(*flip_and_scale, layers.Flatten(), layers.Dense(5)), splits(5)
    recipe = recipe_for(**{"data.mean": (0.4,), "data.std": (0.3,)})
    run = flatout.fit(model, data, job=recipe, out=tmp_path / "run", devices="cpu", quiet=True)
    assert (run.recipe.data.mean, run.recipe.data.std) == ((0.0,), (1 / 255,))
    images = data["valid"][0]
    scores = np.asarray(keras.ops.softmax(model.predict(images, verbose=0)))
    np.testing.assert_allclose(run.probabilities(images), calibrated(run, scores), atol=1e-4)


@pytest.mark.slow
def test_dropout_goes_by_the_seed(tmp_path: Path) -> None:
    """Not by Keras's, nor by how many devices there are, nor by where a run stopped."""
    recipe = recipe_for(epochs=2, loss="binary-cross-entropy")
    whole = trained(make_engine("xla 8", KerasModule(pets_net(dropout=0.4)), recipe), recipe, 50, classes=2)
    data = splits(2)
    fitted(pets_net(dropout=0.4), data, tmp_path / "run")
    keras.utils.set_random_seed(8)
    resumed = fitted(pets_net(dropout=0.4), data, tmp_path / "run", epochs=2, resume=True)
    expected = {name.removeprefix("model."): t for name, t in whole.items() if name.startswith("model.")}
    assert_same(resumed.model.state_dict(), expected)


def test_frozen_layers_stay() -> None:
    """Whether Keras froze them or the recipe, their batch statistics too."""
    model = normed_net()
    inner = next(layer for layer in model.layers if isinstance(layer, keras.Sequential))
    inner.trainable = False
    module, recipe = KerasModule(model), recipe_for()
    before = {f"model.{name}": value.clone() for name, value in module.state_dict().items()}
    freeze(module, "batch_normalization.*")
    after = trained(make_engine("xla 2", module, recipe), recipe, 50)
    same = {name for name, value in before.items() if torch.equal(value, after[name])}
    assert same == {name for name in before if "batch_normalization" in name}


def ending_in_an_operation() -> Any:
    images = keras.Input((12, 12, 1))
    return keras.Model(images, keras.ops.softmax(layers.Dense(5)(layers.Flatten()(images))))


class Own(keras.Model):
    def call(self, x: Any) -> Any:
        return x


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (Own, "must be a Sequential or functional keras.Model .*, not Own"),
        (lambda: keras.Sequential([layers.Flatten(), layers.Dense(5)]), "begins with keras.Input"),
        (lambda: ending(layers.Dense(5, kernel_regularizer="l2")), "optimizer.weight_decay"),
        (lambda: ending(layers.Dense(5, activity_regularizer="l2")), "adds terms to the loss"),
        (lambda: ending(layers.Dense(5, activation="sigmoid")), "sigmoid over 5 outputs"),
        (ending_in_an_operation, "keras.ops.softmax: end it in a layer"),
        (lambda: ending(layers.Dense(7)), r"must return logits \[N, 5\]"),
        (lambda: ending(layers.Reshape((144, 1))), "has one output"),
    ],
)
def test_models_that_cannot_be_trained(build: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(flatout.InputError, match=message):
        fitted(build(), splits(5), tmp_path / "run")


def test_settings_that_do_not_suit_them(tmp_path: Path) -> None:
    with pytest.raises(flatout.InputError, match="--engine xla"):
        fitted(pets_net(), splits(2), tmp_path / "run", engine="torch", devices="cpu")
    with pytest.raises(flatout.InputError, match="norm = 'global'"):
        fitted(normed_net(), splits(5), tmp_path / "run", norm="per-device")


def test_keras_must_run_on_jax(monkeypatch: pytest.MonkeyPatch) -> None:
    model = ending(layers.Dense(2))
    monkeypatch.setattr(keras.backend, "backend", lambda: "numpy")
    with pytest.raises(flatout.InputError, match="Keras runs on numpy here; set KERAS_BACKEND=jax"):
        KerasModule(model)
