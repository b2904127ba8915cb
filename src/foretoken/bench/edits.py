"""Python functions for the editing workload, each with a name to change and a bug to fix."""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Edit:
    """A piece of code, a name to change throughout, and a bug with its fix."""

    source: str
    rename: tuple[str, str]
    fix: tuple[str, str]

    @property
    def edited(self) -> str:
        """The code after the edit."""
        old, new = self.rename
        return re.sub(rf"\b{old}\b", new, self.source.replace(*self.fix))

    @property
    def prompt(self) -> str:
        """The prompt that asks for the edit."""
        old, new = self.rename
        return f"{self.source}\n\n# The same again, with {old} renamed to {new} and the fault mended:\n\n"


EDITS: tuple[Edit, ...] = (
    Edit(
        '''def moving_average(samples, window):
    """Return the means of every run of window consecutive samples.

    Raise ValueError if window is less than 1 or there are fewer samples.
    """
    if window < 1:
        raise ValueError("window must be at least 1")
    if len(samples) < window:
        raise ValueError("fewer samples than the window holds")
    means = []
    total = 0.0
    for index, sample in enumerate(samples):
        total += sample
        if index >= window:
            total -= samples[index - window]
        if index >= window:
            means.append(total / window)
    return means


def smooth(samples, window, passes=1):
    """Apply moving_average several times, padding both ends each time."""
    for _ in range(passes):
        left = (window - 1) // 2
        right = window - 1 - left
        padded = [samples[0]] * left + list(samples) + [samples[-1]] * right
        samples = moving_average(padded, window)
    return samples''',
        rename=("samples", "values"),
        fix=("if index >= window:\n            means", "if index >= window - 1:\n            means"),
    ),
    Edit(
        '''class TokenBucket:
    """Allow a number of actions per second, and short bursts of more.

    rate is the number of tokens added per second, and burst the most that
    the bucket can hold.  It starts full.
    """

    def __init__(self, rate, burst, clock=time.monotonic):
        if rate <= 0 or burst < 1:
            raise ValueError("rate must be positive and burst at least 1")
        self._rate = rate
        self._burst = burst
        self._level = burst
        self._clock = clock
        self._updated = clock()

    def _refill(self):
        now = self._clock()
        elapsed = now - self._updated
        self._level = self._level + elapsed * self._rate
        self._updated = now

    def try_take(self, count=1):
        """Take count tokens if there are as many; return whether there were."""
        self._refill()
        if count > self._level:
            return False
        self._level -= count
        return True

    def wait_time(self, count=1):
        """Return the seconds until count tokens will be there."""
        self._refill()
        missing = count - self._level
        return max(0.0, missing / self._rate)''',
        rename=("_level", "_available"),
        fix=("self._level + elapsed * self._rate", "min(self._burst, self._level + elapsed * self._rate)"),
    ),
    Edit(
        '''def read_table(path, delimiter=",", encoding="utf-8"):
    """Read a table with a header line into a list of dictionaries.

    Blank lines are skipped.  Lines that are too short get None for the
    columns they lack; lines that are too long raise ValueError.
    """
    records = []
    with open(path, encoding=encoding) as file:
        header = None
        for number, line in enumerate(file, 1):
            line = line.rstrip("\\n")
            if not line:
                continue
            cells = [cell.strip() for cell in line.split(delimiter)]
            if header is None:
                header = cells
                continue
            if len(cells) > len(header):
                message = f"line {number} has {len(cells)} cells, not {len(header)}"
                raise ValueError(message)
            cells += [None] * (len(header) - len(cells))
            records.append(dict(zip(header, cells)))
    return records


def write_table(path, records, delimiter=",", encoding="utf-8"):
    """Write a list of dictionaries with the same keys as a table."""
    with open(path, "w", encoding=encoding) as file:
        header = list(records[0])
        file.write(delimiter.join(header) + "\\n")
        for record in records:
            cells = ["" if record[name] is None else str(record[name]) for name in header]
            file.write(delimiter.join(cells) + "\\n")''',
        rename=("cells", "fields"),
        fix=("header = list(records[0])", "header = list(records[0]) if records else []"),
    ),
    Edit(
        '''def shortest_path(graph, start, goal):
    """Return the cheapest path from start to goal as a list of nodes.

    graph maps each node to a dictionary of its neighbours and the cost of
    going there.  Return None if there is no path.
    """
    queue = [(0, start)]
    costs = {start: 0}
    previous = {}
    done = set()
    while queue:
        cost, node = heapq.heappop(queue)
        if node in done:
            continue
        done.add(node)
        if node == goal:
            break
        for neighbour, weight in graph[node].items():
            if weight < 0:
                raise ValueError(f"negative weight from {node!r} to {neighbour!r}")
            candidate = cost + weight
            if neighbour not in costs or candidate < costs[neighbour]:
                costs[neighbour] = candidate
                previous[neighbour] = node
                heapq.heappush(queue, (candidate, neighbour))
    if goal not in costs:
        return None
    path = [goal]
    while path[-1] != start:
        path.append(previous[path[-1]])
    return path''',
        rename=("node", "vertex"),
        fix=("    return path", "    path.reverse()\n    return path"),
    ),
    Edit(
        '''def parse_duration(text):
    """Turn a duration such as "1h 30m" or "45s" into seconds.

    Units are d, h, m and s; each may be given once.  Raise ValueError for
    anything else.
    """
    units = {"d": 86400, "h": 3600, "m": 60, "s": 1}
    seconds = 0
    seen = set()
    position = 0
    pattern = re.compile(r"\\s*(\\d+)\\s*([dhms])")
    while position < len(text):
        match = pattern.match(text, position)
        if match is None:
            raise ValueError(f"cannot read the duration {text!r}")
        amount, unit = match.groups()
        if unit in seen:
            raise ValueError(f"the unit {unit} comes twice in {text!r}")
        seconds += int(amount) * units[unit]
        position = match.end()
    if not seen:
        raise ValueError("the duration is empty")
    return seconds


def format_duration(seconds):
    """Turn seconds into the shortest text that parse_duration reads."""
    pieces = []
    for unit, size in (("d", 86400), ("h", 3600), ("m", 60), ("s", 1)):
        count, seconds = divmod(seconds, size)
        if count:
            pieces.append(f"{count}{unit}")
    return " ".join(pieces) or "0s"''',
        rename=("seconds", "total"),
        fix=("        position = match.end()", "        seen.add(unit)\n        position = match.end()"),
    ),
    Edit(
        '''class Cache:
    """Remember the results of a function, the most recent ones only.

    When there are more than limit entries, the one that was not used for
    the longest time is dropped.
    """

    def __init__(self, function, limit=128):
        self.function = function
        self.limit = limit
        self.hits = 0
        self.misses = 0
        self._entries = collections.OrderedDict()

    def __call__(self, *args):
        try:
            result = self._entries[args]
        except KeyError:
            self.misses += 1
            result = self.function(*args)
            self._entries[args] = result
            if len(self._entries) > self.limit:
                self._entries.popitem()
        else:
            self.hits += 1
            self._entries.move_to_end(args)
        return result

    def clear(self):
        """Forget all results and start counting again."""
        self._entries.clear()
        self.hits = 0
        self.misses = 0

    def __len__(self):
        return len(self._entries)''',
        rename=("_entries", "_results"),
        fix=("popitem()", "popitem(last=False)"),
    ),
    Edit(
        '''def copy_tree(source, target, ignore=()):
    """Copy the files below source into target and return how many there were.

    Names that match one of the patterns in ignore are left out, folders
    with all that is in them.
    """
    copied = 0
    os.makedirs(target)
    for name in sorted(os.listdir(source)):
        if any(fnmatch.fnmatch(name, pattern) for pattern in ignore):
            continue
        old = os.path.join(source, name)
        new = os.path.join(target, name)
        if os.path.islink(old):
            os.symlink(os.readlink(old), new)
        elif os.path.isdir(old):
            copied += copy_tree(old, new)
        else:
            shutil.copyfile(old, new)
            shutil.copymode(old, new)
            copied += 1
    return copied


def newest_file(source):
    """Return the path of the file below source that was changed last."""
    newest, latest = None, float("-inf")
    for folder, _, names in os.walk(source):
        for name in names:
            path = os.path.join(folder, name)
            changed = os.path.getmtime(path)
            if changed > latest:
                newest, latest = path, changed
    return newest''',
        rename=("source", "origin"),
        fix=("copy_tree(old, new)", "copy_tree(old, new, ignore)"),
    ),
    Edit(
        '''def percentile(data, share):
    """Return the value below which the given share of the data lies.

    share is between 0 and 1; between two values the result is interpolated.
    """
    if not data:
        raise ValueError("no data")
    if not 0 <= share <= 1:
        raise ValueError("share must be between 0 and 1")
    position = share * (len(data) - 1)
    below = int(position)
    above = min(below + 1, len(data) - 1)
    rest = position - below
    return data[below] * (1 - rest) + data[above] * rest


def summarize(data):
    """Return the count, mean, deviation and quartiles of the data."""
    count = len(data)
    mean = sum(data) / count
    variance = sum((value - mean) ** 2 for value in data) / count
    return {
        "count": count,
        "mean": mean,
        "deviation": math.sqrt(variance),
        "low": percentile(data, 0.25),
        "median": percentile(data, 0.5),
        "high": percentile(data, 0.75),
    }''',
        rename=("data", "numbers"),
        fix=("    position = share", "    data = sorted(data)\n    position = share"),
    ),
)
