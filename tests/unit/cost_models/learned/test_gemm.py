"""Matrix products: laws of the shipped model, calibration, and scores on measured tables where those are present."""

from pathlib import Path

import numpy as np
import pytest
from meshwright.cost_models.hardware.machine import gemm_rates, is_measured
from meshwright.cost_models.learned import calibration, kernels
from meshwright.schema.cluster import Device, GemmFit
from meshwright.schema.profile import MatmulPoint
from meshwright.schema.task import Precision

SHARED = Path(__file__).resolve().parents[5] / "shared/data"
KNOWN = ("A100", "H100", "H200", "B200", "GB200", "L40S")
UNMEASURED = ("V100", "MI300X", "H20", "RTX4090")


def _rates(name, precision="bf16-mixed"):
    device = Device.named(name)
    return gemm_rates(device, "fp16-mixed" if device.peak_flops_per_s.bf16 is None else precision)


def _square(size):
    return (np.asarray(size, dtype=float),) * 3


@pytest.mark.parametrize("name", KNOWN + UNMEASURED)
def test_efficiency_stays_below_the_peak_and_grows_with_size(name):
    rates, sizes = _rates(name), np.array([64.0, 512, 4096, 16384])
    seconds = kernels.gemm_seconds(*_square(sizes), rates)
    device = Device.named(name)
    efficiency = 2 * sizes**3 / seconds / (device.peak_flops_per_s.bf16 or device.peak_flops_per_s.fp16)
    assert np.all(efficiency < device.max_clock_ratio)
    assert np.all(np.diff(efficiency[:3]) > 0)
    assert efficiency[-1] > 0.3


@pytest.mark.parametrize("name", KNOWN + UNMEASURED)
@pytest.mark.parametrize("axis", range(3))
def test_twice_the_work_never_takes_less_time(name, axis):
    """By trees only nearly so: a factor of two in one size may gain 10 % from a better fitting kernel, no more."""
    sizes = np.stack(np.meshgrid(*([2.0 ** np.arange(8, 15)] * 3), indexing="ij"), axis=-1).reshape(-1, 3)
    doubled = sizes.copy()
    doubled[:, axis] *= 2
    rates = _rates(name)
    ratio = kernels.gemm_seconds(*doubled.T, rates) / kernels.gemm_seconds(*sizes.T, rates)
    assert ratio.min() > 0.9
    assert np.median(ratio) > 1.5


def test_equal_shapes_are_evaluated_once_and_keep_their_places():
    rates = _rates("H100")
    random = np.random.default_rng(0)
    m, n, k = (random.choice([256.0, 1024.0, 4096.0], 500) for _ in range(3))
    alone = np.array(
        [kernels.predict(*(np.array([size]) for size in row), rates)[0] for row in zip(m, n, k, strict=True)]
    )
    assert np.allclose(kernels.gemm_seconds(m, n, k, rates), alone, rtol=1e-12)
    assert kernels.gemm_seconds(m.reshape(20, 25), n.reshape(20, 25), k.reshape(20, 25), rates).shape == (20, 25)


def test_gradients_are_products_of_the_same_three_sizes():
    rates, m, n, k = _rates("A100"), np.array([4096.0]), np.array([1536.0]), np.array([5120.0])
    backward = kernels.gemm_seconds(m, n, k, rates, which="input_gradient")
    assert backward == kernels.gemm_seconds(m, k, n, rates)
    ratio = kernels.shipped_model("gemm").provenance["weight_gradient_ratio"]
    assert 1.02 < ratio < 1.08
    assert kernels.gemm_seconds(m, n, k, rates, which="weight_gradient") == ratio * kernels.gemm_seconds(k, n, m, rates)


def test_a_device_of_which_only_the_data_sheet_is_known_is_less_certain():
    errors = kernels.shipped_model("gemm").provenance["relative_error"]
    assert 0.03 < errors["devices"] < errors["architectures"] < errors["unknown"] < 0.5
    assert is_measured(Device.named("H100"))
    assert not is_measured(Device.named("H20"))


def test_a_device_that_brings_its_own_fit_has_that_one():
    fit = GemmFit(launch_s=7e-6, compute_efficiency=0.5, memory_efficiency=0.6, source="measured elsewhere")
    rates = gemm_rates(Device.named("H100").replace(gemm=fit), "bf16-mixed").coefficients
    assert (rates.launch_s, rates.compute_efficiency, rates.memory_efficiency) == (7e-6, 0.5, 0.6)


