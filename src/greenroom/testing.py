"""What to test one's own agents, tools and stores with."""

from greenroom.runtime.testing import *  # noqa: F403  # the public names are those of the package behind it
from greenroom.runtime.testing import __all__ as __all__
