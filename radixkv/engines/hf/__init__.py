"""Serves transformers models. Needs the extra ``hf``.

engine        HFEngine
batch         the step: which rows of which requests are computed together (``request``, ``room``)
paged_cache   attention over the cache's blocks; ``packed``: rows of several requests in one forward
stock         models with an attention of their own: one request at a time (``driven``)
choose        the next tokens (``logits``, ``forms``)
models        model folders, fingerprints, the demo model (``load``)
"""

from radixkv.errors import require_extra

require_extra("radixkv.engines.hf", "hf")

from radixkv.engines.hf.engine import HFEngine as HFEngine
from radixkv.engines.hf.models import demo_model as demo_model
from radixkv.engines.hf.paged_cache import layout_of as layout_of
