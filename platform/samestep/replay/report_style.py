"""The style sheet of an incident's page: light and dark, no fonts or pictures from elsewhere."""

from __future__ import annotations

from typing import Final

STYLE: Final = """
:root { --bg: #ffffff; --ink: #1f2328; --soft: #656d76; --line: #d8dee4; --fill: #f6f8fa;
  --series: #1f6feb; --error: #c62828; --event: #8250df; --good: #1a7f37; --fair: #9a6700; }
@media (prefers-color-scheme: dark) {
  :root { --bg: #0d1117; --ink: #e6edf3; --soft: #8d96a0; --line: #30363d; --fill: #161b22;
    --series: #58a6ff; --error: #ff7b72; --event: #bc8cff; --good: #3fb950; --fair: #d29922; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--bg); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; }
main { max-width: 960px; margin: 0 auto; padding: 24px 20px 60px; }
h1 { font-size: 26px; margin: 0 0 8px; }
h2 { font-size: 18px; margin: 32px 0 8px; border-bottom: 1px solid var(--line); }
h3 { font-size: 15px; margin: 12px 0 6px; }
p { margin: 4px 0; overflow-wrap: anywhere; white-space: pre-wrap; }
.lead { font-size: 16px; }
.note { color: var(--soft); font-size: 13px; }
.badge { font-size: 13px; font-weight: 600; vertical-align: middle; padding: 3px 10px;
  border-radius: 12px; border: 1px solid currentColor; white-space: nowrap; }
.good { color: var(--good); } .fair { color: var(--fair); } .bad { color: var(--error); }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: 13px; margin: 8px 0;
  font-variant-numeric: tabular-nums; }
th, td { text-align: left; padding: 3px 10px 3px 0; border-bottom: 1px solid var(--line);
  vertical-align: top; }
th { color: var(--soft); font-weight: 600; }
tr.first td { background: var(--fill); font-weight: 600; color: var(--error); }
tr.broken-row td { color: var(--error); }
pre { background: var(--fill); border: 1px solid var(--line); border-radius: 6px; padding: 10px;
  overflow-x: auto; font: 12.5px/1.45 ui-monospace, SFMono-Regular, Menlo, monospace; }
details { margin: 6px 0; }
summary { cursor: pointer; color: var(--soft); }
.sample { border: 1px solid var(--line); border-radius: 6px; padding: 4px 14px 10px;
  margin: 10px 0; }
.chart { width: 100%; height: auto; display: block; margin: 6px 0; }
.chart text { font: 12px system-ui, sans-serif; fill: var(--soft); }
.chart text.title { font-size: 13px; font-weight: 600; fill: var(--ink); }
.grid { stroke: var(--line); stroke-width: 1; }
.line { fill: none; stroke: var(--series); stroke-width: 1.6; stroke-linejoin: round; }
.dot { fill: var(--series); }
.step { stroke: var(--error); stroke-width: 1.4; stroke-dasharray: 4 3; }
.event { fill: var(--event); }
.cross { fill: none; stroke: var(--error); stroke-width: 2; }
.picture { border: 1px solid var(--line); margin: 6px 0; display: block; }
.broken { fill: var(--error); }
"""
