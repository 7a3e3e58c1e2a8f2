"""Checks of the numbers that norms keep: broken ones, ones that no training left, channels that are switched off."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from normswap.diagnosis.findings import Case, Certainty, Finding, StoredNorm, paths_of, share

_SWITCHED_OFF = 0.1  # share of a norm's channels with a gamma of 0 from which on it is a fault
_TINY = 1e-3  # of eps


def broken(case: Case) -> Iterator[Finding]:
    """Values that are not finite."""
    for names, mend in (
        (("mean", "var"), case.recalibrate),
        (("gamma", "beta"), "load the weights again, from a checkpoint before they broke"),
    ):
        hit = [site for site in case.sites if any(_is_broken(getattr(site, name)) for name in names)]
        if hit:
            evidence = f"{' or '.join(names)} holds NaN or infinity in {share(len(hit), len(case.sites), 'norms')}"
            yield Finding(
                "not-finite", paths_of(hit), evidence, Certainty.CERTAIN, "every answer is NaN or constant", mend
            )


def _is_broken(values: torch.Tensor | None) -> bool:
    return values is not None and not bool(torch.isfinite(values).all())


def negative_variance(case: Case) -> Iterator[Finding]:
    """Variances below 0: no data has them, so they are something else, or mixed up."""
    hit = [site for site in case.sites if site.var is not None and bool((site.var < 0).any())]
    if hit:
        count = sum(int((site.var < 0).sum()) for site in hit if site.var is not None)
        evidence = f"{count} variances are negative: statistics were mixed up, or subtracted from one another"
        cost = "the square root is NaN, or of the wrong number"
        yield Finding("negative-variance", paths_of(hit), evidence, Certainty.CERTAIN, cost, case.recalibrate)


def never_updated(case: Case) -> Iterator[Finding]:
    """Statistics as a norm is made with, mean 0 and variance 1."""
    hit = [site for site in case.sites if site.starts_at_init]
    if not hit:
        return
    identities = [site for site in hit if site.is_untouched]
    if len(identities) == len(case.sites):
        evidence = "mean 0, variance 1, gamma 1, beta 0 in all norms: the network was never trained, or never loaded"
        mend = f"open it with weights; or, if only statistics are missing: {case.recalibrate}"
        yield Finding("untrained", paths_of(hit), evidence, Certainty.CERTAIN, "eval mode does not normalize", mend)
        return
    trained = [site for site in hit if not site.is_untouched]
    if trained:
        evidence = f"mean 0 and variance 1 in {share(len(trained), len(case.sites), 'norms')}, with trained gammas"
        cost = "in eval mode they do not normalize; training mode hides it"
        yield Finding("never-updated", paths_of(trained), evidence, Certainty.CERTAIN, cost, case.recalibrate)
    if identities:
        where = share(len(identities), len(case.sites), "norms")
        evidence = f"mean 0, variance 1, gamma 1, beta 0 in {where}: the identity in eval mode"
        cost = "none in eval mode, if a tool put them in; in training mode they normalize, and another network trains"
        mend = f"normswap convert {case.name} --to folded"
        yield Finding("identity-norm", paths_of(identities), evidence, Certainty.LIKELY, cost, mend)


def zero_variance(case: Case) -> Iterator[Finding]:
    """A variance of 0, or far below eps, where gamma and weights say that something varies."""
    live: list[StoredNorm] = []
    dead: list[StoredNorm] = []
    for site in case.sites:
        if site.var is None or site.starts_at_init:
            continue
        tiny = site.var.abs() < _TINY * site.eps
        if bool(tiny.any()):
            (live if float(tiny.double().mean()) > _SWITCHED_OFF else dead).append(site)
    if live:
        evidence = f"variances of 0, or below {_TINY:g} eps, in more than {_SWITCHED_OFF:.0%} of the channels"
        cost = "what reaches them is multiplied by 1 / sqrt(eps), some hundred times too much"
        yield Finding("zero-variance", paths_of(live), evidence, Certainty.LIKELY, cost, case.recalibrate)
    if dead:
        count = sum(int((site.var.abs() < _TINY * site.eps).sum()) for site in dead if site.var is not None)
        evidence, cost = f"{count} channels have a variance below {_TINY:g} eps: nothing varies there", "dead weights"
        yield _remark("constant-channel", dead, evidence, cost, f"normswap convert {case.name} --to folded")


def dead_gammas(case: Case) -> Iterator[Finding]:
    """Channels with a gamma of 0."""
    zeros = {site: int((site.gamma == 0).sum()) for site in case.sites if site.gamma is not None}
    zeros = {site: count for site, count in zeros.items() if not (site.starts_at_init and site.is_untouched)}
    hit = [site for site, count in zeros.items() if count > _SWITCHED_OFF * _width(site)]
    few = [site for site, count in zeros.items() if count and site not in hit]
    if hit:
        counts = ", ".join(f"{zeros[site]} of {_width(site)} at {site.path}" for site in hit[:4])
        cost = "the channels are constant, and learn slowly or, behind a ReLU with beta <= 0, never again"
        mend = "go back to a checkpoint before they died, or train on with a smaller rate and no decay of gammas"
        yield Finding("dead-gammas", paths_of(hit), f"gammas are 0: {counts}", Certainty.CERTAIN, cost, mend)
    if few:
        evidence, cost = f"{sum(zeros[site] for site in few)} channels have a gamma of 0", "dead weights"
        yield _remark("few-dead-gammas", few, evidence, cost, f"normswap convert {case.name} --to folded")


def _width(site: StoredNorm) -> int:
    return 0 if site.gamma is None else site.gamma.numel()


def _remark(name: str, sites: list[StoredNorm], evidence: str, cost: str, mend: str) -> Finding:
    return Finding(name, paths_of(sites), evidence, Certainty.CERTAIN, cost, mend, fault=False)
