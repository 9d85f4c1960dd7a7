"""Tests with an engine's own package, each in its own environment: left out where that has not been made.

`make test-engines` makes them (see tools/setup_engine_venv.py) and runs these tests.
"""

from tests.engines.environments import ENGINES, python_of

collect_ignore = [f"test_{engine}.py" for engine in ENGINES if not python_of(engine).exists()]
