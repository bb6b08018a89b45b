# SPDX-License-Identifier: Apache-2.0
"""`scalerl sizes | advise`: runs that differ in a setting, which is read from their names."""

from __future__ import annotations

import argparse
from collections.abc import Mapping

from scalerl_verl.scaling import setting_report
from scalerl_verl.scaling.answer import Answer
from scalerl_verl.scaling.fit.advice import advise, best_by_budget, check_different, supported_budgets
from scalerl_verl.scaling.fit.points import FitRefused
from scalerl_verl.scaling.fit.result import CurveFit
from scalerl_verl.scaling.fit.settings import Settings, read_settings
from scalerl_verl.scaling.fit.size_law import fit_size_law
from scalerl_verl.scaling.inputs import Inputs, fit_all, need_profile


def run_sizes(options: argparse.Namespace, inputs: Inputs, answer: Answer) -> None:
    """Power laws of ceiling and C_mid over one setting."""
    need_profile(options, "a law over sizes weighs fits by the intervals of the default method")
    settings = read_settings(inputs.curves, options.by)
    names = list(next(iter(settings.values()), {}))
    if len(names) > 1:
        raise ValueError(f"--by finds {', '.join(names)}: a law over sizes has one setting")
    fits = _fit_and_tell(options, inputs, answer, settings)
    if not fits:  # each has its own reason
        return
    sizes = {run: settings[run][names[0]] for run in fits}
    law = fit_size_law(fits, sizes)
    answer.more["law"] = {"setting": names[0], **law.to_dict(options.at)}
    answer.parts.append(setting_report.describe_size_law(law, fits, sizes, names[0], options.at, inputs.x_label))


def run_advise(options: argparse.Namespace, inputs: Inputs, answer: Answer) -> None:
    """What measured curves favour at each budget."""
    need_profile(options, "scores are compared by the intervals of the default method")
    settings = read_settings(inputs.curves, options.by)
    if len(settings) > 1:
        check_different(settings.values())
    fits = _fit_and_tell(options, inputs, answer, settings)
    if answer.refused and len({tuple(settings[run].values()) for run in fits}) < 2:
        answer.more |= {"advice": [], "best_by_budget": []}
        if fits:
            answer.parts.append(f"Only {', '.join(fits)} could be fitted: no comparison.")
        return
    advices = [advise(fits, settings, budget) for budget in options.budget]
    answer.more["advice"] = [advice.to_dict() for advice in advices]
    answer.parts += [setting_report.describe_advice(advice, inputs.x_label) for advice in advices]
    by_budget = best_by_budget(fits, settings, supported_budgets(fits))
    answer.more["best_by_budget"] = [dict(zip(("budget", "setting", "tied"), row, strict=True)) for row in by_budget]
    answer.parts += [setting_report.describe_best_by_budget(by_budget, inputs.x_label)] if by_budget else []
    silent = [advice for advice in advices if not advice.compares]
    if silent:
        budgets = ", ".join(f"{advice.budget:g}" for advice in silent)
        raise FitRefused(
            "no_comparison",
            f"fewer than two settings have runs that say something about the budget {budgets}: run them longer, or ask "
            "for less",
        )


def _fit_and_tell(
    options: argparse.Namespace, inputs: Inputs, answer: Answer, settings: Mapping[str, Settings]
) -> dict[str, CurveFit]:
    """Fits by run, told with their settings.

    That A is not identified in one of them is no news here: a law leaves it out by name, and inside its own window a
    curve says something all the same.
    """
    fits = fit_all(options, inputs, answer)
    answer.is_identified = True
    answer.runs += [inputs.entry(run) | {"settings": settings[run]} | fit.to_dict() for run, fit in fits.items()]
    return fits
