"""The results page: one file out of what is committed under experiments/results and a profile of the simulator."""

from __future__ import annotations

import html
from dataclasses import dataclass
from pathlib import Path

from nosa_sys.errors import TraceError
from nosa_sys.report.html import document, html_id, legend_of
from nosa_sys.report.results_page.breakdown import breakdown
from nosa_sys.report.results_page.budgets import k_e_sweep
from nosa_sys.report.results_page.equal_training.blocks import quality_by_block_size
from nosa_sys.report.results_page.equal_training.generation import long_generation
from nosa_sys.report.results_page.equal_training.losses import training_losses
from nosa_sys.report.results_page.equal_training.retrieval import retrieval
from nosa_sys.report.results_page.equal_training.transfers import quality_against_transfers
from nosa_sys.report.results_page.errors import predicted_against_measured
from nosa_sys.report.results_page.files import profile_table, read_rows
from nosa_sys.report.results_page.fragments import fragments
from nosa_sys.report.results_page.head_numerics import head_numerics
from nosa_sys.report.results_page.hot_buffer import hot_buffer_table
from nosa_sys.report.results_page.link_limit import link_limit
from nosa_sys.report.results_page.section import Section
from nosa_sys.report.results_page.throughput import throughput
from nosa_sys.simulator.hardware import load_hardware

TITLE = "NOSA: what was measured, and what the simulator says of it"


@dataclass(frozen=True)
class ResultsPage:
    """The document and its sections, those without data among them."""

    html: str
    sections: list[Section]


def build_sections(root: Path, hardware: str) -> list[Section]:
    """Every figure from the results under ``root``, those without data last; TraceError for a directory or file that
    cannot be read."""
    if not root.is_dir():
        raise TraceError(f"no such directory: {root}; run from the project's root, or give --results DIR")
    profile = load_hardware(hardware)
    stages = {
        name: read_rows(root, f"h200/nosi/{name}.json")
        for name in ("methods", "crossover", "schedules", "paper", "hot_buffer")
    }
    bench = read_rows(root, "h200/kernel_limits/bench.json")
    budgets = read_rows(root, "cpu/budgets/budgets.json")
    sections = [
        *throughput(stages["methods"], stages["crossover"], profile),
        hot_buffer_table(stages["hot_buffer"], profile),
        *breakdown(stages["schedules"], stages["paper"], profile),
        link_limit(stages["schedules"], stages["paper"], stages["hot_buffer"], profile),
        k_e_sweep(budgets, profile),
        fragments(profile_table(hardware, "link_runs"), bench, budgets, profile),
        quality_against_transfers(root),
        quality_by_block_size(root),
        retrieval(root),
        long_generation(root),
        training_losses(root),
        head_numerics(read_rows(root, "cpu/head_numerics/numerics.json")),
        *predicted_against_measured(root),
    ]
    return sorted(sections, key=lambda section: section.empty)


def build_results_page(root: Path, hardware: str = "h200-engine") -> ResultsPage:
    """The page; every text from a file is escaped."""
    sections = build_sections(root, hardware)
    kinds = {origin.kind for section in sections for origin in section.origins}
    short = "".join(
        f'<li><a href="#{html_id(s.key)}-section">{html.escape(s.title)}</a>: '
        f"{html.escape(s.headline or 'no data yet')}</li>"
        for s in sections
    )
    body = [
        f"<h1>{html.escape(TITLE)}</h1>",
        f'<p class="lead">Every figure names its sources and says how far to trust them: {legend_of(kinds)}.</p>',
        f"<section><h2>In short</h2><ul>{short}</ul></section>",
        *(section.html() for section in sections),
    ]
    return ResultsPage(document(TITLE, "".join(body)), sections)
