"""A discrete-event simulation of a router in front of replicas that batch block-diffusion requests.

A replica takes requests in the order of their arrival while it has seats. Each of its steps
prefills what the budget allows and denoises every request whose prompt is done; all of them are one
pass further when the step ends. A prompt's beginning that the prefix cache holds is not computed
again. Time is in seconds. What a step takes is the caller's function, so that the same simulation
serves the floors of a GPU and the measured steps of a CPU.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from benchmarks.arrivals import Request

# How many requests more than the least loaded replica one may have and still be chosen for its
# cache; SGLang's router has a threshold of the same kind.
SLACK = 8


@dataclass(frozen=True)
class Engine:
    """What all replicas are.

    Attributes:
        step_seconds: of a step, from the requests that denoise, the prompt tokens that it
            computes, and the requests that begin with it.
        seats: requests at a time.
        budget: prompt tokens that a step computes at most.
        cache_tokens: what the prefix cache holds; the longest unused beginning leaves first.
        page: the cache holds whole pages of so many tokens.
    """

    step_seconds: Callable[[int, int, int], float]
    seats: int
    budget: int = 8192
    cache_tokens: int = 1 << 20
    page: int = 32


@dataclass
class Running:
    """A request on its seat: prompt tokens and passes that are left."""

    request: Request
    prompt: int
    passes: int


@dataclass
class Replica:
    """One server."""

    engine: Engine
    waiting: deque[Request] = field(default_factory=deque)
    running: list[Running] = field(default_factory=list)
    cached: OrderedDict[int, int] = field(default_factory=OrderedDict)
    held: int = 0
    busy: float = 0.0
    hits: int = 0
    prompts: int = 0
    stepping: list[Running] = field(default_factory=list)

    @property
    def load(self) -> int:
        """Requests that it has not finished."""
        return len(self.waiting) + len(self.running)

    def hit(self, request: Request) -> int:
        """Tokens of the prompt that the cache holds."""
        return self.cached.get(request.prefix, 0) // self.engine.page * self.engine.page

    def admit(self, request: Request) -> None:
        """Give a request a seat; its beginning is in the cache from now on."""
        found = self.hit(request)
        self.hits += found
        self.prompts += request.shared + request.own
        left = request.shared + request.own - found
        self.running.append(Running(request, left, request.passes))
        if request.prefix not in self.cached:
            self.cached[request.prefix] = request.shared
            self.held += request.shared
        self.cached.move_to_end(request.prefix)
        while self.held > self.engine.cache_tokens:
            self.held -= self.cached.popitem(last=False)[1]

    def begin(self) -> float:
        """Start a step; the seconds that it takes."""
        budget, begun = self.engine.budget, 0
        while self.waiting and len(self.running) < self.engine.seats:
            self.admit(self.waiting.popleft())
            begun += 1
        self.stepping = [one for one in self.running if not one.prompt]
        for one in self.running:
            part = min(one.prompt, budget)
            one.prompt -= part
            budget -= part
        computed = self.engine.budget - budget
        seconds = self.engine.step_seconds(len(self.stepping), computed, begun)
        self.busy += seconds
        return seconds

    def end(self) -> list[Request]:
        """End a step; the requests that have finished."""
        for one in self.stepping:
            one.passes -= 1
        done = [one.request for one in self.running if one.passes <= 0]
        self.running = [one for one in self.running if one.passes > 0]
        return done


Policy = Callable[[Sequence[Replica], Request], int]


def round_robin(replicas: Sequence[Replica], request: Request) -> int:
    """One after the other."""
    return request.number % len(replicas)


def least_loaded(replicas: Sequence[Replica], request: Request) -> int:
    """The one with the fewest requests; of several, the next in turn."""
    count = len(replicas)
    order = [(request.number + n) % count for n in range(count)]
    return min(order, key=lambda n: replicas[n].load)


def prefix_aware(replicas: Sequence[Replica], request: Request) -> int:
    """The one whose cache has most of the prompt, unless it is too busy; else the least loaded.

    The router is assumed to know what every cache holds.
    """
    fallback = least_loaded(replicas, request)
    most = replicas[fallback].load + SLACK
    fitting = [n for n, one in enumerate(replicas) if one.hit(request) and one.load <= most]
    if not fitting:
        return fallback
    return min(fitting, key=lambda n: (-replicas[n].hit(request), replicas[n].load))


POLICIES: dict[str, Policy] = {
    "round robin": round_robin,
    "least loaded": least_loaded,
    "prefix aware": prefix_aware,
}


@dataclass(frozen=True)
class Outcome:
    """What came of a workload.

    Attributes:
        served: for each answer the request's number and its replica, in the order they finished.
        latencies: seconds from arrival to the last token, by the request's number.
        seconds: from the first arrival to the last answer.
        tokens: of all answers.
        hit_rate: prompt tokens that were found in a cache, over all.
        busy: the mean share of the time in which a replica steps.
    """

    served: tuple[tuple[int, int], ...]
    latencies: tuple[float, ...]
    seconds: float
    tokens: int
    hit_rate: float
    busy: float

    def figures(self) -> dict[str, float]:
        """As they are written; milliseconds, and tokens a second."""
        return {
            "p50_ms": 1e3 * quantile(self.latencies, 0.5),
            "p99_ms": 1e3 * quantile(self.latencies, 0.99),
            "mean_ms": 1e3 * sum(self.latencies) / len(self.latencies),
            "tokens_per_s": self.tokens / self.seconds,
            "hit_rate": self.hit_rate,
            "busy": self.busy,
        }


def quantile(values: Sequence[float], share: float) -> float:
    """The value that so large a share of all values does not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def simulate(requests: Sequence[Request], engine: Engine, replicas: int, policy: Policy) -> Outcome:
    """Serve all requests; the same ones give the same outcome.

    Args:
        requests: in the order of their arrival.
        engine: what each replica is.
        replicas: how many.
        policy: which one gets a request.
    """
    servers = [Replica(engine) for _ in range(replicas)]
    # (when a step ends, replica): at most one of each replica.
    ends: list[tuple[float, int]] = []
    served: list[tuple[int, int]] = []
    latencies = {}
    now, coming = 0.0, deque(requests)

    def start(place: int) -> None:
        heapq.heappush(ends, (now + servers[place].begin(), place))

    while coming or ends:
        if coming and (not ends or coming[0].arrival <= ends[0][0]):
            request = coming.popleft()
            now = request.arrival
            place = policy(servers, request)
            idle = not servers[place].load
            servers[place].waiting.append(request)
            if idle:
                start(place)
            continue
        now, place = heapq.heappop(ends)
        for request in servers[place].end():
            served.append((request.number, place))
            latencies[request.number] = now - request.arrival
        if servers[place].load:
            start(place)
    seconds = now - requests[0].arrival
    return Outcome(
        tuple(served),
        tuple(latencies[request.number] for request in requests),
        seconds,
        sum(request.tokens for request in requests),
        sum(one.hits for one in servers) / max(1, sum(one.prompts for one in servers)),
        sum(one.busy for one in servers) / (seconds * replicas),
    )