@pytest.mark.parametrize(("architecture", "precision"), [("hopper", "bf16-mixed"), ("", "fp8"), ("volta", "fp32")])
def test_no_shape_is_slower_at_higher_rates(architecture: str, precision: Precision) -> None:
    """Of a device that only its own file describes: the learned residual must not take it for a slower one."""
    sheet = Device.named("H100").replace(name="one", architecture=architecture)
    m, n, k = 2 ** np.random.default_rng(2).uniform(5, 15, (3, 400))
    last = np.inf
    for factor in (0.1, 0.9, 1.0, 1.01, 1.5, 3.0):
        peaks = {name: rate and rate * factor for name, rate in sheet.peak_flops_per_s.model_dump().items()}
        traffic = sheet.memory_bandwidth_bytes_per_s * factor**0.5
        device = sheet.replace(
            peak_flops_per_s=sheet.peak_flops_per_s.replace(**peaks), memory_bandwidth_bytes_per_s=traffic
        )
        seconds = kernels.predict(m, n, k, gemm_rates(device, precision))
        assert np.all(seconds <= last)
        last = seconds


def test_fp8_products_are_faster_than_bf16_by_less_than_the_peaks():
    ratio = kernels.gemm_seconds(*_square([8192.0]), _rates("H100", "bf16-mixed")) / kernels.gemm_seconds(
        *_square([8192.0]), _rates("H100", "fp8")
    )
    assert 1.1 < ratio[0] < 2.0


def test_calibration_follows_measured_points():
    """A device half as fast as its kind: ten points halve the gap, a hundred all but close it; no points change nothing."""
    rates = _rates("V100")._replace(sustained_ratio=1.0)  # points are short benchmarks
    random = np.random.default_rng(0)
    m, n, k = 2 ** random.uniform(7, 14, (3, 400))
    truth = kernels.predict(m, n, k, rates._replace(coefficients=rates.coefficients._replace(compute_efficiency=0.35)))
    truth = truth * np.exp(0.03 * random.standard_normal(400))
    errors = []
    for number in (0, 10, 100):
        fitted = calibration.calibrate(m[:number], n[:number], k[:number], truth[:number], rates)
        errors.append(np.mean(np.abs(kernels.predict(m[100:], n[100:], k[100:], fitted) / truth[100:] - 1)))
    assert errors[0] > 0.2
    assert errors[1] < 0.5 * errors[0]
    assert errors[2] < 0.06
    assert calibration.calibrate(m[:0], n[:0], k[:0], truth[:0], rates) is rates


def test_a_profile_is_the_models_own_data_for_its_device():
    """A GPU a third slower than its data sheet says: its points bring the rates there, in their own dtype only."""
    device, rates = Device.named("H100"), _rates("H100")._replace(sustained_ratio=1.0)
    random = np.random.default_rng(1)
    shapes = [tuple(int(size) for size in 2 ** random.integers(7, 14, 3)) for _ in range(60)]
    points = tuple(
        MatmulPoint(
            dtype="bf16",
            m=m,
            n=n,
            k=k,
            time_s=1.5 * kernels.predict(*(np.array([float(x)]) for x in (m, n, k)), rates)[0],
        )
        for m, n, k in shapes
    )
    own = gemm_rates(device, "bf16-mixed", 1.0, points)
    size = _square([3072.0])
    short = own._replace(sustained_ratio=1.0)
    assert kernels.predict(*size, short)[0] == pytest.approx(1.5 * kernels.predict(*size, rates)[0], rel=0.1)
    assert own is not rates
    assert gemm_rates(device, "bf16-mixed", 1.0, points).correction is own.correction  # found once for a profile
    assert gemm_rates(device, "fp32", 1.0, points) == _rates("H100", "fp32")


def test_artefact_says_where_it_comes_from():
    provenance = kernels.shipped_model("gemm").provenance
    assert provenance["rows"] > 100_000
    assert {"sources", "date", "command", "scikit_learn", "scores", "relative_error"} <= set(provenance)


@pytest.mark.skipif(not (SHARED / "operators/gemm.parquet").exists(), reason="measured tables are not here")
def test_measured_products_are_met():
    """The shipped model on a sample of the rows it was fitted on: a change of features without a new fit would show."""
    fit = pytest.importorskip("meshwright.fitting.gemm")
    rows = fit.read_rows(SHARED)
    rows = rows[rows.software == "sglang"].sample(4000, random_state=1)
    for device, part in rows.groupby("device"):
        rates = _rates(device)._replace(sustained_ratio=1.0)
        sizes = (part[name].to_numpy() for name in "mnk")
        error = np.abs(kernels.predict(*sizes, rates) / part.seconds.to_numpy() - 1)
        assert error.mean() < 0.10, device
