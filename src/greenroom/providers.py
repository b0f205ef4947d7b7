"""Model providers and the pure codecs of their dialects."""

from greenroom.runtime.providers import OpenAICompatible, Scripted
from greenroom.runtime.providers.openai_codec import decode_openai, encode_openai

__all__ = ["OpenAICompatible", "Scripted", "decode_openai", "encode_openai"]
