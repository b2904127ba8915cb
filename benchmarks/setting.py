"""What the scripts here print beside their figures."""

from foretoken.bench.setting import cores, setting, wide_console

__all__ = ["cores", "setting", "wide_console"]
