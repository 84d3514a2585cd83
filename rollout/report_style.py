"""The style sheet of the HTML report: light and dark by the reader's preference."""

CSS = """\
:root { --bg: #f6f7f9; --card: #fff; --ink: #1b2330; --soft: #667085; --rule: #e3e7ee;
  --ep: #2f74d0; --tp: #d9822b; --switch: #a63d8f; --other: #a9b1be; --bar: #3d8f7d; }
@media (prefers-color-scheme: dark) {
  :root { --bg: #12161d; --card: #1b212b; --ink: #e6eaf1; --soft: #98a3b5; --rule: #2e3744;
    --ep: #5c9df0; --tp: #eba052; --switch: #d272bd; --other: #667085; --bar: #5bb5a1; }
}
* { box-sizing: border-box; }
body { margin: 0; background: var(--bg); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", sans-serif; }
main { max-width: 1240px; margin: 0 auto; padding: 28px 20px 60px; }
h1 { font-size: 26px; margin: 0; letter-spacing: -.01em; }
h2 { font-size: 17px; margin: 0; }
h3 { font-size: 14px; margin: 18px 0 4px; }
header p, small, footer, .note, summary span { color: var(--soft); font-size: 13px; }
header p { margin: 4px 0 20px; }
.card { background: var(--card); border: 1px solid var(--rule); border-radius: 10px; padding: 18px 20px;
  margin: 0 0 16px; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(170px, 1fr)); gap: 12px; margin: 0 0 16px; }
.tiles div { background: var(--card); border: 1px solid var(--rule); border-radius: 10px; padding: 12px 16px; }
dt { color: var(--soft); font-size: 13px; }
dd { margin: 0; font-size: 24px; font-weight: 600; font-variant-numeric: tabular-nums; }
.legend { display: flex; flex-wrap: wrap; gap: 16px; margin: 8px 0 4px; font-size: 13px; color: var(--soft); }
.legend i { display: inline-block; width: 11px; height: 11px; border-radius: 3px; margin-right: 6px;
  vertical-align: -1px; }
.scroll { overflow-x: auto; }
.wide svg { min-width: 760px; }
.phone { display: none; }
table { border-collapse: collapse; width: 100%; font-size: 13px; font-variant-numeric: tabular-nums;
  margin-top: 8px; }
th, td { text-align: right; padding: 6px 9px; border-bottom: 1px solid var(--rule); white-space: nowrap; }
th { color: var(--soft); font-weight: 500; white-space: normal; vertical-align: bottom; }
tbody tr:last-child td { border-bottom: 0; }
details summary { cursor: pointer; display: flex; flex-wrap: wrap; gap: 4px 14px; align-items: baseline;
  list-style: none; }
details summary::before { content: "▸"; color: var(--soft); }
details[open] > summary::before { content: "▾"; }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 460px), 1fr)); gap: 18px 24px;
  margin: 12px 0; }
figure { margin: 0; min-width: 0; }
figcaption { font-weight: 600; font-size: 14px; margin-bottom: 2px; }
figcaption small { display: block; font-weight: 400; }
svg { display: block; width: 100%; height: auto; }
svg text { fill: var(--soft); font-size: 11.5px; font-variant-numeric: tabular-nums; }
svg .strong { fill: var(--ink); }
svg path { fill: none; }
.grid { stroke: var(--rule); }
.axis { stroke: var(--soft); }
.line { stroke-width: 1.8; stroke-linejoin: round; }
svg .area { stroke: none; opacity: .16; }
svg .shade { opacity: .3; }
.mark { stroke-width: 1.4; stroke-dasharray: 4 3; }
svg rect.band { opacity: .1; }
svg .life { stroke-width: .9; opacity: .75; }
svg .dots { stroke-width: 3.4; stroke-linecap: round; opacity: .5; }
.life.ep, .dots.ep { stroke: var(--ep); } .life.tp, .dots.tp { stroke: var(--tp); }
svg .area.all { fill: var(--bar); }
.line.faint { stroke: var(--soft); stroke-width: 1; opacity: .45; } .line.all { stroke: var(--bar); }
.line.dashed { stroke-dasharray: 5 3; stroke-width: 1.3; }
rect.before { fill: var(--other); } rect.after { fill: var(--bar); }
i.before { background: var(--other); } i.after, i.bar { background: var(--bar); }
.line.ep { stroke: var(--ep); } .line.tp { stroke: var(--tp); }
.mark.switch { stroke: var(--switch); } .mark.note { stroke: var(--soft); }
svg .area.ep, rect.ep { fill: var(--ep); } svg .area.tp, rect.tp { fill: var(--tp); }
rect.switch { fill: var(--switch); } rect.other { fill: var(--other); } rect.bar { fill: var(--bar); }
i.ep { background: var(--ep); } i.tp { background: var(--tp); } i.switch { background: var(--switch); }
  i.other { background: var(--other); }
td.text { text-align: left; white-space: normal; min-width: 180px; overflow-wrap: anywhere; }
details.fold { margin-top: 14px; } details.fold summary { font-size: 14px; font-weight: 600; }
@media (max-width: 640px) {
  main { padding: 14px 8px 40px; } .card { padding: 12px; } .tiles { grid-template-columns: 1fr 1fr; gap: 8px; }
  dd { font-size: 20px; } svg text { font-size: 14px; } .desk { display: none; } .phone { display: block; }
}
@media print { details:not([open]) { display: none; } .card { break-inside: avoid; } }
"""
