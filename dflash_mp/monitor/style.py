"""The style sheet of the report: colours for light and dark, told apart by people who see few of them too (Okabe and Ito's set)."""

STYLE = (
    """
:root{--bg:#fff;--fg:#1d2127;--dim:#606a76;--line:#d8dde3;--card:#f6f8fa;
--c0:#0072b2;--c1:#d55e00;--c2:#009e73;--c3:#b8559b;--c4:#9a7400;--c5:#2b8fc7;--c6:#7a5195;--c7:#555}
@media (prefers-color-scheme:dark){:root{--bg:#14171b;--fg:#e4e8ec;--dim:#98a3af;--line:#343b43;--card:#1c2127;
--c0:#56b4e9;--c1:#ff9249;--c2:#33c79b;--c3:#e29bcb;--c4:#e6b93c;--c5:#8ccdf2;--c6:#bfa0e0;--c7:#b5b5b5}}
*{box-sizing:border-box}
body{margin:0;background:var(--bg);color:var(--fg);font:15px/1.45 system-ui,sans-serif}
main{max-width:1360px;margin:0 auto;padding:28px 24px 60px}
h1{font-size:26px;margin:0}h2{font-size:18px;margin:32px 0 10px}h3{font-size:15px;margin:0 0 2px}
.sub{color:var(--dim);margin:4px 0 18px}
.tiles{display:flex;flex-wrap:wrap;gap:10px}
.tiles div{background:var(--card);border:1px solid var(--line);border-radius:8px;padding:8px 16px;min-width:118px}
.tiles b{display:block;font-size:21px;font-variant-numeric:tabular-nums}.tiles span{color:var(--dim);font-size:12.5px}
.charts{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,480px),1fr));gap:16px}
figure{margin:0;background:var(--card);border:1px solid var(--line);border-radius:8px;padding:12px 14px 6px;min-width:0}
.legend{display:flex;flex-wrap:wrap;gap:2px 14px;font-size:12.5px;color:var(--dim);min-height:19px}
.legend i{display:inline-block;width:14px;height:4px;border-radius:2px;margin-right:5px;vertical-align:middle}
svg{display:block;width:100%;height:auto}
svg text{fill:var(--fg);font:12px system-ui,sans-serif;font-variant-numeric:tabular-nums}
svg .tick{fill:var(--dim)}svg .label{font-size:12.5px}svg .value{font-size:11px}
svg .grid{stroke:var(--line);stroke-width:1}svg .axis{stroke:var(--dim);stroke-width:1}
svg .mark{stroke:var(--dim);stroke-width:1;stroke-dasharray:3 4}
svg .line{fill:none;stroke-width:1.8;stroke-linejoin:round}
"""
    + "".join(
        f".line.s{n}{{stroke:var(--c{n})}}.dot.s{n},.bar.s{n}{{fill:var(--c{n})}}i.s{n}{{background:var(--c{n})}}"
        for n in range(8)
    )
    + """
.wide{overflow-x:auto}
table{border-collapse:collapse;font-size:13.5px;font-variant-numeric:tabular-nums}
th,td{text-align:left;padding:4px 16px 4px 0;border-bottom:1px solid var(--line);vertical-align:top}
th{color:var(--dim);font-weight:600}td:last-child{overflow-wrap:anywhere}
details{margin-top:28px}summary{cursor:pointer;font-size:18px;font-weight:600}
pre{background:var(--card);border:1px solid var(--line);border-radius:8px;padding:12px;overflow-x:auto;font-size:12.5px}
@media print{details{display:block}figure{break-inside:avoid}}
"""
)
