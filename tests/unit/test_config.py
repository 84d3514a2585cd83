"""Configuration files: every shipped one parses, and mistakes are named."""

from pathlib import Path

import pytest

from moebius.rollout.config import RolloutConfig, load_config
from moebius.rollout.errors import BadInput

CONFIGS = Path(__file__).parents[2] / "configs"
SHIPPED = sorted(path for path in CONFIGS.rglob("*") if path.suffix in (".yaml", ".yml"))
MINIMAL = "ranks: 2\nengine: {model: m}\n"


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "c.yaml"
    path.write_text(text)
    return path


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.name)
def test_shipped_configs_parse(path):
    config = load_config(path)
    assert config.ranks >= 2
    assert RolloutConfig.model_validate(config.model_dump()) == config


def test_there_are_shipped_configs():
    assert {"cpu_tiny.yaml", "qwen3_30b_a3b_x2.yaml", "qwen3_235b_a22b_x8.yaml"} <= {path.name for path in SHIPPED}


def test_defaults(tmp_path):
    config = load_config(write(tmp_path, MINIMAL))
    assert (config.device, config.startup_timeout_s, config.step_timeout_s) == ("auto", 600, None)
    assert config.sampling.max_tokens == 256
    assert config.engine.policy.kind == "rollout"


def test_overrides_in_order(tmp_path):
    overrides = ["engine.policy.threshold=8", "sampling.stop=[a, b]", "step_timeout_s=1.5", "step_timeout_s=null"]
    config = load_config(write(tmp_path, MINIMAL), [*overrides, "engine.model=a=b", "sampling.temperature=1e-1"])
    assert config.engine.policy.threshold == 8
    assert config.sampling.stop == ["a", "b"]
    assert config.step_timeout_s is None
    assert config.engine.model == "a=b"
    assert config.sampling.temperature == 0.1


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (MINIMAL + "rank: 3", "unknown key 'rank'; did you mean 'ranks'"),
        ("ranks: 2\nengine: {model: m, dtyp: auto}", "in 'engine': unknown key 'dtyp'; did you mean 'dtype'"),
        (
            "ranks: 2\nengine: {model: m, policy: {treshold: 3}}",
            "in 'engine.policy': unknown key 'treshold'; did you mean 'threshold'",
        ),
        (MINIMAL + "sampling: {topk: 3}", "in 'sampling': unknown key 'topk'; did you mean 'top_k'"),
        ("ranks: 1\nengine: {model: m}", "ranks: .*greater than or equal to 2.*got 1"),
        ("ranks: 2", "engine: required, but not set"),
        ("", "ranks: required"),
        ("- a", "expected a mapping"),
        ("a: [", "not valid YAML"),
        (MINIMAL + "ranks: 4", "key 'ranks' is given twice"),
        (MINIMAL + "startup_timeout_s: 0", "startup_timeout_s"),
        (MINIMAL + "step_timeout_s: .inf", "step_timeout_s: .*finite"),
        (MINIMAL + "device: tpu", "device: .*'auto', 'cpu' or 'cuda'"),
        ("ranks: 2\nengine: {model: m, max_model_len: 256}", "leaves no room for a prompt"),
    ],
)
def test_mistakes_are_named(tmp_path, text, words):
    with pytest.raises(BadInput, match=words) as caught:
        load_config(write(tmp_path, text))
    assert "c.yaml" in str(caught.value)


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("ranks", "write it as key=value"),
        ("=3", "write it as key=value"),
        ("engine..model=3", "write it as key=value"),
        ("ranks.x=3", "'ranks' is a value and has no keys below it"),
        ("ranks=[", "not valid YAML"),
        ("engine.polcy.threshold=3", "did you mean 'policy'"),
        ("sampling.max_tokens=many", "sampling.max_tokens"),
    ],
)
def test_wrong_overrides(tmp_path, override, words):
    with pytest.raises(BadInput, match=words):
        load_config(write(tmp_path, MINIMAL), [override])


def test_unreadable_files(tmp_path):
    with pytest.raises(BadInput, match="cannot be read"):
        load_config(tmp_path / "missing.yaml")
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(BadInput, match="not a text file"):
        load_config(tmp_path / "binary.yaml")
