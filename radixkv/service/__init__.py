"""The HTTP service: Starlette, JSON, bearer keys for tenants, one model on one thread.

``app.create_app(service)`` makes the application of a ``core.Service``. ``build.build_service(settings)`` makes the
service of ``options.ServeSettings``. ``server.run(settings)`` is ``radixkv serve``. Importing this package loads none
of these modules; without the extra ``http`` it raises ImportError.
"""

from radixkv.errors import require_extra

require_extra("radixkv.service", "http")
