from __future__ import annotations

import pytest
from tiny_model import write_tiny_model

from cluster.experiment.targets.weights import LoadedModel, load_model


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load_model(str(write_tiny_model(tmp_path_factory.mktemp("tiny"))), dtype="bfloat16", threads=1)
