"""The order of the stages, and nothing else."""

from __future__ import annotations

from stability_probe import checklist
from stability_probe._version import __version__
from stability_probe.confirm import confirm, count_trials, outcomes_after, without_confirmation
from stability_probe.examination import examine
from stability_probe.incident import Request, load_incident
from stability_probe.judge import judge, load_rules
from stability_probe.progress import Progress, Silent
from stability_probe.replay import Subject
from stability_probe.report_parts import inputs_of, report_tables, with_randomness
from stability_probe.schema import Report


def run(request: Request, progress: Progress | None = None) -> Report:
    """From what the user supplied to one finished report.

    Raises:
        ProbeError: exit code 3 for inputs that cannot be read or do not fit, 4 for a replay that failed.
    """
    show = progress or Silent()
    with show.stage("Reading the incident"):
        incident = load_incident(request)
        subject = Subject.of(incident.model.module.to(incident.device), incident.device)
    bench, replays, notes = examine(incident, subject, show)
    rules = load_rules()
    suspects, outcomes = judge(rules, bench.measurements)
    if request.confirm:
        order = {rule.slug: rule.order for rule in rules}
        with show.stage("Intervening and replaying", count_trials(suspects, order)) as advance:
            verdict, interventions = confirm(suspects, rules, bench, advance)
        outcomes = outcomes_after(outcomes, verdict, {record.cause for record in interventions})
    else:
        verdict, interventions = without_confirmation(suspects, rules, bench), []
    verdict = with_randomness(verdict, bench.measurements)
    facts = checklist.facts_from(
        bench.measurements,
        verdict,
        step=request.step,
        checkpoint_step=incident.checkpoint.step,
        lr=incident.lr,
        grad_clip=incident.grad_clip,
        source=dict(incident.source),
        run_precision=None if incident.precision_is_assumed else incident.run_precision,
    )
    return Report(
        probe_version=__version__,
        inputs=inputs_of(incident),
        verdict=verdict,
        outcomes=tuple(outcomes),
        checklist=checklist.answer(facts),
        replays=tuple(replays),
        interventions=tuple(interventions),
        tables=report_tables(bench.measurements, incident),
        notes=(*incident.notes, *incident.model.notes, *incident.checkpoint.notes, *notes),
    )
