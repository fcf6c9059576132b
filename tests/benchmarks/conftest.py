"""What the tests of benchmarks share."""

from tests.bench.conftest import frozen_objects_stay_frozen as frozen_objects_stay_frozen
