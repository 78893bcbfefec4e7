"""The open loop over servers: its loads, the servers' configurations, its plot."""

import argparse
import json
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from aerie.deploy.bench.arrivals import MIXES
from tests.bench.open_loop import Load, add_load_options, parsed_load, plot, read_others, traffic_of, varied
from tests.bench.served import embedded_config
from tests.bench.served_model import add_options, server_config


def test_loads_name_a_mix_and_rates() -> None:
    assert parsed_load("prompt-heavy:4,8.5") == Load("prompt-heavy", (4.0, 8.5))
    for text in ("plain", "plain:", "heavy:1", "plain:0", "plain:1,x"):
        with pytest.raises(ValueError):
            parsed_load(text)


def test_the_embedded_pair_gets_a_mix_that_fits_it() -> None:
    parser = argparse.ArgumentParser()
    add_options(parser)
    add_load_options(parser, seconds=5.0)
    small = traffic_of(parser.parse_args([]), "prompt-heavy")
    assert small.mix.prompts.cap == 512 and small.mix.prefixes is not None and small.mix.prefixes.tokens < 512
    assert traffic_of(parser.parse_args(["--gpu"]), "prompt-heavy").mix == MIXES["prompt-heavy"]


def test_varying_a_key_leaves_the_rest() -> None:
    before = embedded_config()
    after = varied(before, "scheduler.max_step_tokens", 64)
    scheduler = before["applications"][0]["args"]["scheduler"]
    assert after["applications"][0]["args"]["scheduler"] == scheduler | {"max_step_tokens": 64}
    assert scheduler["max_step_tokens"] != 64 and after["proxy_location"] == before["proxy_location"]


@pytest.mark.parametrize("shape", ["plain", "chain", "tree"])
@pytest.mark.parametrize("model", ["tiny", "dsv3-tiny"])
def test_dummy_weights_make_a_valid_configuration(model: str, shape: str, tmp_path: Path) -> None:
    from aerie.deploy.checks import checked

    parser = argparse.ArgumentParser()
    add_options(parser)
    given = parser.parse_args(["--gpu", "--model", model, "--shape", shape, "--max-model-len", "4096"])
    given.tensor_parallel = 2 if model == "tiny" else 1
    config = checked(server_config(given, tmp_path)["applications"][0]["args"])
    assert config.parallel.tensor_parallel == (2 if model == "tiny" else 1)
    assert config.model.load_format == "dummy" and (config.speculative is None) == (shape == "plain")


def test_other_servers_stand_in_the_same_plot(tmp_path: Path) -> None:
    rate = {"name": "peer", "rate": 4.0, "ttft_ms": {"p50": 40, "p99": 130.0}, "itl_ms": {"p50": 6, "p99": 31.0}}
    file = tmp_path / "others.txt"
    file.write_text(f"started\nSERVE {json.dumps(rate)}\n{{}}\n")
    others = read_others(file)
    assert others == {"peer": [rate]}
    own = {f"aerie, x {value}": [rate | {"name": "aerie"}] for value in (1, 2)}
    root = ElementTree.fromstring(plot(own, others, 4.0))  # type: ignore[arg-type]
    assert sum(child.tag.endswith("polyline") for child in root) == 2
    alone = ElementTree.fromstring(plot({"aerie": [rate]}, {}, 4.0))
    assert sum(child.tag.endswith("polyline") for child in alone) == 3
