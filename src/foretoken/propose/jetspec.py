"""JetSpec (2606.18394): a DFlash head whose rows see no later rows of their block, trained with forward KL.

As in the published code, a row reads mask tokens in the place of the tokens drafted before it, so its distribution
depends on its position alone, and a draft is made as DFlash's.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from foretoken.propose.dflash import METHOD as DFLASH
from foretoken.propose.dflash import build

METHOD = replace(DFLASH, build=partial(build, "jetspec"))
