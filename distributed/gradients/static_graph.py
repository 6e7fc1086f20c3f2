"""What the first backward of a static graph determines for all others: ``DistributedDataParallel(static_graph=True)``.

Whoever passes that says that each backward gives gradients to the same parameters, by as many contributions. So the
first reduces everything at its end, and is remembered. Where the engine cannot know what is to come, since a reentrant
checkpoint makes its part of autograd's graph in the backward only, later ones know. Parameters that no rank uses may
stay without a gradient, and those that another rank uses get the mean.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence


class StaticGraph:
    """What is known of the graph of one module; nothing before the first backward.

    Attributes:
        is_known: the first backward has been.
        contributions: by name, how many each parameter gets on this rank.
    """

    def __init__(self) -> None:
        self.is_known = False
        self.contributions: Mapping[str, int] = {}

    @property
    def unused(self) -> frozenset[str]:
        """The parameters that get no gradient on this rank."""
        return frozenset(name for name, count in self.contributions.items() if count == 0)

    def left_unused(self, names: frozenset[str]) -> frozenset[str]:
        """Those of these parameters, whose gradients are undefined, that count as unused and not as zeros: all in the
        first backward, and then those that were."""
        return names & self.unused if self.is_known else names

    def learn(self, contributions: Mapping[str, int]) -> None:
        """The first backward has come to its end, with these contributions."""
        self.contributions = contributions
        self.is_known = True

    def expected(self, announced: Mapping[str, int]) -> dict[str, int]:
        """How many contributions will come to each parameter that gets any, where the engine knows of ``announced``."""
        # It is these where a program is another now, as one without some hook.
        return {
            name: max(count, announced.get(name, 0)) for name, count in self.contributions.items() if count
        }

    def check(self, names: Iterable[str]) -> None:
        """
        Raises:
            RuntimeError: one of these, which have got a gradient, got none in the first backward. Other ranks do not
                know of it and would not take it for a gradient.
        """
        if self.is_known and (new := [name for name in names if not self.contributions[name]]):
            raise RuntimeError(changed(f"{shown(new)} got a gradient and got none in the first backward"))


def changed(what: str) -> str:
    """The error of a graph that is not static, for what is new about it."""
    return (
        f"the graph of the module has changed: {what}. static_graph=True says that all backwards are alike; pass "
        f"find_unused_parameters=True to DistributedDataParallel instead"
    )


def shown(names: Sequence[str]) -> str:
    """Some of the names, for a message."""
    return ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")
