from __future__ import annotations

from prometheus_client.openmetrics import parser

from asyncgrpo_agent.core.metric_model import Family, Histogram, Sample
from asyncgrpo_agent.roles.exposition import build_sample, expose
from fakes.scraped import series_in, value

GAUGE = Family("held", "gauge", "Help.", ("run",))
COUNTER = Family("seen", "counter", "Help.", ("run",))


def test_both_formats_parse_and_say_the_same() -> None:
    histogram = Histogram((1.0,))
    histogram.observe(0.5)
    samples = [
        build_sample("proxy"),
        Sample(GAUGE, ("a",), 1.0),
        Sample(COUNTER, ("a",), 2.0),
        Sample(GAUGE, ('quote " and \\ and \n',), 3.0),
        Sample(Family("took_seconds", "histogram", "Help.", ("run",)), ("a",), histogram),
    ]
    kind, text = expose(samples)
    assert kind.startswith("text/plain; version=0.0.4")
    plain = series_in(text)
    assert value(plain, "asyncgrpo_seen_total", run="a") == 2.0
    assert value(plain, "asyncgrpo_held", run='quote " and \\ and \n') == 3.0
    assert value(plain, "asyncgrpo_took_seconds_bucket", run="a", le="+Inf") == 1.0
    assert value(plain, "process_resident_memory_bytes") > 1e6
    wanted = 'application/openmetrics-text; version="9"; escaping=x, text/plain;q=0.5'
    kind, text = expose(samples, accept=wanted, with_process=False)
    assert kind == "application/openmetrics-text; version=1.0.0; charset=utf-8"
    parsed = parser.text_string_to_metric_families(text.decode())  # type: ignore[no-untyped-call]
    families = {one.name: one for one in parsed}
    assert families["asyncgrpo_build"].type == "info"
    assert "process_open_fds" not in families
