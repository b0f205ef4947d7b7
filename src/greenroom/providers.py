"""Model providers and the pure codecs of their dialects."""

from greenroom.runtime.providers import Anthropic, OpenAICompatible, Scripted
from greenroom.runtime.providers.anthropic_codec import decode_anthropic, encode_anthropic
from greenroom.runtime.providers.openai_codec import decode_openai, encode_openai

__all__ = [
    "Anthropic",
    "OpenAICompatible",
    "Scripted",
    "decode_anthropic",
    "decode_openai",
    "encode_anthropic",
    "encode_openai",
]
