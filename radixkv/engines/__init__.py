"""Engines: the protocol by which the service uses one, and adapters between engines and the cache.

``Engine`` is the protocol. ``radixkv.engines.hf.engine`` serves transformers models and needs the extra ``hf``.
"""

from radixkv._compiled import follow

follow(__path__, "engines")

from radixkv.engines.protocol import ABILITIES as ABILITIES
from radixkv.engines.protocol import Ability as Ability
from radixkv.engines.protocol import Engine as Engine
from radixkv.engines.protocol import EngineCache as EngineCache
from radixkv.engines.protocol import EngineLimits as EngineLimits
from radixkv.engines.protocol import EngineSettings as EngineSettings
from radixkv.engines.protocol import Generation as Generation
from radixkv.engines.protocol import LoadedEngine as LoadedEngine
from radixkv.engines.protocol import LoadEngine as LoadEngine
from radixkv.engines.protocol import Prefill as Prefill
from radixkv.engines.protocol import find_engine as find_engine
