import numpy as np
import pytest
from meshwright.cost_models.learned.kernels import ResidualModel
from meshwright.fitting.estimator import RooflineRegressor, save_model
from sklearn.ensemble import HistGradientBoostingRegressor
from sklearn.utils.estimator_checks import parametrize_with_checks


@parametrize_with_checks([RooflineRegressor()])
def test_scikit_learns_own_checks(estimator, check):
    check(estimator)


def _rows(num_rows=600, seed=0):
    random = np.random.default_rng(seed)
    x = random.uniform(0, 1, (num_rows, 3))
    roofline = 10 ** random.uniform(-6, -2, num_rows)
    measured = roofline * np.exp(np.sin(6 * x[:, 0]) * x[:, 1] + 0.01 * random.standard_normal(num_rows))
    return np.column_stack([x[:, :2], roofline, x[:, 2]]), measured


def _fitted(residual=None):
    x, y = _rows()
    return RooflineRegressor(roofline_column=2, residual=residual).fit(x, y)


def test_residual_is_learned_whatever_the_scale_of_the_roofline():
    x, y = _rows(seed=1)
    error = np.abs(_fitted().predict(x) / y - 1)
    assert error.mean() < 0.08
    assert np.abs(x[:, 2] / y - 1).mean() > 0.25


def test_packed_trees_predict_what_scikit_learn_does(tmp_path):
    regressor = _fitted(HistGradientBoostingRegressor(max_iter=30))
    save_model(regressor.to_model(("a", "b", "c"), {"rows": 600}), tmp_path / "model.npz")
    model = ResidualModel.read(tmp_path / "model.npz")
    x, _ = _rows(seed=2)
    x[:100, :2] *= 3  # outside of the trained range too
    expected = np.log(regressor.predict(x) / x[:, 2])
    names = {"a": x[:, 0], "b": x[:, 1], "c": x[:, 3], "ignored": x[:, 0]}
    # Leaves are stored as float32.
    close = np.isclose(model.log_residual(names), expected, atol=1e-5)
    assert close.mean() > 0.995
    assert model.provenance == {"rows": 600}
    assert model.features == ("a", "b", "c")


def test_features_are_clipped_to_the_trained_range():
    model = _fitted().to_model(("a", "b", "c"), {})
    inside, outside = (np.array([[edge, 0.5, 0.5]]) for edge in (model.high[0], 1e9))
    assert model.predict(outside) == model.predict(inside)
    assert len(model.predict(np.zeros((0, 3)))) == 0


def test_times_that_are_not_positive_are_refused():
    x, y = _rows()
    with pytest.raises(ValueError, match="positive"):
        RooflineRegressor(roofline_column=2).fit(x, -y)
    x[0, 2] = 0.0
    with pytest.raises(ValueError, match="roofline"):
        RooflineRegressor(roofline_column=2).fit(x, y)
