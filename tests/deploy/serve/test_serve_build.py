"""`serve build` of packaged configurations, by their import paths."""

from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner


@pytest.fixture
def built(tmp_path: Path) -> Path:
    """Two models' file, as `serve build` writes it."""
    from ray.serve.scripts import build

    path = tmp_path / "two.yaml"
    found = CliRunner().invoke(build, ["aerie.deploy.app:eagle", "aerie.deploy.app:eagle3", "-o", str(path)])
    assert found.exit_code == 0, found.output
    return path


def test_serve_build_names_each_models_deployments(built: Path) -> None:
    from ray._common.utils import import_attr
    from ray.serve import Application

    applications = yaml.safe_load(built.read_text())["applications"]
    assert [each["route_prefix"] for each in applications] == ["/app1", "/app2"]
    for each in applications:
        assert {deployment["name"] for deployment in each["deployments"]} == {"Engine", "Ingress"}
        assert isinstance(import_attr(each["import_path"]), Application)
    with pytest.raises(AttributeError, match="has no attribute eagle4, and no packaged configuration"):
        import_attr("aerie.deploy.app:eagle4")
