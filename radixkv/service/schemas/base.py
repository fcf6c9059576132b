"""What all bodies have in common."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, model_validator

MAX_NAME = 256


class RequestBody(BaseModel):
    """A body that a client sends: strict, without unknown names; null means left out."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _null_is_absent(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        return {
            name: value for name, value in data.items() if value is not None or name not in cls.model_fields
        }


Seconds = Annotated[float, AfterValidator(lambda seconds: round(seconds, 6))]


class ReplyBody(BaseModel):
    """A body that the service sends."""

    model_config = ConfigDict(frozen=True)
